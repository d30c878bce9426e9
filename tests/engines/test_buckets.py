"""Clients of one kind and similar size share a program."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.batching import batching_of
from atoll.core.graph import Graph, sparse_matrix
from atoll.engines.buckets import make_buckets, outline


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
