"""Tables of a comparison: grids decided by validation, means, ranks and tests."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.experiment.config import make_config
from atoll.studies.compare.comparison import Comparison, make_comparison
from atoll.studies.compare.plan import make_request
from atoll.studies.study_run import RunOutcome, StudyRun

RNG = np.random.default_rng(3)


def outcome(
    tmp_path: Path, method: str, test: list[float] | None, *, data: str = "one", clients: int = 5,
    validation: float = 0.5, point: dict[str, Any] | None = None, partition: bytes = b"p",
) -> RunOutcome:  # fmt: skip
    """A cell as `run_study` gives it, with these scores; None has failed."""
    labels = {"data": data, "clients": clients, "method": method, "point": point or {}}
    name = f"{data}-{clients}-{method}-{point}"
    cell = StudyRun(name, make_config(method="fedavg", seeds=len(test or [0, 0])), labels)
    if test is None:
        return RunOutcome(cell, tmp_path / name, error="client 1, step train, round 0: loss is nan")
    for seed in range(len(test)):
        (tmp_path / name / f"seed-{seed}").mkdir(parents=True)
        (tmp_path / name / f"seed-{seed}" / "partition.npz").write_bytes(partition)
    summary = {
        "clients": clients, "partition": "louvain", "split": "stratified", "protocol": "strict",
        "rounds": 10, "seeds": len(test), "scored": "global", "metric": "accuracy",
        "metrics": {
            "test_accuracy": {"per_seed": test},
            "val_accuracy": {"mean": validation, "per_seed": [validation] * len(test)},
        },
        "bytes": {"up": 10**7, "down": 10**7}, "seconds": {"per_round": 0.25, "train": 5.0},
        "ledger": {str(seed): {"train": {"up": 5, "down": 5}, "score": {"up": 9, "down": 9}}
                   for seed in range(len(test))},
    }  # fmt: skip
    return RunOutcome(cell, tmp_path / name, summary)


def compared(outcomes: list[RunOutcome], against: str | None = None) -> Comparison:
    methods = list(dict.fromkeys(o.run.labels["method"] for o in outcomes))
    return make_comparison(outcomes, make_request(methods, against=against), None)


def noisy(mean: float, seeds: int = 10, spread: float = 0.01) -> list[float]:
    return (mean + spread * RNG.normal(size=seeds)).tolist()


def test_validation_decides_a_grid_and_test_scores_of_others_stay_unread(tmp_path: Path) -> None:
    found = compared([
        outcome(tmp_path, "a", [0.70, 0.72], point={"mu": 0.1}, validation=0.80),
        outcome(tmp_path, "a", [0.90, 0.92], point={"mu": 1.0}, validation=0.79),
        outcome(tmp_path, "b", [0.60, 0.62]),
    ])  # fmt: skip
    row = found.tables[0].rows[0]
    assert (dict(row.point), row.points, row.mean) == ({"mu": 0.1}, 2, pytest.approx(0.71))
    text = repr(found)
    assert "a: mu=0.1, selected among 2 points by validation scores; only its test" in text
    found.to_csv(tmp_path / "c.csv")
    for page in (text, found.markdown(), found.latex(), (tmp_path / "c.csv").read_text(),
                 json.dumps(found.summary())):  # fmt: skip
        assert not re.search(r"0\.9[0-2]?\b|9[0-2]\.\d", page)
    rows = list(csv.DictReader((tmp_path / "c.csv").read_text().splitlines()))
    assert [(row["chosen"], row["test"]) for row in rows] == [
        ("1", "0.7"), ("1", "0.72"), ("0", ""), ("0", ""), ("1", "0.6"), ("1", "0.62"),
    ]  # fmt: skip
    assert {row["bytes_per_round"] for row in rows} == {"1.0"}  # scoring is not traffic
    assert "Validation scores selected the hyper-parameters" in found.latex()


def test_a_failed_point_leaves_the_others_and_is_told(tmp_path: Path) -> None:
    found = compared([
        outcome(tmp_path, "a", [0.7, 0.7], point={"mu": 1}),
        outcome(tmp_path, "a", None, point={"mu": 9}), outcome(tmp_path, "b", [0.6, 0.6]),
    ])  # fmt: skip
    assert found.tables[0].rows[0].finished
    assert "1 of 2 points failed: client 1, step train, round 0: loss is nan" in " ".join(
        repr(found).split()
    )
    assert list(found.failed) == ["one-5-a-{'mu': 9}"]


def test_ranks_gaps_and_marks(tmp_path: Path) -> None:
    base = noisy(0.8)
    found = compared([
        outcome(tmp_path, "best", base),
        outcome(tmp_path, "near", [v - 0.0005 + 0.01 * RNG.normal() for v in base]),
        outcome(tmp_path, "far", [v - 0.1 for v in base]),
    ])  # fmt: skip
    table = found.tables[0]
    assert table.reference == table.best[0]
    far = table.test_of("far")
    assert far is not None
    assert far.different
    assert far.wilcoxon == pytest.approx(2 * 2**-9)
    assert table.rows[2].rank == 3
    assert sum(row.rank for row in table.rows) == pytest.approx(6)
    text = repr(found)
    assert text.count("≈") == 2  # the near one, and the caption
    assert "p (Wilcoxon)" in text
    verdict = r"10 seeds are too few to tell: \S+ ± \S+ points \(p = 0\.\d+\); (about|more) "
    assert re.search(verdict, " ".join(text.split()))
    assert "Friedman's test gives p < 0.001" in " ".join(text.split())
    assert "$^{\\approx}$" in found.latex()
    assert found.latex().count("\\textbf") == 1
    assert found.markdown().count("**") == 4


def test_over_all_problems_every_seed_of_each_is_a_block(tmp_path: Path) -> None:
    cells = [
        outcome(tmp_path, name, noisy(mean + shift, 4), data=data)
        for data, shift in (("one", 0.0), ("two", -0.3), ("three", 0.1))
        for name, mean in (("a", 0.8), ("b", 0.7))
    ]
    found = compared(cells, against="b")
    assert found.overall is not None
    scores = [found.overall.rows[0].scores, *[table.rows[0].scores for table in found.tables]]
    assert scores[0].tolist() == np.concatenate(scores[1:]).tolist()
    by_seed = np.mean(scores[1:], axis=0)
    row = found.overall.rows[0]
    assert (row.mean, row.std) == pytest.approx((by_seed.mean(), by_seed.std(ddof=1)))
    test = found.overall.tests[0]
    assert (test.pairs, test.by, test.different, test.against) == (12, "wilcoxon", True, "b")
    assert "b is worse than a" in " ".join(found.sentences())
    assert "Over all 3 problems, 4 seeds each (12 blocks)" in repr(found)
    assert found.table()[-1]["data"] is None


def test_a_method_that_failed_somewhere_is_not_ranked_over_all(tmp_path: Path) -> None:
    cells = [
        outcome(tmp_path, name, None if (data, name) == ("two", "b") else noisy(0.7, 2), data=data)
        for data in ("one", "two")
        for name in "abc"
    ]
    found = compared(cells)
    assert found.overall is not None
    assert [row.finished for row in found.overall.rows] == [True, False, True]
    assert "failed on 1 of 2 problems" in " ".join(repr(found).split())
    assert sum(row.rank for row in found.overall.rows if row.finished) == pytest.approx(3)
    assert found.latex().count(" -- ") == 2  # its score and its rank
    against = compared(cells, against="b")
    assert "has no result here" in " ".join(against.sentences())


def test_clients_that_are_not_the_same_are_not_compared(tmp_path: Path) -> None:
    found = compared([
        outcome(tmp_path, "a", [0.8, 0.8]), outcome(tmp_path, "b", [0.9, 0.9], partition=b"q")
    ])  # fmt: skip
    assert found.tables[0].tests == ()
    assert "its clients differ from the other methods' clients" in " ".join(repr(found).split())
