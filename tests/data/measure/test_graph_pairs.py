"""Heterogeneity between clients' graphs: by hand on tiny graphs, and what it must not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph
from atoll.data.measure.heterogeneity import compare_graphs, some_graphs
from atoll.testing import relabelled, small_federation, small_graph_federation

LOG2 = float(np.log(2))


def client(kind: str, graphs: int, alike: bool) -> Graph:
    """Paths of two nodes, or triangles; linked nodes have equal features, or none in common."""
    size = 2 if kind == "path" else 3
    ends = [(0, 1)] if kind == "path" else [(0, 1), (1, 2), (0, 2)]
    one_way = torch.tensor([(size * g + a, size * g + b) for g in range(graphs) for a, b in ends]).T
    nodes = size * graphs
    place = torch.zeros(nodes, dtype=torch.int64) if alike else torch.arange(nodes) % size
    root = torch.arange(graphs).repeat_interleave(size) * size
    return make_graph(
        torch.nn.functional.one_hot(place, 3).float(),
        torch.cat([one_way, one_way.flip(0)], dim=1),
        torch.zeros(nodes, dtype=torch.int64),
        train=root == torch.arange(nodes),
        root=root,
    )


def test_by_hand() -> None:
    graphs = (client("path", 4, True), client("path", 3, False), client("triangle", 5, True))
    found = compare_graphs(Federation(graphs, 2), walks=4000)
    # On one edge every walk is 010101; on a triangle it is one of 2^4, that one among them.
    share = 1 / 16
    middle = (1 + share) / 2
    inner = np.log(16) / 2
    spread = -(middle * np.log(middle) + 15 * (share / 2) * np.log(share / 2))
    assert found.structure[0, 1] == 0
    assert found.structure[0, 2] == pytest.approx(np.sqrt(spread - inner), abs=0.01)
    assert found.structure[2, 2] < 0.06  # within a client: noise of the walks alone
    assert found.features[0, 2] == 0
    assert found.features[0, 1] == pytest.approx(LOG2)
    np.testing.assert_array_equal(found.features, found.features.T)


def test_clients_with_one_graph_have_no_pair_of_their_own() -> None:
    found = compare_graphs(small_federation(), walks=500)
    assert np.isnan(np.diagonal(found.structure)).all()
    upper = found.structure[np.triu_indices(4, 1)]
    assert ((upper > 0) & (upper < np.sqrt(LOG2))).all()


def test_graphs_are_drawn_and_the_order_of_clients_does_not_matter() -> None:
    federation = small_graph_federation()
    counts = [len(some_graphs(g, 6, np.random.default_rng(0))) for g in federation.graphs]
    assert counts == [6, 6, 6, 5]
    order = [2, 0, 3, 1]
    one = compare_graphs(federation, graphs=4, walks=200)
    other = compare_graphs(federation.reordered(order), graphs=4, walks=200)
    np.testing.assert_allclose(one.structure[np.ix_(order, order)], other.structure)
    np.testing.assert_allclose(one.features[np.ix_(order, order)], other.features)


def test_a_drawn_graph_is_the_clients_own() -> None:
    graph = small_graph_federation().graphs[1]
    everything = some_graphs(graph, 99, np.random.default_rng(0))
    assert sum(one.nodes for one in everything) == graph.num_nodes
    assert 2 * sum(one.pairs.shape[1] for one in everything) == graph.edges.shape[1]
    moved = some_graphs(relabelled(graph, 3), 99, np.random.default_rng(0))
    sizes = [
        sorted((one.nodes, one.pairs.shape[1]) for one in many) for many in (everything, moved)
    ]
    assert sizes[0] == sizes[1]
