"""A user's edges, cleaned as the options say, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.own.edges import Ends, clean_edges
from atoll.data.own.reader import load_own
from atoll.data.own.schema import Loading, OwnOptions, Schema
from atoll.data.source import Source

from .graphs import G, Tables, W, check_refused, folder, pairs

REFUSED: dict[str, Tables] = {
    # nodes.csv, edges.csv, schema.toml, the sentence
    "dangling edge": (
        G,
        "source,target\na,b\nb,zz\nzz,a\n",
        "",
        "edges.csv row 3, column 'target' holds 'zz', not a node of nodes.csv (2 such edges",
    ),
    "half an edge": (G, "source,target\na,\n", "", "edges.csv row 2, column 'target' has no value"),
    "negative weight": (G, W + "b,c,-2\n", "", "edges.csv row 3 has the weight -2.0 (1 such"),
    "nan weight": (G, W + "b,c,nan\n", "", "edges.csv row 3 has no weight"),
    "empty weight": (G, W + "b,c,\n", "", "edges.csv row 3 has no weight"),
    "text weight": (G, W + "b,c,much\n", "", "edges.csv row 3, column 'weight' holds 'much'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(tmp_path: Path, kind: str) -> None:
    check_refused(tmp_path, *REFUSED[kind])


def test_findings_are_counted_and_dropped(tmp_path: Path) -> None:
    nodes = "id,f,label\na,1,x\nb,2,y\na,9,y\nc,3,x\n"
    edges = "source,target\na,a\na,b\na,b\nb,a\nb,zz\nc,b\n"
    options = OwnOptions(dangling="drop", duplicate_nodes="first", scale="none")
    source, report = load_own(folder(tmp_path, nodes, edges), options=options)
    assert source.x.ravel().tolist() == [1, 2, 3]
    assert pairs(source) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert report.messages == (
        "nodes.csv: 1 row was dropped, because an earlier row has the same id",
        "1 edge to missing nodes was dropped",
        "1 self-loop was dropped",
        "1 duplicate edge was dropped",
        "1 edge was given in both directions, and only one direction counts",
    )


@pytest.mark.parametrize(
    ("loops", "repeats", "directed", "expected"),
    [
        ("drop", "drop", True, [(0, 1, 2), (1, 0, 5)]),
        ("drop", "sum", True, [(0, 1, 5), (1, 0, 5)]),
        ("drop", "count", True, [(0, 1, 2), (1, 0, 1)]),
        ("drop", "count", False, [(0, 1, 3), (1, 0, 3)]),
        ("drop", "keep", True, [(0, 1, 2), (0, 1, 3), (1, 0, 5)]),
        ("keep", "drop", True, [(0, 0, 7), (0, 1, 2), (1, 0, 5)]),
        ("drop", "drop", False, [(0, 1, 2), (1, 0, 2)]),
        ("drop", "sum", False, [(0, 1, 10), (1, 0, 10)]),
        ("keep", "sum", False, [(0, 0, 7), (0, 1, 10), (1, 0, 10)]),
        ("drop", "keep", False, [(0, 1, 2), (0, 1, 3), (0, 1, 5), (1, 0, 2), (1, 0, 3), (1, 0, 5)]),
    ],
)
def test_edges_as_the_options_say(
    loops: str, repeats: str, directed: bool, expected: list[tuple[int, int, float]]
) -> None:
    ends = Ends(np.array([0, 0, 0, 1]), np.array([1, 0, 1, 0]), np.array([2, 7, 3, 5], np.float32))
    options = OwnOptions(self_loops=loops, duplicate_edges=repeats, directed=directed)
    edges, weight = clean_edges(ends, 2, Loading(Schema().with_options(options)))
    assert weight is not None
    assert [
        (int(u), int(v), float(w)) for (u, v), w in zip(edges.T, weight, strict=True)
    ] == expected


def test_summing_edges_without_weights_counts_them() -> None:
    ends = Ends(np.array([0, 0]), np.array([1, 1]), None)
    _, weight = clean_edges(ends, 2, Loading(Schema(duplicate_edges="sum", directed=True)))
    assert weight is not None
    assert weight.tolist() == [2]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6))), st.booleans())
def test_default_edges_equal_undirected_simple(
    n: int, given_edges: list[tuple[int, int]], weighted: bool
) -> None:
    ends = np.array([(u % n, v % n) for u, v in given_edges], dtype=np.int64).reshape(-1, 2).T
    weight = np.arange(2, 2 + ends.shape[1], dtype=np.float32) if weighted else None
    edges, found = clean_edges(Ends(ends[0], ends[1], weight), n, Loading())
    plain = Source("s", np.zeros((n, 1), np.float32), ends, np.zeros(n, np.int64), 1, weight)
    expected = plain.undirected_simple()
    np.testing.assert_array_equal(edges, expected.edges)
    if found is not None and expected.weight is not None:
        np.testing.assert_array_equal(found, expected.weight)
    assert (found is None) == (expected.weight is None or not expected.weight.size)
