"""The trials of a tuning on the page."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from atoll.core.errors import AtollError
from atoll.report import collect, write_report
from atoll.report.page import page
from atoll.report.tuning import _axis_of
from atoll.studies.tune.result import read_tried


def section(html: str, name: str) -> str:
    return html.partition(f'<section id="{name}"')[2].partition("</section>")[0]


def test_a_tuning_shows_its_trials(tuned: Path) -> None:
    with (tuned / "trials.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "fedprox"]
    states = [row["state"] for row in rows]
    assert "pruned" in states
    tried = read_tried(tuned)[1]
    assert [trial.state for trial in tried.trials] == states
    assert [str(trial.settings["lr"]) for trial in tried.trials] == [row["lr"] for row in rows]
    best = json.loads((tuned / "tune.json").read_text())["methods"]["fedprox"]
    assert tried.best is not None
    assert (tried.best.number, tried.best.value) == (best["best_trial"], best["validation"])
    text = section(page(collect([tuned])), "tuning")
    assert f"8 trials: {states.count('complete')} complete, {states.count('pruned')} pruned" in text
    assert "--set hidden" not in text  # it was fixed, not searched
    assert text.count('class="line c1"') == 2  # the best so far, of each method
    test = json.loads((tuned / "cells" / "test-fedprox" / "result.json").read_text())
    assert f"on test data <b>{100 * test['metrics']['test_accuracy']['mean']:.1f}</b>" in text
    assert f"trial {best['best_trial']} with {100 * best['validation']:.1f} percent" in text


def test_a_tuning_without_a_test_is_a_page_too(tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "begun"
    shutil.copytree(tuned, folder, ignore=shutil.ignore_patterns("test-*"))
    about = json.loads((folder / "study.json").read_text())
    about["cells"] = [c for c in about["cells"] if c["labels"]["role"] == "trial"]
    (folder / "study.json").write_text(json.dumps(about))
    lines = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("\n".join(lines[:10]) + "\n")
    files = {"md": tmp_path / "t.md"}
    write_report([folder], tmp_path / "r.html", tables=files)
    text = (tmp_path / "r.html").read_text()
    assert "No run has been tested yet" in text
    assert ", 3 left." in text
    assert "No trial is complete yet." in text  # of the second method
    assert 'id="convergence"' not in text
    assert "| fedavg |" in files["md"].read_text()
    (folder / "events.jsonl").write_text("")
    with pytest.raises(AtollError, match=r"nothing to report: 16 trials of 'begun' had no test"):
        collect([folder])


def test_few_values_that_come_again_stand_side_by_side() -> None:
    words, place = _axis_of("hidden", {0: 64, 1: 256, 2: 64, 3: 256})
    assert [text for _, text in words.ticks] == ["64", "256"]
    assert place == {0: 0, 1: 1, 2: 0, 3: 1}
    drawn, place = _axis_of("lr", {0: 0.01, 1: 0.0001, 2: 0.1, 3: 0.01})
    assert drawn.log
    assert place[1] == 0.0001
    assert _axis_of("net", {0: "sage", 1: "gcn"})[1] == {0: 1, 1: 0}
