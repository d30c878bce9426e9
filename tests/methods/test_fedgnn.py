"""FedGNN: twins found by hand, the widened layer against a dense one, FedAvg without twins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.core.dp import clipped
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph
from atoll.core.method import Net
from atoll.core.optim import SGD, Adam
from atoll.core.random import fold, make_key, uniform
from atoll.core.tree import leaves, take, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.rounds import Experiment
from atoll.methods import FedAvg, FedGNN
from atoll.methods.fedgnn import (
    Download,
    Private,
    Twins,
    laplace,
    match,
    neighbourhood_keys,
    of_others,
)
from atoll.nn import GCN, MLP
from atoll.testing import (
    CLASSES,
    FEATURES,
    Case,
    check_client_order,
    check_engines,
    check_node_order,
    check_resume,
    check_steps,
    double_precision,
    small_federation,
)

engines = pytest.mark.parametrize("engine", ENGINES)
WIDTH = 12
NET = GCN(FEATURES, CLASSES, hidden=WIDTH)
QUIET = replace(NET, dropout=0.0)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def make(ids: list[int], pairs: list[tuple[int, int]], seed: int = 0) -> Graph:
    """A client with nodes of the whole graph and undirected edges between them, by their ids."""
    place = {number: row for row, number in enumerate(ids)}
    ends = torch.tensor([[place[a], place[b]] for a, b in pairs]).reshape(-1, 2).T
    x = uniform(fold(make_key(seed), "x"), (len(ids), FEATURES), torch.float64)
    return make_graph(
        x,
        torch.cat([ends, ends.flip(0)], dim=1),
        torch.arange(len(ids)) % CLASSES,
        train=torch.arange(len(ids)) % 2 == 0,
        val=torch.arange(len(ids)) % 2 == 1,
        test=torch.arange(len(ids)) % 2 == 1,
        ids=torch.tensor(ids, dtype=torch.int32),
    )


def card() -> Federation:
    """The card's two clients, which share node 2. Nodes 0 and 1 of one have the twin 5."""
    return Federation((make([0, 1, 2], [(0, 2), (1, 2)]), make([5, 2], [(5, 2)], 1)), CLASSES)


def overlapping() -> Federation:
    """Four clients of one graph: 1 and 2 are hubs with spread leaves, and 3 shares no edge."""
    clients = [
        make([1, 10, 11, 2, 12], [(1, 10), (1, 11), (1, 2), (2, 12)]),
        make([13, 1, 2, 14, 15, 30], [(13, 1), (2, 14), (14, 1), (15, 1)], 1),
        make([16, 1, 2, 17], [(16, 1), (1, 2), (17, 2), (16, 2)], 2),
        make([20, 21, 22], [(20, 21), (21, 22)], 3),
    ]
    return Federation(tuple(clients), CLASSES)


def disjoint() -> Federation:
    """Clients without a common node."""
    graphs = small_federation().graphs
    return Federation(
        tuple(replace(g, ids=g.ids + 1000 * number) for number, g in enumerate(graphs)), CLASSES
    )


def started(method: FedGNN, federation: Federation, engine: str = "serial") -> tuple[Any, Any]:
    simulation = Simulation(federation, method, engine=engine)
    return simulation, method.init(simulation.clients(-1))


# Keys and twins


@engines
def test_twins_of_the_card(engine: str) -> None:
    simulation, server = started(FedGNN(NET), card(), engine)
    assert int(server.pairs) == 2
    assert server.group.tolist() == [[0, 0], [0, -1]]
    noted = [state.nodes.tolist() for state in simulation.engine.export_states()]
    assert noted == [[0, 1], [0, -1]]


def test_keys_are_of_sets_of_ids() -> None:
    one = neighbourhood_keys(make([0, 1, 2, 9], [(0, 2), (1, 2)]), 0)
    assert one[0] == one[1] != 0
    assert one[2] not in (0, one[0])
    assert one[3] == 0, "a node without neighbours has no key"
    # The numbering inside a client, repeated edges and self-loops do not matter.
    moved = neighbourhood_keys(make([2, 0, 1], [(2, 1), (0, 2), (2, 0), (2, 2)]), 0)
    assert moved.flatten().tolist() == [one[2], one[0], one[1]]
    assert neighbourhood_keys(make([0, 1, 3], [(0, 3), (1, 3)]), 0)[0] != one[0]
    assert neighbourhood_keys(make([0, 1, 2, 9], [(0, 2), (1, 2)]), 1)[0] != one[0]


def test_isolated_nodes_are_nobodys_twins() -> None:
    both = Federation((make([0, 1, 7], [(0, 1)]), make([2, 3, 8], [(2, 3)])), CLASSES)
    _, server = started(FedGNN(NET), both)
    assert (int(server.pairs), server.group.shape[1]) == (0, 0)


def test_pairs_by_counting_all() -> None:
    keys = torch.tensor([[4, 4, 9, 0, 3], [9, 4, 8, 8, 0], [4, 9, 8, 7, 7]])
    nodes, group, pairs = match(keys)
    counted = sum(
        int(keys[a, i]) == int(keys[b, j]) != 0
        for a in range(3) for b in range(a) for i in range(5) for j in range(5)
    )  # fmt: skip
    assert int(pairs) == counted == 10
    assert nodes.tolist() == [[0, 1, 2, -1], [1, 2, 3, 0], [0, 2, 1, -1]]
    assert group.tolist() == [[0, 0, 2, -1], [0, 1, 1, 2], [0, 1, 2, -1]]


def test_sums_are_over_other_clients() -> None:
    group = torch.tensor([[0, 0, 1], [0, 2, -1], [1, 0, 2]])
    rows = torch.arange(18.0).reshape(3, 3, 2)
    found = of_others(rows, group, groups=5)
    for a in range(3):
        for i in range(3):
            twins = [
                rows[b, j] for b in range(3) for j in range(3)
                if b != a and group[b, j] == group[a, i] != -1
            ]  # fmt: skip
            assert found.count[a, i] == len(twins)
            assert found.total[a, i].tolist() == sum(twins, torch.zeros(2)).tolist()


# The widened layer


def dense_logits(params: Any, graph: Graph, twins: dict[int, Tensor]) -> Tensor:
    """A GCN of two layers by the formula, with (c, h) embeddings by node in `twins`."""
    size = graph.num_nodes
    a = torch.eye(size).index_put((graph.edges[1], graph.edges[0]), torch.tensor(1.0))
    scale = a.sum(1).rsqrt()
    h = (scale.unsqueeze(1) * a * scale) @ graph.x @ params[0]["weight"] + params[0]["bias"]
    counts = torch.tensor([float(len(twins.get(v, ()))) for v in range(size)])
    sums = [twins[v].sum(0) if v in twins else torch.zeros(WIDTH) for v in range(size)]
    degree = a.sum(1) + counts
    inside = (degree.rsqrt().unsqueeze(1) * a * degree.rsqrt()) @ torch.relu(h)
    return (inside + torch.stack(sums) / degree.unsqueeze(1)) @ params[1]["weight"] + params[1][
        "bias"
    ]


def test_twins_are_neighbours_in_the_second_layer() -> None:
    method = FedGNN(QUIET)
    graph = card().prepared(method.views).graphs[0]
    params = QUIET.init(make_key(3))
    rows = {0: torch.rand(2, WIDTH), 2: torch.rand(1, WIDTH)}
    total = torch.stack([rows[0].sum(0), rows[2].sum(0), torch.zeros(WIDTH)])
    own = Private(torch.tensor([0, 2, -1]), Twins(total, torch.tensor([2.0, 1.0, 0.0])), None)
    expected = dense_logits(params, graph, rows)
    torch.testing.assert_close(method.predict(graph, params, own), expected)
    assert not torch.allclose(QUIET(params, graph), expected)
    # Without twins the same formula is the plain network.
    torch.testing.assert_close(QUIET(params, graph), dense_logits(params, graph, {}))


@engines
def test_one_round_by_hand(engine: str) -> None:
    method = FedGNN(QUIET, SGD(lr=0.1), epochs=1)
    simulation, server = started(method, card(), engine)
    everyone = simulation.clients(0)
    after = method.round(server, everyone)
    graphs, params = card().prepared(method.views).graphs, server.model
    first = [torch.relu(QUIET.embed(params, graph)) for graph in graphs]
    assert first[0][:2].any(1).all()
    assert first[1][0].any()
    twins = [{0: first[1][:1], 1: first[1][:1]}, {0: first[0][:2]}]
    for number, graph in enumerate(graphs):
        got = simulation.engine.export_states()[number].twins
        assert got.count.tolist() == [[1.0, 1.0], [2.0, 0.0]][number]

        def loss(params: Any, graph: Graph = graph, number: int = number) -> Tensor:
            logits = dense_logits(params, graph, twins[number])
            chosen = torch.log_softmax(logits, -1)[torch.arange(graph.num_nodes), graph.y]
            return -(chosen * graph.train).sum() / graph.train.sum()

        slope = torch.func.grad(loss)(params)
        mine = take(everyone.replies["train"].model, number)
        for ours, start, by in zip(*map(leaves, (mine, params, slope)), strict=True):
            torch.testing.assert_close(ours, start - 0.1 * by, rtol=1e-9, atol=1e-9)
    for ours, each in zip(
        *map(leaves, (after.model, everyone.replies["train"].model)), strict=True
    ):
        torch.testing.assert_close(ours, (3 * each[0] + 2 * each[1]) / 5)


def test_only_embeddings_of_twins_are_uploaded() -> None:
    method = FedGNN(QUIET)
    simulation, server = started(method, card())
    everyone = simulation.clients(0)
    method.round(server, everyone)
    rows = everyone.replies["embed"].rows
    assert rows.shape == (2, 2, WIDTH)
    assert rows[1, 0].any()
    assert not rows[1, 1].any()


# Participation, and what it reduces to


def test_twins_of_absent_clients_are_not_there() -> None:
    method = FedGNN(QUIET)
    simulation, server = started(method, overlapping())
    assert int(server.pairs) > 3
    alone = replace(simulation.clients(0), positions=torch.tensor([1]))
    method.round(server, alone)
    states = simulation.engine.export_states()
    assert not states[1].twins.count.any()
    assert states[0].twins is None
    two = replace(simulation.clients(1), positions=torch.tensor([0, 1]))
    method.round(server, two)
    states = simulation.engine.export_states()
    # The leaves 10 and 11 of the first client and 13, 15 of the second hang on hub 1.
    by_node = dict(zip(states[0].nodes.tolist(), states[0].twins.count.tolist(), strict=True))
    assert (by_node[1], by_node[2]) == (2.0, 2.0)


def test_rounds_with_twins_are_recorded() -> None:
    how = {"rounds": 4, "engine": "fused"}
    plain = Experiment(FedGNN(NET), overlapping(), replay=False, **how).run()
    recorded = Experiment(FedGNN(NET), overlapping(), replay=True, **how).run()
    assert recorded.replay is not None
    assert recorded.replay.how == "rounds are recorded and replayed"
    for scored, scores in plain.history.scores.items():
        np.testing.assert_allclose(recorded.history.scores[scored], scores, atol=1e-6)


def same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, leaves(a), leaves(b)))


@engines
def test_without_common_nodes_it_is_fedavg_bit_for_bit(engine: str) -> None:
    gnn, avg = (
        Experiment(method, disjoint(), rounds=3, engine=engine, fraction=0.75).run()
        for method in (FedGNN(NET), FedAvg(NET))
    )
    assert int(gnn.server.pairs) == 0
    assert same(gnn.server.model, avg.server)
    for scored, rounds in avg.history.scores.items():
        np.testing.assert_array_equal(rounds, gnn.history.scores[scored])
    assert gnn.ledger.by_step()["train"] == avg.ledger.by_step()["train"]
    assert "embed" not in gnn.ledger.by_step()


def test_with_common_nodes_it_is_not_fedavg() -> None:
    gnn, avg = (
        Experiment(method, overlapping(), rounds=2).run() for method in (FedGNN(NET), FedAvg(NET))
    )
    assert int(gnn.server.pairs) == brute_force_pairs()
    assert not torch.allclose(gnn.server.model[0]["weight"], avg.server[0]["weight"], atol=1e-4)
    table, slots = gnn.ledger.by_step(), gnn.server.group.shape[1]
    assert table["embed"]["up"] == 8 * 8 * slots * NET.hidden
    size = sum(leaf.numel() for leaf in leaves(avg.server))
    assert table["train"]["down"] == 8 * 8 * (size + slots * (NET.hidden + 1))


def brute_force_pairs() -> int:
    sets = []
    for graph in overlapping().graphs:
        near: dict[int, set[int]] = {}
        for a, b in graph.ids[graph.edges].T.tolist():
            near.setdefault(a, set()).add(b)
        sets.append(list(near.values()))
    return sum(a == b for i, one in enumerate(sets) for two in sets[:i] for a in one for b in two)


@pytest.mark.long
@pytest.mark.parametrize(
    "net", [NET, GCN(FEATURES, CLASSES, hidden=WIDTH, layers=3, head="linear")]
)
def test_contract_with_twins(net: GCN) -> None:
    method, federation = FedGNN(net), overlapping()
    case = Case(method, federation, rounds=2)
    check_steps(case)
    check_engines(case)
    check_engines(replace(case, rounds=3, fraction=0.5))
    check_client_order(replace(case, fraction=0.5))
    check_node_order(case)
    check_resume(case)


def test_moments_of_the_optimizer_can_be_reset() -> None:
    def ages(**options: Any) -> set[float]:
        made = Experiment(FedGNN(NET, Adam(), **options), overlapping(), rounds=2).run()
        return {float(state.moments.steps) for state in made.simulation.engine.export_states()}

    assert (ages(), ages(optimizer_state="reset")) == ({6.0}, {3.0})


# Local privacy


def test_clipping() -> None:
    update = {"a": torch.tensor([3.0, -4.0]), "b": torch.tensor([0.05])}
    short = clipped(update, 0.1)
    assert short["a"].tolist() == pytest.approx([0.059997, -0.079996], abs=1e-6)
    assert short["b"].tolist() == pytest.approx([0.001], abs=1e-6)
    assert same(clipped(update, 50.0), update)
    assert not clipped({"a": torch.zeros(2)}, 0.1)["a"].any()


def test_scale_of_the_noise() -> None:
    assert FedGNN(NET, clip=0.1, epsilon=1.0).scale == pytest.approx(0.2)
    assert FedGNN(NET, clip=0.1).scale == 0
    # The published code's noise, 0.01 * 2 * 0.1 / sqrt(32), is that of a far larger epsilon here.
    assert FedGNN(NET, clip=0.1, epsilon=32**0.5 / 0.01).scale == pytest.approx(
        0.000353553, abs=1e-9
    )


def test_noise_is_laplacian() -> None:
    noise = laplace(make_key(5), (200, 500), torch.float64)
    assert float(noise.mean()) == pytest.approx(0, abs=0.02)
    assert float(noise.abs().mean()) == pytest.approx(1, abs=0.02)
    assert float(noise.var()) == pytest.approx(2, abs=0.06)
    assert torch.isfinite(noise).all()


@engines
def test_updates_are_cut_and_noised(engine: str) -> None:
    def update(**options: Any) -> Tensor:
        method = FedGNN(QUIET, SGD(lr=5.0), epochs=2, **options)
        simulation, server = started(method, disjoint(), engine)
        everyone = simulation.clients(0)
        method.round(server, everyone)
        sent = everyone.replies["train"].model
        moved = tree_map(lambda after, before: after - before, sent, server.model)
        return torch.cat([leaf.flatten(1) for leaf in leaves(moved)], dim=1)

    free, cut, noisy = update(), update(clip=0.1), update(clip=0.1, epsilon=2.0)
    assert bool((free.norm(dim=1) > 0.1).all())
    assert cut.norm(dim=1).tolist() == pytest.approx([0.1] * 4)
    assert torch.allclose(cut / 0.1, free / free.norm(dim=1, keepdim=True))
    noise = noisy - cut
    assert float(noise.abs().mean()) == pytest.approx(0.1, rel=0.2)
    assert not torch.allclose(noise[0], noise[1])


def test_every_layer_has_noise_of_its_own() -> None:
    still = {"a": torch.zeros(9), "b": torch.zeros(9)}
    noise = FedGNN(NET, clip=0.1, epsilon=2.0).hidden(still, still, make_key(3))
    assert not bool((noise["a"] == noise["b"]).any())


def test_a_small_message_without_twins_is_plain() -> None:
    method = FedGNN(QUIET)
    (graph,) = small_federation((13,)).prepared(method.views).graphs
    model = QUIET.init(make_key(0))
    reply, state = method.train(graph, Download(model, None), None, make_key(1))
    assert state.nodes is state.twins is None
    assert float(reply.weight) == 13


@pytest.mark.parametrize(
    ("net", "options", "words"),
    [
        (MLP(FEATURES, CLASSES), {}, "second convolution of a gcn"),
        (GCN(FEATURES, CLASSES, layers=1), {}, "second convolution of a gcn"),
        (GCN(FEATURES, CLASSES, head="linear"), {}, "second convolution of a gcn"),
        (NET, {"clip": -1.0}, "not negative"),
        (NET, {"clip": 1.0, "epsilon": -1.0}, "not negative"),
        (NET, {"epsilon": 1.0}, "give clip as well"),
    ],
)
def test_refused(net: Net, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedGNN(net, **options)
