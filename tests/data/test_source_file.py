"""A source comes back from its file as it was, array by array."""

from dataclasses import fields

import numpy as np
import pytest
import scipy.sparse as sp

from atoll.data.source import GraphGroup, GraphSet, Source
from atoll.data.source_file import load_source, save_source

EDGES = np.array([[0, 1, 2], [1, 2, 0]])
PLAIN = Source("plain", np.eye(3, dtype=np.float32), EDGES, np.array([0, 1, -1]), 2)
FULL = Source(
    name="full",
    x=sp.csr_array(np.eye(3, dtype=np.float32)),
    edges=EDGES,
    y=np.array([0, 1, 1]),
    classes=2,
    weight=np.array([0.5, 1, 2], dtype=np.float32),
    split=np.array([0, 1, -1], dtype=np.int8),
    columns={"year": np.array([1999, 2000, 2001]), "place": np.array(["a", "bb", ""])},
    metric="auc",
    class_names=("good", "bad"),
    edge_time=np.array([0.1, 0.2, 0.3]),
    settled=True,
)
SMALL = GraphSet(
    "set", np.ones((3, 2), np.float32), EDGES[:, :1], np.array([0, 2, 3]), EDGES[0, :2], 2
)


def check_equal(one, two):
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for name, value in one.items():
            check_equal(value, two[name])
    elif isinstance(one, np.ndarray):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    elif sp.issparse(one):
        assert one.shape == two.shape
        for name in ("data", "indices", "indptr"):
            check_equal(getattr(one, name), getattr(two, name))
    elif isinstance(one, GraphGroup):
        assert len(one.sets) == len(two.sets)
        for pair in zip(one.sets, two.sets, strict=True):
            check_equal(*pair)
    elif isinstance(one, Source | GraphSet):
        for field in fields(one):
            check_equal(getattr(one, field.name), getattr(two, field.name))
    else:
        assert one == two


@pytest.mark.parametrize("source", [PLAIN, FULL, SMALL, GraphGroup("group", (SMALL, SMALL))])
def test_round_trip(tmp_path, source):
    save_source(source, tmp_path / "entry")
    found = load_source(tmp_path / "entry")
    assert type(found) is type(source)
    check_equal(source, found)
    check_equal(source.prepared(), found.prepared())
