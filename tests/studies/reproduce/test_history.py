"""Calls of one folder make one table together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError
from atoll.studies.reproduce.history import read_tables, whole_table
from atoll.studies.reproduce.recipes import read_paper
from atoll.studies.reproduce.table import Wanted, about_study, needed, parse_only, plan_table

ATH = read_paper("fedath")


def call(folder: Path, method: str, seeds: int = 1) -> list[str]:
    """Write a call for one cell into study.json; the names of its runs."""
    only = parse_only([f"dataset=Cora,clients=10,method={method}"])
    wanted = Wanted(only, seeds=seeds)
    about = about_study(ATH, "table1", wanted, folder)
    (folder / "study.json").write_text(json.dumps(about))
    return [run.name for row in plan_table(ATH, "1", wanted) for run in needed(row)]


def finish(folder: Path, name: str, mean: float) -> None:
    spread = {"mean": mean, "std": None, "per_seed": [mean]}
    (folder / "cells" / name).mkdir(parents=True)
    content = {"seeds": 1, "metrics": {"test_accuracy": spread}}
    (folder / "cells" / name / "result.json").write_text(json.dumps(content))


def test_a_later_call_for_another_cell_keeps_the_first(
    everything_here: None, tmp_path: Path
) -> None:
    (average,) = call(tmp_path, "FedAvg")
    finish(tmp_path, average, 0.75)
    (other,) = call(tmp_path, "FedProx")
    failed = {"event": "failed", "cell": other, "error": "it broke"}
    (tmp_path / "events.jsonl").write_text(json.dumps(failed) + "\n")
    (table,) = read_tables(tmp_path)
    assert [row.printed.method for row in table.rows] == ["FedAvg", "FedProx"]
    assert table.rows[0].ours["fedath"].mean == pytest.approx(75.0)
    assert table.verdict(table.rows[1]) == "failed: FedProx: it broke"
    # A second call for more seeds replaces the first one, and its number stays.
    call(tmp_path, "FedAvg", seeds=2)
    assert len(json.loads((tmp_path / "study.json").read_text())["looks"]) == 2
    again = whole_table(tmp_path, ATH, "1", None)
    assert (again.seeds, again.rows[0].ours["fedath"].seeds) == (2, 1)
    assert whole_table(tmp_path, ATH, "1", 5).rows == ()  # shortened calls are another table


def test_a_call_that_cannot_be_read_is_one_sentence(everything_here: None, tmp_path: Path) -> None:
    call(tmp_path, "FedAvg")
    about = json.loads((tmp_path / "study.json").read_text())
    about["looks"][0]["seeds"] = "many"
    (tmp_path / "study.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=r"study\.json in .* cannot be used"):
        read_tables(tmp_path)
