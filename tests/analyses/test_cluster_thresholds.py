"""`atoll tune-clusters`: norms of a run without splits, and a proposal that can be checked."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atoll
from atoll.analyses.cluster_thresholds import (
    STEPS,
    ThresholdProposal,
    command,
    reasons,
    summary,
    threshold_files,
    threshold_parts,
    tune_clusters,
    two_digits,
)
from atoll.core.errors import ConfigError
from atoll.engines.codec import load_checkpoint
from atoll.experiment.config import make_config
from atoll.experiment.folder import CHECKPOINT
from atoll.methods.gcfl import cluster_tree
from atoll.present.files import plain_json, write_all
from atoll.present.tables import layout

SMALL: dict[str, Any] = {
    "method": "gcfl", "data": "lagoon:nodes=300", "clients": 4, "epochs": 1, "set": {"hidden": 8},
}  # fmt: skip


def tuning(
    together: list[float], norms: list[list[float]], may_split: int = 0
) -> ThresholdProposal:
    config = make_config(method="gcfl")
    names = tuple(map(str, range(len(norms[0]))))
    return ThresholdProposal(config, config, np.array(norms), np.array(together), may_split, names)


MADE = tuning(
    [4.0, 2.0, 1.0, 0.6, 0.4, 0.5, 0.3, 0.4],
    [[5.0, 4.0], [4.0, 4.0], [3.0, 2.0], [1.0, 2.0], [1.0, 1.6], [1.5, 1.6], [1.6, 1.0], [1.6, 1]],
)


def test_the_proposal_by_hand() -> None:
    assert MADE.largest.tolist() == [5, 4, 3, 2, 1.6, 1.6, 1.6, 1.6]
    assert (MADE.calm, MADE.restless) == (0.4, 1.6)
    # A tenth of 0.3, 0.4, 0.4, 0.5 is three tenths of the way to the second; one is below.
    assert np.quantile([0.4, 0.5, 0.3, 0.4], 0.1) == pytest.approx(0.33)
    assert MADE.eps1 == 0.34
    assert MADE.eps2 == 1.5
    assert MADE.first_split(MADE.eps1, MADE.eps2) == 6
    assert MADE.falling == pytest.approx(1 - 0.35 / 0.45)


@pytest.mark.parametrize(
    ("value", "down", "up"),
    [(0.12499, 0.12, 0.13), (0.12, 0.12, 0.12), (9.99, 9.9, 10), (1234, 1200, 1300), (0, 0, 0)],
)
def test_two_digits(value: float, down: float, up: float) -> None:
    assert (two_digits(value), two_digits(value, up=True)) == (down, up)


@pytest.mark.parametrize(
    ("eps1", "eps2", "first"),
    [(0.44, 0.8, 4), (0.7, 0.8, 3), (0.7, 1.7, 3), (0.44, 1.7, None), (0.3, 0.8, None), (9, 0, 0)],
)
def test_the_first_split_by_hand(eps1: float, eps2: float, first: int | None) -> None:
    found = MADE.first_split(eps1, eps2)
    assert np.isnan(found) if first is None else found == first


def test_no_split_comes_before_the_method_allows_one() -> None:
    late = tuning(MADE.together.tolist(), MADE.norms.tolist(), may_split=5)
    assert late.first_split(9, 0) == 5
    assert late.first_split(0.44, 0.8) == 6


def test_the_grid_has_the_proposal_in_its_place() -> None:
    first, second, rounds = MADE.grid()
    place = STEPS.index(0)
    assert (first[place], second[place]) == (MADE.eps1, MADE.eps2)
    assert rounds[place, place] == MADE.first_split(MADE.eps1, MADE.eps2)
    assert rounds.shape == (8, 8)
    assert (np.diff(first) > 0).all()
    assert second[0] == MADE.eps1
    assert second[-1] > MADE.restless


def test_doubts() -> None:
    assert [text.split(";")[0] for text in MADE.warnings()] == [
        "the mean update still decreased by 22% from the third to the last quarter of the rounds"
    ]
    same_way = tuning([1.0, 0.93] * 4, [[1.1, 1.0]] * 8)
    (doubt,) = same_way.warnings()
    assert "the clients move in the same direction" in doubt
    (doubt,) = tuning([0.1, 0.093] * 4, [[1.1, 1.0]] * 8, may_split=8).warnings()
    assert "no split in these rounds; give more --rounds" in doubt
    assert tuning([0.1, 0.093] * 4, [[1.1, 1.0]] * 8).warnings() == []


@pytest.fixture(scope="module")
def found() -> ThresholdProposal:
    return tune_clusters(make_config(rounds=8, **SMALL))


def test_the_norms_are_those_of_a_run(found: ThresholdProposal, tmp_path: Path) -> None:
    options = {**SMALL, "set": {"hidden": 8, "eps1": 0.0}}
    atoll.run(rounds=8, out=tmp_path, **options)
    trace = load_checkpoint(tmp_path / "seed-0" / CHECKPOINT)["server"].trace.numpy()
    np.testing.assert_allclose(found.norms, trace[:, 0], rtol=1e-6)
    np.testing.assert_allclose(found.together, trace[:, 1, 0], rtol=1e-6)
    assert found.may_split == 20
    assert (found.together <= found.largest).all()


def test_the_first_split_is_where_a_run_with_these_numbers_splits(tmp_path: Path) -> None:
    settings = {"hidden": 8, "min_round": 3}
    found = tune_clusters(make_config(rounds=12, **{**SMALL, "set": settings}))
    first = found.first_split(found.eps1, found.eps2)
    assert first >= 3
    words = shlex.split(command(found))
    given = dict(word.split("=") for word in words if word.startswith(("eps1=", "eps2=")))
    atoll.run(rounds=12, out=tmp_path, **{**SMALL, "set": {**settings, **given}})
    saved = load_checkpoint(tmp_path / "seed-0" / CHECKPOINT)["server"]
    assert cluster_tree(saved)[0].round == first


def test_gcfl_plus_waits_for_its_sequences() -> None:
    settings = {"hidden": 4, "preset": "plus", "min_round": 2, "seq_length": 7}
    found = tune_clusters(make_config(rounds=8, **{**SMALL, "set": settings}))
    assert found.may_split == 6  # after seven norms, in the seventh round


def test_a_user_reads_two_reasons_and_a_command(found: ThresholdProposal, tmp_path: Path) -> None:
    first, second, _ = reasons(found)
    assert first.startswith(f"eps1 = {found.eps1:g}: the 10th percentile of the mean update's norm")
    assert second.startswith(f"eps2 = {found.eps2:g}: just below the largest update in those")
    assert command(found) == (
        "atoll run gcfl --data lagoon:nodes=300 --clients 4 --epochs 1 --set hidden=8 "
        f"--set eps1={found.eps1:g} --set eps2={found.eps2:g}"
    )
    assert layout(threshold_parts(found, grid=True)).renderables
    paths = write_all(tmp_path, threshold_files(found))
    assert [path.name for path in paths] == ["norms.csv", "tune-clusters.json", "tune-clusters.png"]
    rows = list(csv.DictReader((tmp_path / "norms.csv").read_text().splitlines()))
    assert len(rows) == 8
    assert float(rows[3]["client 2"]) == pytest.approx(found.norms[3, 2], rel=1e-5)
    saved = json.loads((tmp_path / "tune-clusters.json").read_text())
    assert saved == plain_json(summary(found))
    assert saved["first_split"] is None  # eight rounds are before the first that may split
    assert paths[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rounds": 7}, "rounds is 7; give at least 8 to see the trend"),
        ({"method": "fedavg"}, "fedavg does not split clusters; this command needs gcfl"),
        ({"clients": 2}, "a cluster of 2 clients or fewer is never split, and there are only 2"),
    ],
)
def test_what_cannot_be_tuned_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tune_clusters(make_config(**{**SMALL, **options}))
