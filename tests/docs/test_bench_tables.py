"""A table goes on where it is: what it has is neither run again nor lost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from bench.tables import COLUMNS, is_known, keys_of, read_table, run_all, share_of, table, tables
from click.testing import CliRunner
from rich.console import Console

from atoll.experiment.config import RunConfig
from atoll.studies.reproduce.recipes import Printed
from atoll.studies.reproduce.table import ReproducedRow
from atoll.studies.study_run import StudyRun

RULES = ("fedtad", "strict")
PAPER = SimpleNamespace(name="fedtad")


def printed_number(method: str) -> tuple[Any, str, ReproducedRow]:
    printed = Printed("1", "Cora", "louvain-nonoverlap", "5", method, "acc", 82.0, None)
    cells = {rules: (StudyRun(f"{method}-{rules}", RunConfig(seeds=5)),) for rules in RULES}
    return PAPER, "1", ReproducedRow(printed, cells, ("accuracy",))


def line(method: str, rules: str, ours: str, seeds: int = 5, paper: str = "fedtad") -> list[str]:
    about = f"{paper},1,Cora,louvain-nonoverlap,5,{method},acc,82.0,,{rules}"
    return f"{about},{ours},0.5,{seeds},cuda".split(",")


def written(tmp_path: Path, *lines: list[str]) -> Path:
    path = tmp_path / "t.csv"
    path.write_text("".join(",".join(one) + "\n" for one in (COLUMNS, *lines)))
    return path


def run(folder: Path, name: str, accuracy: float) -> None:
    (folder / "cells" / name).mkdir(parents=True)
    found = {"mean": accuracy, "std": 0.01, "per_seed": [accuracy] * 5}
    summary = {"seeds": 5, "device": "cpu", "metrics": {"accuracy": found}}
    (folder / "cells" / name / "result.json").write_text(json.dumps(summary))


def test_a_number_is_known_with_all_protocols_and_enough_seeds(tmp_path: Path) -> None:
    both = [line("FedAvg", rules, "81.0") for rules in RULES]
    keys = keys_of(*printed_number("FedAvg"))
    assert is_known(read_table(written(tmp_path, *both)), keys, 5)
    assert not is_known(read_table(written(tmp_path, *both)), keys, 6)
    assert not is_known(read_table(written(tmp_path, both[0])), keys, 5)
    assert not is_known(read_table(written(tmp_path, *both)), keys_of(*printed_number("X")), 5)
    assert read_table(tmp_path / "none.csv") == {}
    assert read_table(None) == {}


def test_runs_come_before_what_is_known_and_nothing_known_is_lost(tmp_path: Path) -> None:
    other = line("FedAvg", "strict", "70.0", paper="fediih")
    known = [line(method, rules, "81.0") for method in ("FedAvg", "FedTAD") for rules in RULES]
    path = written(tmp_path, other, *known)
    for rules in RULES:
        run(tmp_path, f"FedTAD-{rules}", 0.77)
    run(tmp_path, "FedAvg-strict", 0.66)  # without its other protocol
    asked = [printed_number(method) for method in ("FedTAD", "FedAvg", "FedProx")]
    lines = table(asked, tmp_path, read_table(path))
    assert [list(map(str, one))[5:] for one in lines] == [
        ["FedTAD", "acc", "82.0", "None", "fedtad", "77.0", "1.0", "5", "cpu"],
        ["FedTAD", "acc", "82.0", "None", "strict", "77.0", "1.0", "5", "cpu"],
        known[0][5:],
        known[1][5:],
        other[5:],
    ]


def test_a_file_that_is_no_such_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(click.ClickException, match="other columns"):
        read_table(tmp_path / "t.csv")


def cell(name: str, **options: Any) -> StudyRun:
    return StudyRun(name, RunConfig(data="lagoon:nodes=150", clients=3, rounds=2, **options))


def test_a_share_has_whole_federations() -> None:
    data = ("cora", "citeseer", "pubmed")
    cells = [StudyRun(f"{m}-{d}", RunConfig(data=d, method=m)) for m in "ab" for d in data]
    assert [one.name for one in share_of(cells, 2)] == ["a-cora", "a-pubmed", "b-cora", "b-pubmed"]
    assert share_of(cells, 1) == cells


def test_little_is_written_of_most_runs(tmp_path: Path) -> None:
    cells = [cell("whole", seeds=2), cell("most", seeds=2)]
    assert not run_all(tmp_path, cells, frozenset(["whole"]), "1", 60, Console(quiet=True))
    kept = [{path.name for path in (tmp_path / "cells" / c.name).iterdir()} for c in cells]
    assert {"metrics.csv", "model", "seed-0"} < kept[0]
    assert kept[1] == {"config.toml", "result.json"}
    one, two = (
        json.loads((tmp_path / "cells" / c.name / "result.json").read_text()) for c in cells
    )
    assert one["metrics"] == two["metrics"]
    assert one["ledger"] == two["ledger"]


@pytest.mark.parametrize("options", [["--jobs", "many"], ["--jobs", "-1"], ["--papers", "none"]])
def test_a_wrong_option_is_refused_in_one_sentence(tmp_path: Path, options: list[str]) -> None:
    found = CliRunner().invoke(tables, ["--out", str(tmp_path / "out"), *options])
    assert isinstance(found.exception, SystemExit)
    assert found.exit_code == 1
    assert found.output.startswith("Error: ")
    assert found.output.count("\n") == 1
