"""The trials of a tuning: ranked, read from a folder without Optuna, and printed."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from atoll.present.tables import rich_table
from atoll.studies.tune.result import (
    Trial,
    TuningResult,
    final_table,
    ranking,
    read_tried,
    trials_table,
)
from tests.studies.tune.conftest import tune


def test_the_best_comes_first_and_of_equals_the_earlier() -> None:
    values = (0.5, None, 0.7, 0.7)
    trials = [Trial(n, {}, "complete", value, []) for n, value in enumerate(values)]
    assert [trial.number for trial in ranking(trials)] == [2, 3, 0]


def test_a_folder_gives_the_trials_that_have_ended(whole: TuningResult, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole.folder, tmp_path / "t"))
    (tried,) = read_tried(folder)
    trials = whole.methods["fedavg"].trials
    assert (tried.method, tried.budget, len(tried.trials)) == ("fedavg", 8, 8)
    assert [t.settings for t in tried.trials] == [dict(t.settings) for t in trials]
    assert [t.state for t in tried.trials] == [t.state for t in trials]
    assert tried.count("pruned") == sum(t.state == "pruned" for t in trials)
    assert tried.best is not None
    assert tried.best.value == pytest.approx(whole.methods["fedavg"].best.value)
    (folder / "cells" / f"fedavg-{tried.best.number:04d}" / "result.json").unlink()
    (other,) = read_tried(folder)
    assert other.trials[tried.best.number].state == "failed"
    assert other.best is not None
    assert other.best.number != tried.best.number
    lines = (folder / "events.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["cell"] != "fedavg-0007"]
    (folder / "events.jsonl").write_text("\n".join(kept) + "\n")
    (open_one,) = read_tried(folder)
    assert (len(open_one.trials), open_one.budget) == (7, 8)


def test_the_first_trial_is_called_the_defaults_only_where_it_is(whole: TuningResult) -> None:
    assert whole.methods["fedavg"].defaults
    console = Console(width=80, record=True, file=io.StringIO())
    elsewhere = {"rounds": 1, "set": {"hidden": 8}, "search": {"lr": "0.1..0.3"}}
    found = tune(clients=2, trials=2, **elsewhere)
    assert not found.methods["fedavg"].defaults
    console.print(rich_table(trials_table(found.methods["fedavg"])))
    console.print(rich_table(final_table(found)))
    assert "(default settings)" not in console.export_text(clear=False)
    assert re.search(r"^fedavg +2 +– ", console.export_text(), re.MULTILINE)
