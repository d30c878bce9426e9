"""Both sides of FedATH's Eq. 14, and of the steps of its proof."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.analyses import bound
from atoll.analyses.bound import GRAPHS, STEPS, follow_bound
from atoll.core.errors import ConfigError
from atoll.experiment.config import make_config

SMALL = {"data": "lagoon:nodes=150", "clients": 3, "epochs": 1, "set": {"hidden": 8}}


def test_the_formula_by_hand() -> None:
    # Two clients of two nodes: one with an edge, one with half an edge; identity features.
    eye = torch.eye(2, dtype=torch.float64)
    parts = []
    for weight in (1.0, 0.5):
        a = eye + weight * eye.flip(0)
        degrees = a.sum(1)
        parts.append((a, degrees, a / degrees[0], eye))
    layer = {"weight": 2 * eye, "bias": torch.zeros(2)}
    found = bound._sides(parts, [layer, layer], [[layer, layer]])
    b_w, b_x, least, m = 8**0.5, 2**0.5, 1.5, 2
    norms = 4**0.5 + 2.5**0.5
    right = 1 + b_w**2 * b_x * (1 / (least * m) + 1 / least**2) * norms
    np.testing.assert_allclose(found["Eq. 14"][1], [right])
    np.testing.assert_allclose(found["Eq. 14"][0], [0.0])  # one network agrees with itself
    gap = (2 * 0.5**2) ** 0.5
    p_gap = float((parts[0][2] - parts[1][2]).norm())
    np.testing.assert_allclose(found["Eq. 39"], [[p_gap], [(least + m) / least**2 * gap]])
    np.testing.assert_allclose(found["Eq. 35"], [[2 * 0.5**2], [m]])
    np.testing.assert_allclose(found["Eq. 21"][1], [b_w**2 * b_x * p_gap])
    np.testing.assert_allclose(found["D_min"], [least])


def test_the_divergence_is_the_largest_gap_of_disagreement() -> None:
    # Networks that differ on the first client's nodes only: they disagree on all of them.
    eye = torch.eye(2, dtype=torch.float64)
    first, second = (eye, torch.ones(2), eye, eye), (eye, torch.ones(2), eye, 0 * eye)
    models = [[{"weight": w, "bias": torch.zeros(2)}] * 2 for w in (eye, eye.flip(0))]
    models[1][1] = {"weight": eye, "bias": torch.zeros(2)}
    found = bound._sides([first, second], models[0], models)
    np.testing.assert_allclose(found["Eq. 14"][0], [2.0])


def test_along_training() -> None:
    rounds = []
    config = make_config(method="fedath", rounds=3, seeds=2, **SMALL)
    claim = follow_bound(config, every=2, on_round=rounds.append)
    assert rounds == [1, 2, 3] * 2
    assert [row[0].plain for row in claim.tables[0].rows] == ["0", "2", "3"]
    assert [row[0].plain for row in claim.tables[1].rows] == list(STEPS)
    start, end = (claim.numbers["rounds"][key][0] for key in "03")
    for kind in GRAPHS:  # nothing has an evaluator yet
        np.testing.assert_array_equal(start[f"‖A‖_F {kind}"], start["‖A‖_F raw"])
    assert (end["‖A‖_F causal"] < end["‖A‖_F raw"]).all()  # weights below one
    assert (end["D_min causal"] <= end["D_min raw"]).all()
    for name in ("Eq. 14", "Eq. 38", "Eq. 39"):
        left, right = end[f"{name} causal"]
        assert (left <= right).all()
    left, right = end["Eq. 25 raw"]
    assert (left > right).any()  # the entrywise norm has no bound by the rank
    assert "Eq. 25" in claim.sentences[-1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"method": "fedavg"}, "is about fedath with two layers, not fedavg"),
        ({"method": "fedath", "set": {"layers": 3}}, "two layers"),
        ({"method": "fedath", "clients": 1}, "give --clients 2 or more"),
    ],
)
def test_other_runs_are_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        follow_bound(make_config(**{**SMALL, "rounds": 1, **change}))
