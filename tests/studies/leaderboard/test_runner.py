"""Rows are run once, a stopped league continues, and the search sees no test scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import StepError
from atoll.experiment.observers import Observer
from atoll.experiment.run import RunPlan, Stopped
from atoll.studies.leaderboard import leagues
from atoll.studies.leaderboard.leagues import Wanted, plan_league
from atoll.studies.leaderboard.rows import read_rows
from atoll.studies.leaderboard.runner import run_entries, trials_file
from atoll.studies.study_run import RunOutcome, StudyObserver, StudyRun

SMALL = {"data": ["lagoon:nodes=150"], "options": {"rounds": 2, "epochs": 1, "device": "cpu"}}


class Counting(StudyObserver):
    """Counts runs, and stops after a number of them."""

    def __init__(self, most: int = 99) -> None:
        self.ran, self.most = list[str](), most

    def run(self, run: StudyRun) -> Observer:
        return _Stop(self)

    def ended(self, outcome: RunOutcome) -> None:
        self.ran.append(outcome.run.labels["method"])


class _Stop(Observer):
    def __init__(self, study: Counting) -> None:
        self.study = study

    def should_stop(self) -> bool:
        return len(self.study.ran) >= self.study.most


def play(path: Path, league: str = "defaults", most: int = 99, **given: Any) -> list[str]:
    """Run a small league and return the finished methods."""
    out, observer = given.pop("out", None), Counting(most)
    problems: list[str] = []
    entries, _ = plan_league(league, Wanted(**SMALL, **given))
    try:
        run_entries(entries, path, problems, observer=observer, out=out)
    finally:
        assert not problems
    return observer.ran


def test_rows_are_run_once_and_only_what_changed_again(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    assert play(path, methods=["fedavg", "reef"], seeds=2) == ["fedavg", "reef"]
    rows = read_rows(path)
    assert [(row.method, row.seeds, len(row.scores)) for row in rows.values()] == [
        ("fedavg", 2, 2),
        ("reef", 2, 2),
    ]
    assert all(row.mean > 0.2 and row.bytes_per_round > 0 for row in rows.values())
    assert play(path, methods=["fedavg", "reef"], seeds=2) == []
    assert play(path, methods=["fedavg", "reef"], seeds=1) == []  # more are there
    assert play(path, methods=["fedavg", "local"], seeds=2) == ["local"]
    assert play(path, methods=["fedavg"], seeds=3) == ["fedavg"]
    assert len(read_rows(path)) == 3
    assert [one.name for one in tmp_path.iterdir()] == ["l.csv"]  # nothing else is kept


def test_a_row_has_the_numbers_of_its_command(tmp_path: Path, monkeypatch) -> None:
    from click.testing import CliRunner

    from atoll.cli import main

    path = tmp_path / "l.csv"
    play(path, methods=["gcfl+"], seeds=2)
    (row,) = read_rows(path).values()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, [*row.command.split()[1:], "--json", "--quiet"])
    found = json.loads(done.stdout.splitlines()[-1])["metrics"]["test_accuracy"]
    assert found["per_seed"] == pytest.approx(row.scores, abs=1e-5)


def test_a_stopped_league_keeps_its_rows_and_continues(tmp_path: Path) -> None:
    path, methods = tmp_path / "l.csv", ["local", "fedavg", "fedprox"]
    with pytest.raises(Stopped):
        play(path, methods=methods, seeds=1, most=2)
    assert [row.method for row in read_rows(path).values()] == ["fedavg", "local"]
    assert play(path, methods=methods, seeds=1) == ["fedprox"]


def test_the_search_sees_validation_scores_alone_and_the_choice_is_scored(
    tmp_path: Path, monkeypatch
) -> None:
    recipe = leagues.read_leagues()
    tuned = recipe.leagues["tuned"]
    grids = ({"hidden": (4, 8), "rate": (1, 3)},)
    small = leagues.msgspec.structs.replace(tuned, grids=grids, seeds={"owners": 2})
    small = leagues.msgspec.structs.replace(recipe, leagues={"tuned": small})
    monkeypatch.setattr(leagues, "read_leagues", lambda: small)
    path, out = tmp_path / "l.csv", tmp_path / "runs"
    with pytest.raises(Stopped):
        play(path, "tuned", methods=["fedavg"], most=3, out=out)
    assert len(read_rows(trials_file(path))) == 3
    assert play(path, "tuned", methods=["fedavg"], out=out) == ["fedavg"] * 2  # a trial, the test
    trials = list(read_rows(trials_file(path)).values())
    best = max(trials, key=lambda row: row.mean)
    (row,) = read_rows(path).values()
    assert (row.league, row.settings, row.seeds) == ("tuned", best.settings, 2)
    for folder in (out / "trials" / "cells").iterdir():
        metrics = json.loads((folder / "result.json").read_text())["metrics"]
        assert metrics["val_accuracy"]["mean"] in [pytest.approx(one.mean) for one in trials]
        assert not any(name.startswith("test_") for name in metrics)
    assert play(path, "tuned", methods=["fedavg"]) == []


def test_a_run_that_diverges_is_a_row_and_another_failure_is_tried_again(
    tmp_path: Path, monkeypatch
) -> None:
    run = RunPlan.run

    def fails(plan: RunPlan, **how: Any) -> Any:
        if plan.given.method == "fedavg":
            raise StepError(0, "train", 1, "its loss is not finite")
        if plan.given.method == "local":
            raise MemoryError("too small")
        return run(plan, **how)

    path, methods = tmp_path / "l.csv", ["fedavg", "local", "fedprox"]
    monkeypatch.setattr(RunPlan, "run", fails)
    entries, _ = plan_league("defaults", Wanted(**SMALL, methods=methods, seeds=1))
    problems: list[str] = []
    run_entries(entries, path, problems)
    assert [one.partition(": ")[0].rpartition("-")[0] for one in problems] == [
        f"defaults-lagoon-nodes-150-owners-{name}" for name in ("fedavg", "local")
    ]
    assert {row.method: row.mean is None for row in read_rows(path).values()} == {
        "fedavg": True,
        "fedprox": False,
    }
    monkeypatch.setattr(RunPlan, "run", run)
    assert play(path, methods=methods, seeds=1) == ["local"]
