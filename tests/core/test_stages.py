"""Graphs that grow: the nodes and edges of each stage."""

from __future__ import annotations

from dataclasses import replace

import torch

from atoll.core.federation import LazyGraphs
from atoll.core.graph import Graph, make_graph, sparse_matrix
from atoll.core.stages import at_stage, rows_by_stage, staged, when_scored

EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
X = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0], [0.0, 5.0]])


def growing() -> Graph:
    """A ring with a chord, whose node 2 is for validation and node 0 for testing."""
    graph = make_graph(
        X,
        EDGES,
        torch.tensor([0, 1, 1, 0]),
        *torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]]),
    )
    since = torch.tensor([2, 0, 1, 0], dtype=torch.int8)
    edge_since = torch.tensor([2, 1, 2, 2, 2], dtype=torch.int8)  # 2-3 comes late by its own time
    return replace(graph, since=since, edge_since=edge_since)


def test_each_stage_has_its_nodes_and_edges() -> None:
    train, val, test = (at_stage(growing(), stage) for stage in range(3))
    assert train.ids.tolist() == [1, 3]
    assert train.edges.shape == (2, 0)
    assert val.ids.tolist() == [1, 2, 3]
    assert val.edges.tolist() == [[0], [1]]
    assert val.x.tolist() == X[1:].tolist()  # type: ignore[union-attr]
    assert (val.val.tolist(), val.test.sum().item()) == ([0, 1, 0], 0)
    assert torch.equal(test.edges, EDGES)
    assert {one.since for one in (train, val, test)} == {None}
    fixed = replace(growing(), since=None, edge_since=None)
    assert at_stage(fixed, 0) is fixed


def test_sparse_features_are_cut_like_dense_ones() -> None:
    row, column = X.nonzero(as_tuple=True)
    sparse = sparse_matrix(row, column, X[row, column], (4, 2), square=False)
    for stage in range(3):
        one, two = at_stage(replace(growing(), x=sparse), stage), at_stage(growing(), stage)
        assert torch.equal(one.x.to_dense(), two.x)  # type: ignore[union-attr,arg-type]


def test_training_graphs_have_the_later_ones_behind_them() -> None:
    lazy = LazyGraphs(2, lambda _: growing())
    for graphs in ((growing(), growing()), lazy):
        chain = staged(graphs, lambda some: some)
        assert isinstance(chain, LazyGraphs) == (graphs is lazy)
        assert [one.num_nodes for one in when_scored(chain[1])] == [2, 3, 4]
    assert len(when_scored(growing())) == 1


def test_a_row_of_each_node_comes_from_the_stage_of_its_role() -> None:
    def degrees(graph: Graph) -> torch.Tensor:
        return torch.bincount(graph.edges.flatten(), minlength=graph.num_nodes).unsqueeze(1)

    assert rows_by_stage(growing(), degrees).flatten().tolist() == [3, 0, 1, 0]
    fixed = replace(growing(), since=None, edge_since=None)
    assert rows_by_stage(fixed, degrees).flatten().tolist() == [3, 2, 3, 2]
