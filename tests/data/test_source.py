"""Sources: what is refused, and undirected simple graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import DataError
from atoll.data.source import GraphSet, Source
from tests.data.toys import toy_set


def graph(n: int, edges: list[tuple[int, int]], **more) -> Source:
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    x = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    return Source("toy", x, ends, np.arange(n) % 2, 2, **more)


def test_undirected_keeps_one_weight_for_both_directions() -> None:
    source = graph(3, [(0, 1), (1, 0), (2, 2), (1, 2)], weight=np.float32([5, 7, 1, 3]))
    found = source.undirected_simple()
    assert found.edges.T.tolist() == [[0, 1], [1, 0], [1, 2], [2, 1]]
    assert found.weight.tolist() == [5, 5, 3, 3]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12),
    edges=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30),
)
def test_undirected_is_idempotent_and_symmetric(n, edges) -> None:
    once = graph(n, [(u % n, v % n) for u, v in edges]).undirected_simple()
    twice = once.undirected_simple()
    assert np.array_equal(once.edges, twice.edges)
    pairs = set(map(tuple, once.edges.T.tolist()))
    assert pairs == {(v, u) for u, v in pairs}
    assert pairs == {(a % n, b % n) for e in edges for a, b in (e, e[::-1]) if a % n != b % n}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"y": np.zeros(0, np.int64), "node_ptr": np.zeros(1, np.int64)}, "has no graphs"),
        ({"node_ptr": np.array([0, 0, 3]), "y": np.array([0, 1])}, "graph 0 has no nodes"),
        ({"y": np.array([0, 7])}, "graph 1 has label 7; labels are 0 to 1"),
        ({"x": np.array([[1.0], [np.nan], [0.0]])}, "NaN or infinite feature at node 1"),
        ({"edges": np.array([[0], [2]])}, "an edge from one graph to another"),
        ({"edges": np.array([[0], [9]])}, "an edge to a node that is not there"),
    ],
)
def test_sets_that_cannot_be_used(change: dict, problem: str) -> None:
    good = GraphSet(
        "tiny", np.ones((3, 1), np.float32), np.array([[0, 1], [1, 0]]), np.array([0, 2, 3]),
        np.array([0, 1]), 2,
    )  # fmt: skip
    assert good.checked() is good
    with pytest.raises(DataError, match=problem):
        replace(good, **change).checked()


def test_undirected_graphs_have_both_directions_once() -> None:
    source = toy_set(10)
    half = source.edges[:, source.edges[0] < source.edges[1]]
    loops = np.stack([np.arange(5), np.arange(5)])
    messy = replace(source, edges=np.concatenate([half, half, loops], axis=1))
    made = messy.undirected_simple().edges
    assert set(map(tuple, made.T.tolist())) == set(map(tuple, source.edges.T.tolist()))
    assert made.shape == source.edges.shape


@pytest.mark.parametrize("weighted", [False, True])
def test_a_simple_undirected_graph_is_returned_without_work(weighted: bool) -> None:
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 40, (2, 200))
    weight = rng.random(200).astype(np.float32) if weighted else None
    start = Source("g", np.ones((40, 1), np.float32), edges, np.zeros(40, np.int64), 1, weight)
    simple = start.undirected_simple()
    assert simple is not start
    assert simple.undirected_simple() is simple
    for other in (
        simple.edges[:, ::-1],  # another order
        simple.edges[:, 1:],  # one direction is missing
        np.sort(np.concatenate([simple.edges, [[0], [0]]], axis=1)),  # a loop
        np.repeat(simple.edges, 2, axis=1),  # duplicates
    ):
        size = other.shape[1]
        weight = None if simple.weight is None else np.resize(simple.weight, size)
        changed = replace(simple, edges=np.ascontiguousarray(other), weight=weight)
        assert changed.undirected_simple() is not changed
    if simple.weight is not None:
        uneven = replace(simple, weight=np.arange(simple.weight.size, dtype=np.float32))
        assert uneven.undirected_simple() is not uneven


def test_data_are_shown_in_one_line():
    x, y = np.ones((3, 2), np.float32), np.array([0, 1, 0])
    edges = np.array([[0, 1], [1, 0]])
    shown = "3 nodes, 2 edges, 2 features, 2 classes>"
    assert repr(Source("s", x, edges, y, 2)) == f"<Source s: {shown}"
    graphs = GraphSet("g", x, edges, np.array([0, 2, 3]), y[:2], 2)
    assert repr(graphs) == f"<GraphSet g: 2 graphs, {shown}"
