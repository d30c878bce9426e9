"""GCFL: the card's golden numbers, reductions, and correct splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.core.federation import Federation
from atoll.core.graph import Graph, View, make_graph
from atoll.core.optim import SGD
from atoll.core.tree import Tree, leaves, named_leaves, take, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import RECIPES, make_config, read_config, resolve
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import GCFL, FedAvg
from atoll.methods.gcfl import (
    Server,
    Split,
    _moved,
    cluster_tree,
    clusters,
    gram,
    minimum_cut,
    norm,
    update_norms,
    warped_distances,
)
from atoll.nn import GCN, GraphGIN
from atoll.testing import (
    CLASSES,
    FEATURES,
    check_method,
    double_precision,
    small_federation,
    small_graph_federation,
)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


FILES = sorted((RECIPES / "gcfl").glob("*.toml"))
ROWS = [[1, 0.1, 0], [0.9, 0.2, 0.1], [-1, 0.1, 0.05], [-0.9, -0.1, 0.1], [0.95, 0, -0.05]]
SIZES = [80, 40, 60, 100, 20]
NORMS = [
    [0.50, 0.42, 0.45, 0.40, 0.38],
    [0.52, 0.47, 0.41, 0.43, 0.36],
    [1.20, 0.90, 1.10, 0.80, 0.95],
    [1.10, 1.15, 0.85, 0.90, 0.88],
]
NODE_NET, GRAPH_NET = GCN(FEATURES, CLASSES, hidden=6), GraphGIN(FEATURES, CLASSES, hidden=5)
CUT_NOW = {"min_round": 0, "eps1": 1e9, "eps2": 0.0}


def updates() -> Tensor:
    with double_precision():
        return 0.1 * torch.tensor(ROWS)


def server(net: GCN = NODE_NET, method: GCFL | None = None, total: int = 5) -> Server:
    made = Federation(small_federation((9,) * total).graphs, CLASSES)
    method = method or GCFL(net)
    return method.init(Simulation(made, method).clients(-1))


# The card's numbers


def test_cosines_and_their_cut() -> None:
    method = GCFL(NODE_NET)
    alike = method._similarity(server(), list(range(5)), gram({"w": updates()}))
    first = [2, 1.987138, 0.021013, 0.006102, 1.993662]
    assert alike[0].tolist() == pytest.approx(first, abs=1e-6)
    cut, sides = minimum_cut(alike)
    assert cut == pytest.approx(0.131526, abs=1e-6)
    assert sides == ([0, 1, 4], [2, 3])


def test_the_criterion() -> None:
    products, weight = gram({"w": updates()}), torch.tensor(SIZES, dtype=torch.float64)
    everyone = torch.ones(1, 5, dtype=torch.bool)
    plain, largest = update_norms(products, everyone, weight, "plain")
    assert (float(plain), float(largest)) == pytest.approx((0.020322, 0.100623), abs=1e-6)
    weighted, _ = update_norms(products, everyone, weight, "weighted")
    assert float(weighted) == pytest.approx(0.008333, abs=1e-6)


@dataclass
class Everyone:
    """All clients, in a late round."""

    total: int = 5
    round: int = 99

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.total)


@pytest.mark.parametrize(
    ("eps1", "mean", "split"),
    [(0.03, "plain", True), (0.015, "plain", False), (0.015, "weighted", True)],
)
def test_who_splits(eps1: float, mean: Any, split: bool) -> None:
    method = GCFL(NODE_NET, eps1=eps1, eps2=0.09, mean=mean)
    weight = torch.tensor(SIZES, dtype=torch.float64)
    start, products, everyone = server(), gram({"w": updates()}), Everyone()
    start = replace(start, played=torch.tensor(99))
    found = method._criterion(start, products, weight, everyone.positions)
    assert found.met.tolist() == [split, False, False, False, False]
    made = method._split(start, products, found, everyone)  # type: ignore[arg-type]
    assert clusters(made) == ([[0, 1, 4], [2, 3]] if split else [[0, 1, 2, 3, 4]])
    if split:
        (line,) = cluster_tree(made)
        assert line[:3] == (99, (0, 1, 4), (2, 3))
        assert line.max_norm == pytest.approx(0.100623, abs=1e-6)
        assert line.cut == pytest.approx(0.131526, abs=1e-6)


@pytest.mark.parametrize(
    ("update", "expected"),
    [("mean", [0.396429, 0.211429, 0.102143]), ("sum", [0.585, 0.23, 0.105])],
)
def test_a_cluster_moves_by_the_mean_or_the_sum_of_its_updates(
    update: str, expected: list[float]
) -> None:
    theta = torch.tensor([0.3, 0.2, 0.1])
    start = replace(
        server(), models={"w": theta.expand(5, 3).clone()}, cluster=torch.tensor([0, 0, 1, 1, 0])
    )
    weight = torch.tensor(SIZES, dtype=torch.float64)
    moved = _moved(start, {"w": updates()}, weight, torch.arange(5), update)["w"]
    for member in (0, 1, 4):
        assert moved[member].tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(moved[0], moved[4])


@pytest.mark.parametrize(("across", "cut", "sizes"), [(1.2, 6.8, {1, 5}), (0.3, 2.7, {3})])
def test_even_similarities_isolate_one_client(across: float, cut: float, sizes: set) -> None:
    block = torch.arange(6) // 3
    alike = torch.where(block.unsqueeze(0) == block.unsqueeze(1), 1.6, across)
    found, sides = minimum_cut(alike)
    assert found == pytest.approx(cut)
    assert {len(side) for side in sides} == sizes


def upper(matrix: Tensor) -> list[float]:
    return matrix[tuple(torch.triu_indices(len(matrix), len(matrix), 1))].tolist()


def test_warped_distances_and_their_cut() -> None:
    distance = warped_distances(torch.tensor(NORMS), standardize=False)
    expected = [0.055678, 1.275853, 1.246154, 1.268227, 1.218072, 0.249800]
    assert upper(distance) == pytest.approx(expected, abs=1e-6)
    assert torch.equal(distance, distance.T)
    method = GCFL(NODE_NET, similarity="gradient-norms")
    made = replace(server(total=4), norms=torch.tensor(NORMS))
    alike = method._similarity(made, [0, 1, 2, 3], torch.zeros(4, 4))
    weights = [1.220175, 0, 0.029699, 0.007626, 0.057780, 1.026053]
    assert upper(alike) == pytest.approx(weights, abs=1e-6)
    cut, sides = minimum_cut(alike)
    assert (cut, sides) == (pytest.approx(0.095105, abs=1e-6), ([0, 1], [2, 3]))


def test_standardised_sequences() -> None:
    distance = warped_distances(torch.tensor(NORMS), standardize=True)
    expected = [4.037171, 6.987507, 4.849371, 2.060603, 1.422968, 2.011734]
    assert upper(distance) == pytest.approx(expected, abs=1e-6)
    assert minimum_cut(distance.max() - distance)[1] == ([0], [1, 2, 3])
    constant = warped_distances(torch.ones(3, 4), standardize=True)
    assert not constant.any()


@given(st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=2, max_size=4))
@settings(max_examples=30, deadline=None)
def test_warping_never_exceeds_the_straight_path(values: list[list[float]]) -> None:
    sequences = torch.tensor(values, dtype=torch.float64)
    distance = warped_distances(sequences, standardize=False)
    straight = torch.cdist(sequences, sequences)
    assert (distance <= straight + 1e-6).all()
    assert not distance.diagonal().any()


# Reductions


def run(method: Any, federation: Federation, engine: str = "fused", **more: Any) -> Run:
    return Experiment(method, federation, engine=engine, **{"rounds": 3, **more}).run()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(
    ("net", "make"), [(NODE_NET, small_federation), (GRAPH_NET, small_graph_federation)]
)
def test_without_a_split_it_is_fedavg(net: Any, make: Any, fraction: float) -> None:
    ours = run(GCFL(net), make(), fraction=fraction)
    average = run(FedAvg(net, weight_by="train"), make(), fraction=fraction)
    for row in range(4):
        model = take(ours.server.models, row)
        for one, other in zip(leaves(model), leaves(average.server), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert clusters(ours.server) == [[0, 1, 2, 3]]


def test_the_sum_of_one_client_is_its_mean() -> None:
    models = [
        run(GCFL(NODE_NET, update=update), small_federation((13,))).server.models
        for update in ("sum", "mean")
    ]
    for one, other in zip(*map(leaves, models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_clients_on_their_own_train_alone() -> None:
    method = GCFL(NODE_NET, min_size=1, **CUT_NOW)
    made = run(method, small_federation(), rounds=4)
    assert sorted(len(own) for own in clusters(made.server)) == [1, 1, 1, 1]
    # The deployed model of a cluster of one is the one that its only client just trained.
    for name in ("loss", "accuracy"):
        pair = [made.history.array(scored, name, "val")[-1] for scored in ("deployed", "local")]
        assert pair[0].tolist() == pytest.approx(pair[1].tolist(), abs=1e-9)


# Splits


@dataclass(frozen=True)
class Pull:
    """Cross entropy 1 + ‖w - x‖²/2: every client wants to be where its features are."""

    views: ClassVar[Mapping[str, View]] = {}

    def init(self, key: Tensor) -> Tree:
        return {"w": torch.zeros(2)}

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        q = 1 + (params["w"] - graph.x).square().sum(-1) / 2
        return torch.stack([torch.zeros_like(q), torch.log(torch.expm1(q))], dim=-1)


def wants(x: float, y: float, nodes: int) -> Graph:
    """A client whose nodes all ask for the same place."""
    none, labels = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(nodes, dtype=torch.int64)
    return make_graph(torch.tensor([[x, y]] * nodes), none, labels, train=torch.ones(nodes))


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_that_disagree_are_told_apart_and_each_side_gets_what_it_wants(engine: str) -> None:
    places = [(1.0, 0.1), (-1.0, 0.0), (0.9, 0.0), (-1.1, 0.1), (1.1, -0.1), (-0.9, 0.0)]
    federation = Federation(tuple(wants(*place, nodes=3) for place in places), 2)
    method = GCFL(Pull(), SGD(lr=0.1), eps1=0.05, eps2=0.1, min_round=2)
    made = run(method, federation, engine, rounds=30)
    assert clusters(made.server) == [[0, 2, 4], [1, 3, 5]]
    (line,) = cluster_tree(made.server)
    assert isinstance(line, Split)
    # Round three is the first that may split: the mean has nearly stopped, the clients have not.
    assert line[:3] == (2, (0, 2, 4), (1, 3, 5))
    assert line.mean_norm < 0.05
    assert line.max_norm > 0.1
    means = torch.tensor(places).reshape(3, 2, 2).mean(0)
    torch.testing.assert_close(made.server.models["w"][:2], means, atol=1e-2, rtol=0)


@pytest.mark.parametrize("similarity", ["gradient-norms", "update-norms"])
def test_sequences_grow_and_start_anew_after_a_split(similarity: Any) -> None:
    method = GCFL(NODE_NET, similarity=similarity, seq_length=3, **CUT_NOW)
    federation = small_federation((9, 13, 17, 22, 12))
    for rounds, recorded, count in ((2, 2, 1), (3, 0, 2), (5, 2, 2), (6, 0, 3)):
        made = run(method, federation, rounds=rounds)
        assert made.server.recorded.tolist() == [recorded] * 5, rounds
        assert len(clusters(made.server)) == count, rounds
        assert [line.round for line in cluster_tree(made.server)] == [2, 5][: count - 1]
        assert (made.server.norms[:, -1] > 0).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_norms_that_clients_send(engine: str) -> None:
    federation = small_graph_federation()
    net = replace(GRAPH_NET, dropout=0.0)
    sent = {}
    for similarity in ("gradient-norms", "update-norms", "cosine"):
        method = GCFL(net, SGD(lr=0.1), epochs=1, similarity=similarity)
        simulation = Simulation(federation, method, engine=engine)
        start = method.init(simulation.clients(-1))
        everyone = simulation.clients(0)
        method.round(start, everyone)
        sent[similarity] = everyone.replies["train"]
    assert sent["cosine"].norm is None
    moved = tree_map(torch.sub, sent["update-norms"].model, start.models)
    for client in range(4):
        expected = norm(take(moved, client))
        assert float(sent["update-norms"].norm[client]) == pytest.approx(float(expected))
    # One plain full-batch step from the start moves by lr times the gradient; 1 and 2 have batches.
    for client in (0, 3):
        steepness = float(sent["gradient-norms"].norm[client])
        assert steepness == pytest.approx(float(norm(take(moved, client))) / 0.1)


def test_a_cluster_is_split_only_when_all_its_members_are_there() -> None:
    made = run(GCFL(NODE_NET, **CUT_NOW), small_federation(), fraction=0.5, rounds=6)
    assert clusters(made.server) == [[0, 1, 2, 3]]
    assert len({float(leaf[0].sum() - leaf[3].sum()) for leaf in leaves(made.server.models)}) == 1


def test_small_clusters_and_early_rounds_stay() -> None:
    early = run(GCFL(NODE_NET, eps1=1e9, eps2=0.0, min_round=3), small_federation(), rounds=3)
    assert clusters(early.server) == [[0, 1, 2, 3]]
    pair = run(GCFL(NODE_NET, **CUT_NOW), small_federation((9, 13)), rounds=3)
    assert clusters(pair.server) == [[0, 1]]


# What the server writes down


def test_all_norms_are_kept_and_they_are_those_of_the_splits() -> None:
    method = GCFL(NODE_NET, **CUT_NOW)
    made = run(method, small_federation((9, 13, 17, 22, 12)), rounds=4)
    assert made.server.trace.shape == (4, 2, 5)
    own, together = made.server.trace.unbind(1)
    for split in cluster_tree(made.server):
        members = [*split.stay, *split.leave]
        assert float(own[split.round, members].max()) == pytest.approx(split.max_norm)
        assert together[split.round, members].tolist() == pytest.approx(
            [split.mean_norm] * len(members)
        )
    # By itself in a cluster, a client is its own mean; in company the mean is never longer.
    alone = [members[0] for members in clusters(made.server) if len(members) == 1]
    assert alone
    torch.testing.assert_close(own[-1, alone], together[-1, alone])
    largest = own[0].max()
    assert (together[0] <= largest).all()


def test_norms_of_who_was_absent_are_not_made_up() -> None:
    made = run(GCFL(NODE_NET), small_federation(), fraction=0.5, rounds=3)
    absent = made.server.trace < 0
    assert absent.sum(-1).tolist() == [[2, 2]] * 3
    assert (made.server.trace[absent] == -1).all()
    assert torch.equal(absent[:, 0], absent[:, 1])


def test_models_are_put_aside_in_the_round_before_a_split() -> None:
    method = GCFL(NODE_NET, eps1=1e9, eps2=0.0, min_round=1)
    made = run(method, small_federation((9, 13, 17, 22, 12)), rounds=4)
    first, second = cluster_tree(made.server)[:2]
    assert (first.round, second.round) == (1, 2)
    for client, rounds in enumerate(made.history.cached):
        again = client in (*second.stay, *second.leave)
        assert rounds[:2] == ([0, 1] if again else [0])
    # Before the very first round there is nothing to put aside.
    at_once = run(GCFL(NODE_NET, **CUT_NOW), small_federation(), rounds=1)
    assert cluster_tree(at_once.server)[0].round == 0
    assert at_once.history.cached == [[]] * 4


# Recipes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("preset", [{}, {"preset": "plus"}])
def test_recipes_can_be_run(path: Path, preset: dict[str, str]) -> None:
    given = read_config(path)
    config, rules = resolve(make_config(**{**given, "set": {**given["set"], **preset}}))
    method = build_method(config, features=10, classes=2, task="graph")
    assert isinstance(method, GCFL)
    assert method.similarity == ("gradient-norms" if preset else "cosine")
    published = rules.of_data[path.stem]
    assert {name: getattr(method, name) for name in published} == published
    assert (method.net.layers, method.net.hidden, method.net.dropout) == (3, 64, 0.5)
    assert (method.optimizer.lr, method.optimizer.weight_decay) == (1e-3, 5e-4)
    assert (rules.name, rules.select, config.rounds, method.epochs) == ("gcfl", "last", 200, 1)
    # The recipe equals the choice of the protocol.
    bare, _ = resolve(make_config(method="gcfl", data=given["data"], protocol="gcfl"))
    assert (config.batch_size, config.clients) == (bare.batch_size, bare.clients)


def test_every_table_of_the_paper_has_its_recipes() -> None:
    tables = {"nci1", "proteins", "imdb-binary", "molecules", "biochem", "mix"}
    assert {path.stem for path in FILES} == tables


# The contract, with splits


@dataclass(frozen=True)
class Eager(GCFL):
    """Splits from the first round on."""

    min_round: int = 0
    eps1: float = 1e9
    eps2: float = 0.0
    seq_length: int = 2


@dataclass(frozen=True)
class EagerPlus(Eager):
    """The same by gradient norms."""

    similarity: Any = "gradient-norms"


@pytest.mark.long
@pytest.mark.parametrize("method", [Eager, EagerPlus])
def test_contract_with_splits(method: type[GCFL]) -> None:
    check_method(method)


def test_a_checkpoint_keeps_the_cluster_tree(tmp_path: Any) -> None:
    experiment = Experiment(Eager(NODE_NET), small_federation(), rounds=3)
    path = tmp_path / "checkpoint"
    whole = experiment.run(checkpoint=path)
    again = experiment.run(checkpoint=path)
    assert cluster_tree(again.server) == cluster_tree(whole.server) != []
    assert [name for name, _ in named_leaves(again.server)] == [
        name for name, _ in named_leaves(whole.server)
    ]
