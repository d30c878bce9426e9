"""Weights of a linear SGC, and the bounds of GCFL's propositions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import atoll
from atoll.analyses.linear_weights import KINDS, Linear, bound, client_matrices, weight_claim
from atoll.core.errors import ConfigError
from tests.data.public.layouts import write_raw

PATH = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=float)


def some(seed: int = 0) -> Linear:
    rng = np.random.default_rng(seed)
    return Linear(PATH, rng.normal(size=(3, 3)), np.eye(3)[[0, 1, 1]])


def test_weights_solve_the_linear_network() -> None:
    one = some()
    scale = np.array([2, 3, 2]) ** -0.5
    np.testing.assert_allclose(one.laplacian, scale[:, None] * (PATH + np.eye(3)) * scale)
    np.testing.assert_allclose(one.laplacian @ one.x @ one.weights, one.y, atol=1e-9)


def test_the_bound_of_another_task_is_exact_for_one_direction() -> None:
    # 4.3 holds with equality where the change lies along the smallest singular value.
    one = some()
    left, values, _ = np.linalg.svd(one.laplacian @ one.x)
    other = Linear(one.a, one.x, one.y + np.outer(left[:, -1], [1.0, 0, 0]))
    moved = np.linalg.norm(other.weights - one.weights, 2) ** 2
    assert moved == pytest.approx(bound(one, other, "task"))
    assert moved == pytest.approx(values[-1] ** -2)


def test_the_other_bounds_by_hand() -> None:
    one = some()
    wider = Linear(one.a, 2 * one.x, one.y)  # E_X = X, so that ε_X / δ_X = ‖X‖² / ‖X X‖²

    def square(matrix: np.ndarray) -> float:
        return float(np.linalg.norm(matrix, 2) ** 2)

    expected = square(one.x) / square(one.x @ one.x)
    expected *= square(np.linalg.inv(one.laplacian) @ one.y)
    assert bound(one, wider, "features") == pytest.approx(expected)
    alone = Linear(0 * PATH, one.x, one.y)
    gap = np.eye(3) - one.laplacian
    expected = square(np.linalg.inv(one.x)) * square(one.y)
    expected *= square(gap) / square(one.laplacian @ gap)
    assert bound(one, alone, "structure") == pytest.approx(expected)
    assert bound(one, one, "structure") == bound(one, one, "features") == 0


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_change_touches_one_matrix(kind: str) -> None:
    rng = np.random.default_rng(1)
    a = np.triu(rng.random((30, 30)) < 0.2, 1).astype(float)
    one = Linear(a + a.T, rng.normal(size=(30, 4)), np.eye(5)[rng.integers(5, size=30)])
    other, same = one.changed(kind, 1.0, rng), one.changed(kind, 0.0, rng)
    for name in KINDS.values():
        assert (other.matrix(name) != one.matrix(name)).any() == (name == kind)
        np.testing.assert_array_equal(same.matrix(name), one.matrix(name))
    assert (other.a == other.a.T).all()


def test_whole_graphs_have_their_label_at_every_node(graph_federation) -> None:
    graph = graph_federation.graphs[0]
    found = client_matrices(graph, graph_federation.classes, 0, most=20)
    assert 0 < len(found.a) <= 20
    assert (found.a == found.a.T).all()
    assert (found.y.sum(1) == 1).all()


@pytest.fixture
def graph_federation(tmp_path: Path) -> atoll.Federation:
    write_raw("MUTAG", tmp_path)
    return atoll.partition(atoll.load("MUTAG", root=tmp_path), clients=2)


def test_the_claim() -> None:
    federation = atoll.partition(atoll.load("lagoon:nodes=120", clients=3))
    claim = weight_claim(federation, draws=1)
    rows = [[cell.plain for cell in row] for row in claim.tables[0].rows]
    assert [row[0] for row in rows] == ["4.1 (structure)", "4.2 (features)", "4.3 (task)"]
    assert rows[2][-1] == "100%"  # 4.3 is the norm of a product
    assert all(-1 <= float(row[1]) <= 1 for row in rows)
    assert "holds for 100% of the pairs" in claim.sentences[2]
    assert len(claim.numbers["clients"]["weights"]) == 3
    with pytest.raises(ConfigError, match="--clients 2 or more"):
        weight_claim(atoll.partition(atoll.load("lagoon:nodes=60", clients=1)))
