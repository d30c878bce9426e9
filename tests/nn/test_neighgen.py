"""NeighGen: its losses, the mended graph and the draws, against loops and larger graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph, with_views
from atoll.core.random import make_key
from atoll.core.tree import Tree, leaves, structure
from atoll.methods import FedSagePlus
from atoll.nn import GraphSAGE
from atoll.nn.neighgen import (
    NeighGen,
    degree_loss,
    feature_loss,
    hide_nodes,
    made_neighbours,
    mended_sage,
    some_neighbours,
)
from atoll.testing import CLASSES, FEATURES, double_precision, small_federation
from tests.nn.neighgen_sizes import NET, SMALL


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def plus(**more: Any) -> FedSagePlus:
    return FedSagePlus(NET, **{**SMALL, **more})


def ready(method: FedSagePlus, federation: Federation | None = None) -> tuple[Graph, ...]:
    return (federation or small_federation()).prepared(method.views).graphs


def close(a: Tree, b: Tree, tolerance: float = 1e-12) -> None:
    assert structure(a) == structure(b)
    for one, other in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def test_losses_of_the_card() -> None:
    made = torch.tensor([[[0, 1], [0.5, 0.5]], [[1, 1], [0, 0]]], dtype=torch.float64)
    true = torch.tensor([[[1, 1], [0, 0]], [[0, 1], [1, 0]]], dtype=torch.float64)
    guess, count = torch.tensor([2.7, 1.2]), torch.tensor([1.0, 2.0])
    there = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    used = NeighGen(2, slots=2).used(guess)
    assert used.tolist() == [[1, 1], [1, 0]]
    both = torch.ones(2)
    assert float(feature_loss(made, true, used, there, both)) == pytest.approx(0.3125, abs=1e-12)
    assert float(degree_loss(guess, count, both)) == pytest.approx(0.76, abs=1e-12)
    # A node that is not asked about, padding for one, changes nothing.
    more = [torch.cat([t, t[:1] + 5]) for t in (made, true, used, there)]
    mask = torch.tensor([1.0, 1.0, 0.0])
    assert float(feature_loss(*more, mask)) == pytest.approx(0.3125, abs=1e-12)
    twice = (torch.cat([guess, guess]), torch.cat([count, count * 9]))
    found = degree_loss(*twice, torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert float(found) == pytest.approx(0.76, abs=1e-12)
    # Without a hidden neighbour there is nothing to compare with.
    assert float(feature_loss(made, true, used, torch.zeros(2, 2), both)) == 0


@pytest.mark.parametrize("features", [4, 1433])
def test_the_minimum_is_one_and_the_fault_takes_the_last(features: int) -> None:
    made = torch.zeros(1, 1, features)
    true = torch.tensor([0.1, 0.25]).sqrt().reshape(1, 2, 1).expand(1, 2, features)
    one = torch.ones(1)
    for there, nearest, last in (([1.0, 1.0], 0.1, 0.25), ([1.0, 0.0], 0.1, 0.1)):
        given = (made, true, torch.ones(1, 1), torch.tensor([there]), one)
        assert float(feature_loss(*given)) == pytest.approx(nearest, abs=1e-12)
        assert float(feature_loss(*given, last=True)) == pytest.approx(last, abs=1e-12)


def test_the_minimum_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    made, true = (torch.randn(9, k, 6, generator=generator) for k in (3, 4))
    there = (torch.arange(4) < torch.randint(5, (9, 1), generator=generator)).double()
    used = (torch.arange(3) < torch.randint(4, (9, 1), generator=generator)).double()
    total = 0.0
    for v in range(9):
        for p in range(int(used[v].sum())):
            gaps = [((made[v, p] - true[v, k]) ** 2).mean() for k in range(int(there[v].sum()))]
            total += float(min(gaps, default=0.0))
    found = feature_loss(made, true, used, there, torch.ones(9))
    assert float(found) == pytest.approx(total / 27, abs=1e-12)


def explicit(graph: Graph, kept: Tensor, made: Any) -> Graph:
    """The mended graph with made nodes as nodes: node v's k-th one is N + p v + k."""
    size, slots = made.linked.shape
    source, target = graph.edges[:, kept[graph.edges[0]] > 0]
    v, k = made.linked.nonzero(as_tuple=True)
    new = size + slots * v + k
    edges = torch.stack([torch.cat([source, v, new]), torch.cat([target, new, v])])
    x = torch.cat([graph.x, made.x.flatten(0, 1)])
    return make_graph(x, edges, torch.zeros(len(x)).long())


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_mended_graph_is_the_larger_graph(layers: int, hidden: bool) -> None:
    net = GraphSAGE(FEATURES, CLASSES, hidden=6, layers=layers)
    graph = with_views(small_federation().graphs[2], net.views)
    size, slots = graph.num_nodes, 3
    generator = torch.Generator().manual_seed(1)
    kept = (torch.rand(size, generator=generator) < 0.7).double() if hidden else graph.real
    heard = (
        torch.arange(slots) < torch.randint(slots + 1, (size, 1), generator=generator)
    ).double()
    x = torch.randn(size, slots, FEATURES, generator=generator)
    params = net.init(make_key(3))

    def ours(params: Tree, x: Tensor) -> Tensor:
        return mended_sage(net, params, graph, kept, made_neighbours(x, heard), None)

    def theirs(params: Tree, x: Tensor) -> Tensor:
        # By hand and with dense matrices: the mean over all neighbours in the larger graph.
        large = explicit(graph, kept, made_neighbours(x, heard))
        matrix = torch.zeros(len(large.y), len(large.y)).index_put(
            (large.edges[1], large.edges[0]), torch.ones(large.edges.shape[1]), accumulate=True
        )
        mean = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
        h = large.x
        for number, layer in enumerate(params):
            h = torch.relu(h) if number else h
            h = mean @ h @ layer["neighbour"] + h @ layer["self"] + layer["bias"]
        return h[:size]

    made = made_neighbours(x, heard)
    torch.testing.assert_close(ours(params, x), theirs(params, x), rtol=1e-12, atol=1e-12)
    large = with_views(explicit(graph, kept, made), net.views)
    torch.testing.assert_close(ours(params, x), net(params, large)[:size], rtol=1e-12, atol=1e-12)
    slopes = [torch.func.grad(lambda p, x, f=f: f(p, x).sin().sum(), argnums=(0, 1))(params, x)
              for f in (ours, theirs)]  # fmt: skip
    close(*slopes)


def test_without_made_nodes_it_is_the_network_itself() -> None:
    graph = with_views(small_federation().graphs[1], NET.views)
    params, key = NET.init(make_key(1)), make_key(9)
    nothing = made_neighbours(torch.ones(graph.num_nodes, 2, FEATURES), torch.zeros(17, 2))
    for made in (None, nothing):
        for noise in (None, key):  # with dropout as well: real nodes drop what they would drop
            found = mended_sage(NET, params, graph, graph.real, made, noise)
            torch.testing.assert_close(found, NET(params, graph, noise), rtol=1e-12, atol=1e-12)


def test_half_of_the_nodes_that_are_neither_for_training_nor_test_are_hidden() -> None:
    for number, graph in enumerate(ready(plus())):
        may = (1 - graph.train) * (1 - graph.test)
        lost = hide_nodes(make_key(number), graph, 0.5, 2)
        hidden = 1 - lost.kept
        assert float(hidden.sum()) == round(float(may.sum()) / 2)
        assert bool((hidden <= may).all())
        for v in range(graph.num_nodes):
            around = graph.edges[0][graph.edges[1] == v]
            gone = {u for u in around.tolist() if hidden[u]}
            assert lost.count[v] == len(gone)
            assert lost.there[v].sum() == min(len(gone), 2)
            assert {int(u) for u, t in zip(lost.index[v], lost.there[v], strict=True) if t} <= gone
    other = [hide_nodes(make_key(seed), graph, 0.5, 2).kept for seed in range(8)]
    assert len({tuple(kept.tolist()) for kept in other}) > 1


def test_neighbours_are_drawn_without_repetition_and_all_are_found() -> None:
    graph = ready(plus())[2]
    degree = [int((graph.edges[1] == v).sum()) for v in range(graph.num_nodes)]
    assert max(degree) > 3
    seen: dict[int, set[int]] = {v: set() for v in range(graph.num_nodes)}
    for seed in range(60):
        index, there = some_neighbours(make_key(seed), graph, graph.real, 3)
        for v in range(graph.num_nodes):
            found = index[v][there[v] > 0].tolist()
            assert len(set(found)) == len(found) == min(degree[v], 3)
            seen[v] |= set(found)
    for v, found in seen.items():
        assert found == set(graph.edges[0][graph.edges[1] == v].tolist())
