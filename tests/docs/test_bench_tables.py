"""A table grows: its values are neither run again nor lost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from bench.tables import (
    COLUMNS,
    read_table,
    recipe_of,
    run_all,
    share_of,
    table,
    tables,
    unknown_lines,
)
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
    recipe = recipe_of(printed_number(method)[2], rules)
    return f"{about},{ours},0.5,{seeds},cuda,{recipe}".split(",")


def written(tmp_path: Path, *lines: list[str]) -> Path:
    path = tmp_path / "t.csv"
    path.write_text("".join(",".join(one) + "\n" for one in (COLUMNS, *lines)))
    return path


def run(folder: Path, name: str, accuracy: float) -> None:
    (folder / "cells" / name).mkdir(parents=True)
    found = {"mean": accuracy, "std": 0.01, "per_seed": [accuracy] * 5}
    summary = {"seeds": 5, "device": "cpu", "metrics": {"accuracy": found}}
    (folder / "cells" / name / "result.json").write_text(json.dumps(summary))


def test_lines_are_unknown_without_enough_seeds_or_by_another_recipe(tmp_path: Path) -> None:
    def unknown(method: str, lines: list[list[str]], seeds: int = 5) -> list[str]:
        known = read_table(written(tmp_path, *lines))
        return [rules for _, rules in unknown_lines([printed_number(method)], known, seeds)]

    both = [line("FedAvg", rules, "81.0") for rules in RULES]
    assert unknown("FedAvg", both) == []
    assert unknown("FedAvg", both, 6) == list(RULES)
    assert unknown("FedAvg", both[:1]) == ["strict"]
    assert unknown("X", both) == list(RULES)
    other = [*both[0][:-1], "00000000"]  # its recipe has changed since, that of strict has not
    assert unknown("FedAvg", [other, both[1]]) == ["fedtad"]
    assert read_table(tmp_path / "none.csv") == {}
    assert read_table(None) == {}


def test_runs_come_before_what_is_known_and_nothing_known_is_lost(tmp_path: Path) -> None:
    other = line("FedAvg", "strict", "70.0", paper="fediih")
    known = [line(method, rules, "81.0") for method in ("FedAvg", "FedTAD") for rules in RULES]
    path = written(tmp_path, other, *known)
    for rules in RULES:
        run(tmp_path, f"FedTAD-{rules}", 0.77)
    run(tmp_path, "FedAvg-strict", 0.66)  # its other protocol is known
    asked = [printed_number(method) for method in ("FedTAD", "FedAvg", "FedProx")]
    lines = table(asked, tmp_path, read_table(path))
    assert [list(map(str, one))[5:] for one in lines] == [
        ["FedTAD", "acc", "82.0", "None", "fedtad", "77.0", "1.0", "5", "cpu", known[2][-1]],
        ["FedTAD", "acc", "82.0", "None", "strict", "77.0", "1.0", "5", "cpu", known[3][-1]],
        known[0][5:],
        ["FedAvg", "acc", "82.0", "None", "strict", "66.0", "1.0", "5", "cpu", known[1][-1]],
        other[5:],
    ]


def test_a_file_that_is_no_such_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(click.ClickException, match="does not have the columns"):
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
