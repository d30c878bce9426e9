"""FGSSL: golden numbers, naive losses, honest views, what it reduces to, and its variants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph, with_views
from atoll.core.losses import cross_entropy
from atoll.core.random import dropout, fold, make_key, uniform
from atoll.core.tree import Tree, leaves
from atoll.engines.base import ENGINES
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import FGSSL, FedAvg, fgssl
from atoll.methods.fgssl import contrast, distil, edge_differences, kept_edges, neighbours
from atoll.nn import GCN, SGC
from atoll.nn.views import loop_adjacency
from atoll.testing import (
    CLASSES,
    FEATURES,
    check_method,
    double_precision,
    relabelled,
    small_federation,
)

engines = pytest.mark.parametrize("engine", ENGINES)
NET = GCN(FEATURES, CLASSES, hidden=6)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def prepared(method: FGSSL, size: int = 22) -> Graph:
    return with_views(small_federation((size,)).graphs[0], method.views)


def path() -> Graph:
    """0 - 1 - 2, an isolated node, and a loop that must not count."""
    edges = torch.tensor([[0, 1, 1, 2, 1], [1, 0, 2, 1, 1]])
    graph = make_graph(torch.ones(4, 1), edges, torch.zeros(4, dtype=torch.int64))
    return with_views(graph, {"loops": loop_adjacency})


# The card's numbers

LOCAL = [[2.0, 0, 0], [1, 1, 0], [0, 1, 1], [3, 2, 1]]
GLOBAL = [[1.0, 0, 0], [1, 0.5, 0], [0, 2, 1], [1, 2, 3]]


@pytest.mark.parametrize(("tau", "expected"), [(0.1, 0.645357), (0.5, 0.724270)])
def test_golden_contrast(tau: float, expected: float) -> None:
    a, b = torch.tensor([[1.0, 0], [0, 1], [1, 1]]), torch.tensor([[1, 0.1], [0.2, 1], [0, 1]])
    found = contrast(a, b, torch.tensor([0, 1, 1]), torch.ones(3), 2, tau)
    assert float(found) == pytest.approx(expected, abs=1e-6)


def test_golden_distillation() -> None:
    graph = path()
    given = neighbours(graph), torch.tensor(LOCAL), torch.tensor(GLOBAL)
    # The card's graph has three nodes; the isolated one here adds zero to the sum.
    found = distil(*given, torch.tensor([1.0, 1, 1, 0]), 0.5)
    assert float(found) == pytest.approx(0.011752, abs=1e-6)
    assert float(distil(*given, graph.real, 0.5)) == pytest.approx(0.011752 * 3 / 4, abs=1e-6)


def test_golden_edge_differences() -> None:
    given = neighbours(path()), torch.tensor(LOCAL), torch.tensor(GLOBAL)
    assert float(edge_differences(*given, 0.1)) == pytest.approx(5.580059, abs=1e-6)


# Naive losses


def naive_contrast(a: Tensor, b: Tensor, y: Tensor, tau: float) -> Tensor:
    """The paper's double sum, over training nodes only."""
    scores = torch.nn.functional.normalize(a) @ torch.nn.functional.normalize(b).T / tau
    log_p = torch.log_softmax(scores, dim=-1)
    alike = (y.unsqueeze(0) == y.unsqueeze(1)).double()
    return -((log_p * alike).sum(-1) / alike.sum(-1)).mean()


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("pairs", [1, 60, 1 << 21])
def test_contrast_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch, pairs: int, both: bool
) -> None:
    monkeypatch.setattr(fgssl, "PAIRS", pairs)
    a, b = (uniform(make_key(seed), (23, 4), torch.float64) - 0.5 for seed in (1, 2))
    y, mask = torch.arange(23) * 7 % 5 % 3, (torch.arange(23) % 4 != 0).double()
    train = mask > 0

    def ours(a: Tensor, b: Tensor) -> Tensor:
        return contrast(a, b, y, mask, 4, 0.1, both=both)

    def theirs(a: Tensor, b: Tensor) -> Tensor:
        return naive_contrast(a[train], b[train], y[train], 0.1)

    assert float(ours(a, b)) == pytest.approx(float(theirs(a, b)), abs=1e-12)
    by = (0, 1) if both else (0,)
    slopes = torch.func.grad(ours, by)(a, b), torch.func.grad(theirs, by)(a, b)
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_distillation_and_its_gradient() -> None:
    graph = prepared(FGSSL(NET))
    edges, inside = neighbours(graph), graph.views["loops"].to_dense()  # type: ignore[union-attr]
    inside = (inside - torch.eye(22)) > 0
    a, b = (uniform(make_key(seed), (22, 4), torch.float64) - 0.5 for seed in (1, 2))

    def naive(a: Tensor) -> Tensor:
        total = torch.zeros(())
        for v in range(22):
            near = inside[v].nonzero().squeeze(1)
            if len(near):
                s, t = (
                    torch.log_softmax(torch.cosine_similarity(z[v : v + 1], z[near]) / 0.5, 0)
                    for z in (a, b)
                )
                total = total + (t.exp() * (t - s)).sum()
        return total / 22

    def ours(a: Tensor) -> Tensor:
        return distil(edges, a, b, graph.real, 0.5)

    assert not inside[21].any()  # the last node is isolated
    assert float(ours(a)) == pytest.approx(float(naive(a)), abs=1e-12)
    torch.testing.assert_close(torch.func.grad(ours)(a), torch.func.grad(naive)(a))
    assert float(distil(edges, b, b, graph.real, 0.5)) == 0.0


def test_far_apart_neighbours_and_rows_of_zeros_stay_finite() -> None:
    edges, zeros = neighbours(path()), torch.zeros(4, 3)
    near = torch.tensor([[1.0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 0, 0]])
    y, mask = torch.tensor([0, 1, 1, 0]), torch.ones(4)
    for one in (zeros, near):
        for other in (zeros, near):
            for loss in (
                lambda z, b=other: distil(edges, z, b, mask, 1e-3),
                lambda z, b=other: contrast(z, b, y, mask, 2, 1e-3),
            ):
                assert torch.isfinite(loss(one))
                assert torch.isfinite(torch.func.grad(loss)(one)).all()


# Views


def test_views_are_what_the_thinner_graph_would_give() -> None:
    method = FGSSL(replace(NET, layers=3, dropout=0.0))
    graph, key = prepared(method), make_key(3)
    params = method.net.init(make_key(0))
    loops: Any = graph.views["loops"]
    stay = kept_edges(loops, graph.ids, fold(key, "edges"), 0.4) > 0
    pairs = torch.stack([loops.columns, loops.rows])[:, stay].long()
    columns = uniform(fold(key, "columns"), (FEATURES,), torch.float64) >= 0.5
    assert 0 < int(columns.sum()) < FEATURES
    thin = make_graph(graph.x * columns, pairs[:, pairs[0] != pairs[1]], graph.y)  # type: ignore[operator]
    assert 0 < thin.edges.shape[1] < graph.edges.shape[1]
    expected = method.net.embed(params, with_views(thin, method.net.views))
    found = method.embed_view(params, graph, key, 0.4, 0.5, training=False)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    whole = method.embed_view(params, graph, key, 0.0, 0.0, training=False)
    torch.testing.assert_close(whole, method.net.embed(params, graph), rtol=1e-12, atol=1e-12)


def test_edges_go_whole_at_the_asked_rate_and_follow_ids() -> None:
    graph = small_federation((300,)).graphs[0]

    def gone(graph: Graph, key: Tensor, rate: float) -> set[tuple[int, int]]:
        loops = loop_adjacency(graph)
        stay = kept_edges(loops, graph.ids, key, rate)
        ends = zip(graph.ids[loops.columns], graph.ids[loops.rows], stay.tolist(), strict=True)
        return {(int(u), int(v)) for u, v, kept in ends if not kept and u != v}

    edges = graph.edges.shape[1]
    for rate in (0.3, 0.8):
        lost = gone(graph, make_key(1), rate)
        assert len(lost) / edges == pytest.approx(rate, abs=0.05)
        assert lost == {(v, u) for u, v in lost}
        assert lost == gone(relabelled(graph, 7), make_key(1), rate)
        assert lost != gone(graph, make_key(2), rate)
    assert not gone(graph, make_key(1), 0.0)


def test_weights_of_edges_are_those_of_the_data() -> None:
    method = FGSSL(NET)
    plain = small_federation((13,)).graphs[0]
    weighted = replace(plain, edge_weight=plain.edge_weight * 3)
    graph = with_views(weighted, method.views)
    params = NET.init(make_key(0))
    found = method.embed_view(params, graph, make_key(1), 0.0, 0.0, training=False)
    torch.testing.assert_close(found, NET.embed(params, graph), rtol=1e-12, atol=1e-12)


# The loss of a step, and its variants


def by_hand(method: FGSSL, params: Tree, received: Tree, graph: Graph, key: Tensor) -> Tensor:
    """The terms put together from the naive ones and the tested views."""
    rates = (0.8, 0.5), (0.3, 0.3)
    taught = params if method.variant == "authors" else received
    a = method.embed_view(params, graph, fold(key, "strong"), *rates[0], True)
    b = method.embed_view(taught, graph, fold(key, "weak"), *rates[1], True)
    train = graph.train > 0
    error = cross_entropy(NET(params, graph, key), graph)
    if method.variant == "openfgl":
        a = dropout(torch.relu(a), fold(key, "heard"), graph.ids, NET.dropout)
        b = torch.relu(b)
        return error + 0.1 * edge_differences(neighbours(graph), a, b, 0.1)
    pairs = naive_contrast(a[train], b[train], graph.y[train], 0.1)
    if method.variant == "authors":
        return error + 3 * 0.5 * pairs
    return error + 2 * pairs + 3 * distil(neighbours(graph), a, b, graph.real, 0.5)


@pytest.mark.parametrize("variant", ["paper", "authors", "openfgl"])
def test_the_loss_and_who_is_trained_by_it(variant: Any) -> None:
    method = FGSSL(NET, lam_c=2.0, lam_d=3.0, variant=variant)
    graph, key = prepared(method), make_key(4)
    params, received, other = (NET.init(make_key(seed)) for seed in range(3))
    given = received, graph, key
    found = method.taught_loss(received, params, graph, key)
    assert float(found) == pytest.approx(float(by_hand(method, params, *given)), abs=1e-12)
    slopes = (
        torch.func.grad(method.taught_loss, argnums=1)(received, params, graph, key),
        torch.func.grad(lambda p: by_hand(method, p, *given))(params),
    )
    for one, expected in zip(*map(leaves, slopes), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-11)
    # The authors' code computes the global model's part and throws it away.
    heard = float(method.taught_loss(other, params, graph, key)) != float(found)
    assert heard is (variant != "authors")


def test_the_received_model_teaches_without_dropout() -> None:
    deep = replace(NET, layers=3)
    method = FGSSL(deep)
    graph, key = prepared(method), make_key(4)
    params, received = (deep.init(make_key(seed)) for seed in range(2))
    quiet = FGSSL(replace(deep, dropout=0.0))
    rates = method.weak_edges, method.weak_features
    taught = quiet.embed_view(received, graph, fold(key, "weak"), *rates, True)
    strong = method.embed_view(
        params, graph, fold(key, "strong"), method.strong_edges, method.strong_features, True
    )
    expected = cross_entropy(deep(params, graph, key), graph) + method.lesson(strong, taught, graph)
    torch.testing.assert_close(method.taught_loss(received, params, graph, key), expected)


@dataclass(frozen=True)
class AsTheAuthorsRun(FGSSL):
    """The authors' code."""

    variant: Any = "authors"


@dataclass(frozen=True)
class AsOpenFGLRuns(FGSSL):
    """OpenFGL's code."""

    variant: Any = "openfgl"
    optimizer_state: Any = "keep"


@pytest.mark.long
@pytest.mark.parametrize("method", [AsTheAuthorsRun, AsOpenFGLRuns])
def test_contract_of_the_variants(method: type[FGSSL]) -> None:
    check_method(method, rounds=2)


# Reductions and awkward clients


def run(method: Any, federation: Federation | None = None, **more: Any) -> Run:
    federation = small_federation() if federation is None else federation
    return Experiment(method, federation, **{"rounds": 3, **more}).run()


@engines
@pytest.mark.parametrize("keeping", ["keep", "reset"])
def test_without_lessons_it_is_fedavg(engine: str, keeping: Any) -> None:
    method = FGSSL(NET, lam_c=0.0, lam_d=0.0, optimizer_state=keeping)
    ours = run(method, engine=engine, fraction=0.75)
    plain = run(FedAvg(NET, optimizer_state=keeping), engine=engine, fraction=0.75)
    assert all(map(torch.equal, leaves(ours.server), leaves(plain.server)))
    assert ours.ledger.by_step()["train"] == plain.ledger.by_step()["train"]
    for lesson in ({"lam_c": 1.0}, {"lam_d": 1.0}):
        taught = run(replace(method, **lesson), engine=engine, fraction=0.75)
        pairs = zip(leaves(taught.server), leaves(plain.server), strict=True)
        assert not any(torch.allclose(one, other) for one, other in pairs)


def test_clients_without_edges_or_with_one_training_node() -> None:
    graphs = list(small_federation().graphs)
    none = torch.zeros(2, 0, dtype=torch.int64)
    graphs[0] = replace(graphs[0], edges=none, edge_weight=torch.zeros(0))
    graphs[1] = replace(graphs[1], train=(torch.arange(17) == 3).double())
    for engine in ("serial", "fused"):
        made = run(FGSSL(NET), Federation(tuple(graphs), CLASSES), engine=engine)
        assert all(torch.isfinite(leaf).all() for leaf in leaves(made.server))


# What it refuses


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tau": 0.0}, "tau is 0.0"),
        ({"omega": -1.0}, "omega is -1.0"),
        ({"weak_edges": 1.0}, "weak_edges is 1.0"),
        ({"weak_features": -0.1}, "weak_features is -0.1"),
        ({"strong_edges": 2.0}, "strong_edges is 2.0"),
        ({"strong_features": 1.0}, "strong_features is 1.0"),
    ],
)
def test_impossible_numbers(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FGSSL(NET, **wrong)


@pytest.mark.parametrize(
    ("net", "words"),
    [(SGC(FEATURES, CLASSES), "net=gcn"), (GCN(FEATURES, CLASSES, layers=1), "no hidden layer")],
)
def test_impossible_networks(net: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FGSSL(net)
