"""Graphs of different size become one graph, and the padding has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.core.batching import WHOLE, batching_of
from atoll.core.graph import Graph, Sparse, sparse_matrix, with_views
from atoll.core.minibatch import with_batching
from atoll.core.tree import take
from atoll.engines.stacking import make_buckets, outline, stack_graphs, stack_sparse
from atoll.nn.views import sparse_features, training_nodes
from atoll.testing import (
    FEATURES,
    double_precision,
    small_federation,
    small_graph_federation,
)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def test_stacked_graphs_are_padded_with_one_node_more_than_the_largest():
    graphs = small_federation((13, 5)).graphs
    edges = [g.edges.shape[1] for g in graphs]
    whole = stack_graphs(graphs)
    assert whole.x.shape == (2, 14, FEATURES)
    assert whole.edges.shape == (2, 2, max(edges))
    for name in ("y", "train", "val", "test", "real", "ids"):
        assert getattr(whole, name).shape == (2, 14), name
        for k, graph in enumerate(graphs):
            mine = getattr(whole, name)[k]
            assert torch.equal(mine[: graph.num_nodes], getattr(graph, name))
            assert not mine[graph.num_nodes :].any()
    small = min(range(2), key=lambda k: edges[k])
    assert (whole.edges[small, :, edges[small] :] == 13).all()  # they loop on the padding node
    assert not whole.edge_weight[small, edges[small] :].any()


def random_sparse(seed: int, rows: int, columns: int, entries: int, *, square: bool) -> Sparse:
    g = torch.Generator().manual_seed(seed)
    at = [torch.randint(end, (entries,), generator=g) for end in (rows, columns)]
    return sparse_matrix(*at, torch.rand(entries, generator=g), (rows, columns), square=square)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.booleans(),
)
@example([(2, 0), (3, 0)], 1, True)
@settings(max_examples=40, deadline=None)
def test_stacked_matrices_are_numbered_as_blocks_of_one_matrix(shapes, more, square):
    parts = [
        random_sparse(k, rows, rows if square else 4, entries, square=square)
        for k, (rows, entries) in enumerate(shapes)
    ]
    size = max(rows for rows, _ in shapes) + more
    whole = stack_sparse(parts, size)
    width = size if square else 4
    entries = max(count for _, count in shapes)
    assert whole.values.shape == (len(parts), entries)

    dense = torch.zeros(len(parts) * size, len(parts) * width)
    at = (whole.rows.flatten().long(), whole.columns.flatten().long())
    dense.index_put_(at, whole.values.flatten(), accumulate=True)
    by_hand = torch.zeros_like(dense)
    for k, part in enumerate(parts):
        rows, columns = part.shape
        here = by_hand[k * size : k * size + rows, k * width : k * width + columns]
        here.copy_(part.to_dense())
    torch.testing.assert_close(dense, by_hand)

    # Every block starts where the one before it ends, and so do its rows and columns.
    for starts, groups in ((whole.offsets, whole.rows), (whole.t_offsets, whole.columns)):
        flat = groups.flatten().long().sort().values
        count = torch.bincount(flat, minlength=starts.numel())
        assert torch.equal(starts.flatten().long(), torch.cumsum(count, 0) - count)
    order = whole.t_order.flatten().long()
    assert torch.equal(order.sort().values, torch.arange(order.numel()))
    assert torch.equal(whole.values.flatten()[order], whole.t_values.flatten())
    assert torch.equal(whole.rows.flatten()[order], whole.t_columns.flatten())


def test_dense_and_sparse_matrices_are_not_stacked():
    graph = small_federation((13,)).graphs[0]
    with pytest.raises(ValueError, match="dense in all, or sparse in all"):
        stack_graphs([graph, replace(graph, x=sparse_features(graph.x))])


def test_many_graphs_are_stacked_with_padding_that_stands_for_itself():
    graphs = small_graph_federation().graphs
    whole = stack_graphs(graphs)
    nodes, count = max(g.num_nodes for g in graphs) + 1, max(len(g.roots) for g in graphs)
    assert whole.root.shape == (4, nodes)
    assert whole.roots.shape == (4, count)
    for k, graph in enumerate(graphs):
        assert torch.equal(whole.root[k, : graph.num_nodes], graph.root)
        assert (whole.root[k, graph.num_nodes :] == nodes - 1).all()
        assert torch.equal(whole.roots[k, : len(graph.roots)], graph.roots)
        assert (whole.roots[k, len(graph.roots) :] == nodes - 1).all()
        one = take(whole, k)
        for by in ("nodes", "train", "uniform"):
            assert torch.equal(one.size(by), graph.size(by))
    assert torch.equal(whole.has_classes[0], graphs[0].has_classes)


def test_training_graphs_are_stacked_if_all_clients_have_them():
    graphs = [with_batching(graph, WHOLE) for graph in small_graph_federation().graphs]
    whole = stack_graphs(graphs)
    for name in ("training", "held_out"):
        inner = getattr(whole, name)
        for k, graph in enumerate(graphs):
            own = getattr(graph, name)
            assert torch.equal(inner.ids[k, : own.num_nodes], own.ids)
            assert int(inner.real[k].sum()) == own.num_nodes
    lacking = [replace(graphs[0], training=None), *graphs[1:]]
    assert stack_graphs(lacking).training is None
    assert stack_graphs(lacking).held_out is not None


def test_lists_of_nodes_are_padded_to_the_longest_with_the_node_of_padding():
    graphs = [
        with_views(graph, {"training": training_nodes})
        for graph in small_federation((13, 5)).graphs
    ]
    found = stack_graphs(graphs).views["training"]
    lengths = [int(graph.train.sum()) for graph in graphs]
    assert found.shape == (2, max(lengths))
    for row, graph, length in zip(found.tolist(), graphs, lengths, strict=True):
        assert row[:length] == graph.train.nonzero().squeeze(1).tolist()
        assert row[length:] == [13] * (max(lengths) - length)


def hollow(size: int, *, sparse: bool = False) -> Graph:
    """A graph with a size and no memory."""
    nodes = torch.zeros(1).expand(size)
    x: Any = nodes.unsqueeze(1)
    if sparse:
        x = sparse_matrix(*torch.zeros(2, 0, dtype=torch.int64), nodes[:0], (1, 1), square=False)
    none = torch.zeros(2, 0, dtype=torch.int64)
    return Graph(x, none, nodes[:0], nodes, nodes, nodes, nodes, nodes, nodes, {})


sizes_of_clients = st.lists(
    st.tuples(st.one_of(st.integers(1, 50), st.integers(1, 200_000)), st.booleans()),
    min_size=1,
    max_size=30,
)


@given(sizes_of_clients, st.integers(1, 8), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_law_of_buckets(clients, chunk, dice):
    graphs = [hollow(size, sparse=sparse) for size, sparse in clients]
    chosen = dice.sample(range(len(graphs)), dice.randint(1, len(graphs)))
    buckets = make_buckets(outline(graphs), chosen, chunk)
    assert sorted(p for bucket in buckets for p in bucket) == sorted(chosen)
    for bucket in buckets:
        assert list(bucket) == sorted(bucket)
        assert len(bucket) <= chunk
        assert len({clients[p][1] for p in bucket}) == 1
        sizes = [clients[p][0] for p in bucket]
        waste = len(sizes) * max(sizes) - sum(sizes)
        assert waste <= max(0.25 * sum(sizes), 4096)
    assert sorted(make_buckets(outline(graphs), sorted(chosen), chunk)) == sorted(buckets)


def test_small_clients_share_one_program_and_a_giant_has_its_own():
    graphs = [hollow(size) for size in (10, 20, 1_000_000, 30)]
    assert sorted(make_buckets(outline(graphs), range(4), 256)) == [(0, 1, 3), (2,)]


def test_a_client_with_mini_batches_has_a_program_of_its_own():
    graphs = [replace(hollow(10), batching=batching_of(size)) for size in (0, 4, 0, 4, 7)]
    assert sorted(make_buckets(outline(graphs), range(5), 256)) == [(0, 2), (1,), (3,), (4,)]


def test_buckets_are_sorted_by_size():
    graphs = [hollow(size) for size in (50_000, 10_000, 49_000, 11_000)]
    assert sorted(make_buckets(outline(graphs), range(4), 2)) == [(0, 2), (1, 3)]
    sizes = [graphs[bucket[0]].num_nodes for bucket in make_buckets(outline(graphs), range(4), 1)]
    assert all(a <= b for a, b in pairwise(sizes))
