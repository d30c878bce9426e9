"""What protocols do to a graph before it is divided, on graphs small enough to count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp

from atoll.data.prepare import largest_component, row_normalized, words_normalized
from atoll.data.source import Source


def graph(n: int, edges: list[tuple[int, int]], **more) -> Source:
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    x = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    return Source("toy", x, ends, np.arange(n) % 2, 2, **more)


def test_largest_component_renumbers_and_takes_everything_along() -> None:
    source = graph(
        6,
        [(0, 1), (2, 3), (3, 4)],
        split=np.int8([0, 1, 2, 0, 1, 2]),
        weight=np.float32([1, 2, 3]),
        columns={"bank": np.array(list("aabbcc"))},
    )
    found = largest_component(source)
    assert found.edges.T.tolist() == [[0, 1], [1, 2]]
    assert np.array_equal(found.x, source.x[2:5])
    assert found.y.tolist() == [0, 1, 0]
    assert found.split.tolist() == [2, 0, 1]
    assert found.weight.tolist() == [2, 3]
    assert found.columns["bank"].tolist() == ["b", "b", "c"]


def test_largest_component_of_equals_is_the_first() -> None:
    found = largest_component(graph(4, [(2, 3), (0, 1)]))
    assert found.x[:, 0].tolist() == [0, 2]


def test_row_normalized_sums_to_one_and_leaves_zero_rows() -> None:
    x = np.float32([[1, 3], [0, 0], [2, 2]])
    source = Source("toy", x, np.zeros((2, 0), np.int64), np.zeros(3, np.int64), 1)
    expected = [[0.25, 0.75], [0, 0], [0.5, 0.5]]
    assert row_normalized(source).x.tolist() == expected
    sparse = Source("toy", sp.csr_array(x), source.edges, source.y, 1)
    found = row_normalized(sparse).x
    assert sp.issparse(found)
    assert found.dtype == np.float32
    assert found.toarray().tolist() == expected


def test_only_counts_of_words_are_normalized_for_fedpub() -> None:
    words = replace(graph(1, []), x=np.array([[2.0, 6.0]], np.float32), name="Cora")
    assert words_normalized(words).x.tolist() == [[0.25, 0.75]]
    other = replace(words, name="minesweeper")
    assert words_normalized(other) is other
