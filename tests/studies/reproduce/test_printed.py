"""The printed tables of a reproduction and their files."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from atoll.present.tables import rich_table
from atoll.studies.reproduce.printed import how, summary, terminal_tables, with_runs, write_table
from atoll.studies.reproduce.recipes import PAPERS, read_paper
from atoll.studies.reproduce.table import (
    Ours,
    Reproduction,
    Wanted,
    plan_table,
)


@pytest.mark.parametrize("name", PAPERS)
def test_no_number_is_cut_off_in_a_terminal_of_80_columns(name: str, everything_here: None) -> None:
    paper, wanted = read_paper(name), Wanted(both=True)
    for number, recipe in paper.recipe.tables.items():
        if recipe.reason:
            continue
        ours = dict.fromkeys(wanted.looks(paper, number), Ours(80.25, 11.25, 3))
        rows = tuple(replace(row, ours=ours) for row in plan_table(paper, number, wanted))
        found = Reproduction(paper, number, rows, wanted.rules(paper), None, 3)
        console = Console(width=80, record=True, file=io.StringIO())
        for drawn in terminal_tables(found):
            console.print(rich_table(drawn))
        text = console.export_text()
        assert "…" not in text
        assert text.count("80.2 ± 11.2") >= sum(not row.reason for row in rows)


def test_both_verdicts_and_the_last_round_are_shown(everything_here: None, tmp_path: Path) -> None:
    paper, wanted = read_paper("fedtad"), Wanted((("method", "FedAvg"),))
    numbers = {"fedtad": Ours(44.8, 0.5, 3), "fedtad:last": Ours(41.5, 2.0, 3)}
    first, *rest = plan_table(paper, "4", wanted)
    assert first.printed.value == 44.5
    rows = (replace(first, ours=numbers), *(replace(row, ours={}) for row in rest))
    found = Reproduction(paper, "4", rows, wanted.rules(paper), None, 3)
    markdown = write_table(found, tmp_path, tex=False)[1].read_text()
    assert "| 44.5 ± 0.4 | 44.8 ± 0.5 | +0.3 | reproduced ~ | 41.5 ± 2.0 |" in markdown
    assert "1 of 1 statistically compatible" in markdown
    record = summary(found)["cells"][0]
    assert (record["compatible"], record["last_ours"]) == (True, 41.5)
    assert all(table.columns[-1].name == "last" for table in terminal_tables(found))


def test_files_tell_cells_without_a_run_apart(everything_here: None, tmp_path: Path) -> None:
    paper, wanted = read_paper("gcfl"), Wanted()
    rows = tuple(
        row if row.printed.dataset == "MOLECULES" else replace(row, reason="no data")
        for row in plan_table(paper, "4", wanted)
    )
    found = Reproduction(paper, "4", rows, wanted.rules(paper), None, 3)
    markdown = write_table(found, tmp_path, tex=True)[1].read_text()
    heads = [line.split(" | ")[:4] for line in markdown.splitlines() if line.startswith("| ")][1:]
    assert len({tuple(head) for head in heads}) == len(rows)
    assert ["| MIX", "13", "self-train", "accuracy"] in heads
    assert "MOLECULES," not in markdown  # which is not true of all rows
    assert "MIX & 13 & self-train & accuracy" in (tmp_path / "table-4.tex").read_text()
    assert "MOLECULES, multiDS, 7 clients" in how(found, with_runs(found))
