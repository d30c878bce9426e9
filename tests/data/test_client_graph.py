"""Subgraphs of one graph, cut for clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.client_graph import InducedSubgraphs
from atoll.data.source import Source
from atoll.data.synthetic import Archipelago, make_lagoon


def test_subgraphs_keep_edges_and_their_order_also_where_clients_overlap() -> None:
    source = make_lagoon(Archipelago(own_library=0.5), 3, 1)
    numbers = np.arange(source.edges.shape[1], dtype=np.float32)
    rng = np.random.default_rng(0)
    induced = InducedSubgraphs(replace(source, weight=numbers))
    for _ in range(5):
        ids = rng.permutation(source.num_nodes)[: source.num_nodes // 2]
        inside = np.isin(source.edges, ids).all(0)
        part = induced.part(ids)
        np.testing.assert_array_equal(part.weight, np.flatnonzero(inside))
        np.testing.assert_array_equal(ids[part.edges], source.edges[:, inside])


def graph(n: int, edges: list[tuple[int, int]], **more) -> Source:
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    x = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    return Source("toy", x, ends, np.arange(n) % 2, 2, **more)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12),
    edges=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30),
    data=st.data(),
)
def test_induced_keeps_exactly_the_edges_inside(n, edges, data) -> None:
    source = graph(n, [(u % n, v % n) for u, v in edges])
    ids = np.array(data.draw(st.permutations(range(n))))[: data.draw(st.integers(1, n))]
    found = InducedSubgraphs(source).part(ids)
    wanted = [(u, v) for u, v in source.edges.T.tolist() if u in ids and v in ids]
    assert [(int(ids[u]), int(ids[v])) for u, v in found.edges.T] == wanted
    assert np.array_equal(found.y, source.y[ids])
