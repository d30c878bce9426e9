"""Studies that an earlier version wrote are shown again, and continue where they were stopped."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import atoll
from atoll.cli.app import main
from atoll.experiment.status import StatusReader
from atoll.studies.tune.result import read_tried
from atoll.studies.tune.tuning import read_request, run_tuning

OLD = Path(__file__).parent / "old"
FEDAVG = "lagoon-nodes=120-words=24-2c-fedavg"


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD / "compare-study", tmp_path / "compare-study"))


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD / "tune-study", tmp_path / "tune-study"))


def resume(command: str, folder: Path, *more: str) -> Result:
    done = CliRunner().invoke(main, [command, "--resume", str(folder), "--quiet", *more])
    assert done.exit_code == 0, done.output
    return done


def scores(folder: Path) -> list[tuple[str, str, float]]:
    rows = csv.DictReader((folder / "compare.csv").read_text().splitlines())
    return [(row["cell"], row["seed"], pytest.approx(float(row["test"]))) for row in rows]


def test_a_finished_comparison_is_shown_and_not_run_again(compared: Path) -> None:
    before, events = scores(compared), (compared / "events.jsonl").read_bytes()
    found = json.loads(resume("compare", compared, "--json").stdout.splitlines()[-1])
    assert [row["method"] for row in found["tables"][0]["rows"]] == ["local", "fedavg"]
    assert scores(compared) == before
    assert (compared / "events.jsonl").read_bytes() == events
    assert StatusReader(compared).read().finished


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_stopped_comparison_continues(compared: Path, jobs: str) -> None:
    before, events = scores(compared), (compared / "events.jsonl").read_text().splitlines()
    for name in ("result.json", "metrics.csv", "ledger.csv"):
        (compared / "cells" / FEDAVG / name).unlink()
    shutil.rmtree(compared / "cells" / FEDAVG / "seed-1")
    (compared / "events.jsonl").write_text("\n".join(events[:3]) + "\n")  # as a kill leaves it
    resume("compare", compared, "--jobs", jobs)
    assert scores(compared) == before
    assert StatusReader(compared).read().finished


def test_a_finished_tuning_is_shown_and_takes_more_trials(tuned: Path) -> None:
    saved = json.loads((tuned / "tune.json").read_text())["methods"]["fedprox"]
    (before,) = read_tried(tuned)
    assert before.best is not None
    assert before.best.value == pytest.approx(saved["validation"])
    found = json.loads(resume("tune", tuned, "--json").stdout.splitlines()[-1])
    assert found["methods"]["fedprox"]["settings"] == saved["settings"]
    events = (tuned / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events].count("begin") == 4  # three and a test
    resume("tune", tuned, "--trials", "4")
    (after,) = read_tried(tuned)
    assert [trial.settings for trial in after.trials[:3]] == [t.settings for t in before.trials]
    assert len(after.trials) == 4


def test_both_are_reported(compared: Path, tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["report", str(compared), str(tuned), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "fedprox" in out.read_text()


def test_the_request_of_an_old_tuning_is_read_in_python(tuned: Path) -> None:
    found = run_tuning(read_request(tuned), tuned)
    assert isinstance(found.methods["fedprox"].test, dict)
    assert atoll.read_result(tuned / "cells" / "test-fedprox").config.method == "fedprox"
