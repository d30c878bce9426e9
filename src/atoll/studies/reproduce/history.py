"""Every look at a paper in one folder, and the tables that they make together.

A look is one call of `atoll reproduce`: a table, perhaps some cells of it, so many seeds. The
study's "looks" remember all of them. So a look at a part leaves the files of a table as full as
they were, and `atoll report` finds what was reproduced, finished or not. Looks with fewer rounds
than published make tables of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.errors import AtollError, ConfigError
from atoll.experiment.events import failures
from atoll.experiment.folder import read_json
from atoll.studies.reproduce.recipes import STRICT, Paper, Printed, read_paper
from atoll.studies.reproduce.table import (
    Gains,
    Reproduction,
    Row,
    Wanted,
    filled,
    in_order,
    needed,
    plan_table,
)
from atoll.studies.study import Cell, Outcome, read_cell


def read_tables(folder: Path) -> list[Reproduction]:
    """Every table that was asked for in a folder, in the order of the first look at each."""
    about = read_json(folder / "study.json")
    paper = read_paper(str(about.get("paper")))
    looks = [(str(one["item"]), wanted_of(one, folder)) for one in about.get("looks", [])]
    asked = dict.fromkeys((item, wanted.rounds) for item, wanted in looks)
    found = [
        whole_table(folder, paper, item.removeprefix("table"), rounds)
        for item, rounds in asked
        if item.startswith("table")
    ]
    return [table for table in found if table.rows]


def wanted_of(look: Mapping[str, Any], folder: Path) -> Wanted:
    """What a look asked for."""
    given = {key: value for key, value in look.items() if key not in ("item", "command")}
    try:
        return msgspec.convert(given, Wanted)
    except (AtollError, msgspec.ValidationError) as error:
        raise ConfigError(f"study.json in '{folder}' cannot be used: {error}") from error


def whole_table(folder: Path, paper: Paper, table: str, rounds: int | None) -> Reproduction:
    """All numbers of a table whose runs a folder holds, and why others have none.

    Of several looks at a cell (on another device, say) the last one that has a number counts.
    """
    looks = [
        wanted_of(one, folder)
        for one in read_json(folder / "study.json").get("looks", [])
        if one["item"] == f"table{table}" and one["rounds"] == rounds
    ]
    rows: dict[Printed, Row] = {}
    gains, failed = Gains(), failures(folder)
    done = {path.parent.name for path in folder.glob("cells/*/result.json")}
    for wanted in looks:
        for row in plan_table(paper, table, wanted, done):
            found = {cell.name: _outcome(folder, cell, failed) for cell in needed(row)}
            known = {name: outcome for name, outcome in found.items() if outcome is not None}
            new = filled(row, known, gains)
            rows[row.printed] = _joined(rows.get(row.printed), new)
    ordered = [rows[one] for one in in_order(paper.cells(table)) if one in rows]
    told = [row for row in ordered if row.ours or row.errors or row.reason]
    both = any(wanted.both for wanted in looks)
    rules = (paper.recipe.protocol, *([STRICT] if both else []))
    seeds = max((wanted.seeds for wanted in looks), default=0)
    return Reproduction(paper, table, tuple(told), rules, rounds, seeds)


def _outcome(folder: Path, cell: Cell, failed: Mapping[str, str]) -> Outcome | None:
    """What became of a run, as far as the folder knows."""
    if cell.name in failed:
        return Outcome(cell, folder / "cells" / cell.name, error=failed[cell.name])
    # An earlier look may have asked for fewer seeds than there are, never for more.
    return read_cell(folder, replace(cell, config=msgspec.structs.replace(cell.config, seeds=1)))


def _joined(before: Row | None, now: Row) -> Row:
    """A row with what an earlier look has found beside it."""
    if before is None:
        return now
    lost = {rules: error for rules, error in before.errors.items() if rules not in now.ours}
    ours = {**before.ours, **now.ours}
    return replace(
        now,
        ours=ours,
        cells={**before.cells, **now.cells},
        reason="" if ours else now.reason,
        errors={rules: e for rules, e in (lost | dict(now.errors)).items() if rules not in ours},
    )
