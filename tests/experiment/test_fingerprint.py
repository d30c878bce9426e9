"""Fingerprints of data change with every number, and not with the object that holds them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

import atoll
from atoll.data.source import GraphGroup, GraphSet, Source
from atoll.experiment.fingerprint import data_fingerprint, graph_fingerprint


def source(**changes: object) -> Source:
    rng = np.random.default_rng(0)
    x = (rng.random((6, 4)) < 0.5).astype(np.float32)
    about = {"x": x, "edges": np.array([[0, 1], [1, 2]]), "y": np.arange(6) % 2, "classes": 2}
    return Source(**{"name": "own", **about, **changes})


def test_equal_data_have_equal_fingerprints() -> None:
    owners = {"owner": np.array(["a", "b"] * 3, dtype=object), "age": np.arange(6)}
    backwards = dict(reversed(owners.items()))
    assert data_fingerprint(source()) == data_fingerprint(source())
    one, two = source(columns=owners), source(columns=backwards)
    assert data_fingerprint(one) == data_fingerprint(two)


@pytest.mark.parametrize(
    "changes",
    [
        {"y": np.array([1, 0, 1, 0, 1, 1])},
        {"x": 2 * source().x},
        {"x": sp.csr_array(source().x)},
        {"edges": np.array([[0, 1], [1, 3]])},
        {"weight": np.array([1, 2], dtype=np.float32)},
        {"split": np.zeros(6, dtype=np.int8)},
        {"columns": {"owner": np.array(["a", "b"] * 3)}},
        {"columns": {"owner": np.array(["a", "b"] * 3, dtype=object)}},
        {"classes": 3},
    ],
)
def test_every_change_shows(changes: dict[str, object]) -> None:
    assert data_fingerprint(source(**changes)) != data_fingerprint(source())


def test_a_sparse_value_a_graph_of_a_set_and_a_client_show() -> None:
    sparse = sp.csr_array(source().x)
    assert data_fingerprint(source(x=sparse)) != data_fingerprint(source(x=2 * sparse))
    ends = np.array([0, 3, 6])
    few = GraphSet("few", source().x, source().edges, ends, np.array([0, 1]), 2)
    other = replace(few, y=np.array([1, 0]))
    assert data_fingerprint(GraphGroup("two", (few, few))) != data_fingerprint(
        GraphGroup("two", (few, other))
    )
    federation = atoll.partition(atoll.load("lagoon:nodes=150"), "random", clients=3)
    graphs = list(federation.graphs)
    assert len({graph_fingerprint(graph) for graph in graphs}) == 3
    swapped = replace(federation, graphs=tuple(reversed(graphs)))
    assert data_fingerprint(swapped) != data_fingerprint(federation)
