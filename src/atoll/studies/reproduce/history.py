"""Every call of `atoll reproduce` in one folder, and the tables that they make together.

study.json lists all calls under "looks". So a call for a part leaves the files of a table complete,
and `atoll report` finds everything. Calls with fewer rounds than published make separate tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from atoll.core.errors import AtollError, ConfigError
from atoll.experiment.folder import read_json
from atoll.experiment.status import failures
from atoll.studies.reproduce import table as tables
from atoll.studies.reproduce.recipes import STRICT, Paper, Printed, read_paper
from atoll.studies.reproduce.table import ReproducedRow, Reproduction, Wanted
from atoll.studies.study_run import Json, RunOutcome, StudyRun, read_outcome


def read_tables(folder: Path) -> list[Reproduction]:
    """Every requested table of a folder, in the order of the first call for each."""
    about = read_json(folder / "study.json")
    paper = read_paper(str(about.get("paper")))
    calls = [(str(one["item"]), _wanted(one, folder)) for one in about.get("looks", [])]
    items = dict.fromkeys((item, wanted.rounds) for item, wanted in calls)
    found = [
        whole_table(folder, paper, item.removeprefix("table"), rounds)
        for item, rounds in items
        if item.startswith("table")
    ]
    return [table for table in found if table.rows]


def _wanted(call: Json, folder: Path) -> Wanted:
    """The request of a call."""
    given = {key: value for key, value in call.items() if key not in ("item", "command")}
    try:
        return msgspec.convert(given, Wanted)
    except (AtollError, msgspec.ValidationError) as error:
        raise ConfigError(f"study.json in '{folder}' cannot be used: {error}") from error


def whole_table(folder: Path, paper: Paper, table: str, rounds: int | None) -> Reproduction:
    """All numbers of a table whose runs a folder holds, and why others have none.

    Of several calls for a cell (on another device, say) the last one with a number counts.
    """
    calls = [
        _wanted(one, folder)
        for one in read_json(folder / "study.json").get("looks", [])
        if one["item"] == f"table{table}" and one["rounds"] == rounds
    ]
    rows: dict[Printed, ReproducedRow] = {}
    gains, failed = tables.Gains(), failures(folder)
    done = {path.parent.name for path in folder.glob("cells/*/result.json")}
    for wanted in calls:
        for row in tables.plan_table(paper, table, wanted, done):
            found = [_outcome(folder, run, failed) for run in tables.needed(row)]
            new = tables.filled(row, {one.run.name: one for one in found if one}, gains)
            rows[row.printed] = _joined(rows.get(row.printed, new), new)
    ordered = [rows[one] for one in tables.in_order(paper.cells(table)) if one in rows]
    shown = [row for row in ordered if row.ours or row.errors or row.reason]
    both = any(wanted.both for wanted in calls)
    rules = (paper.recipe.protocol, *([STRICT] if both else []))
    seeds = max((wanted.seeds for wanted in calls), default=0)
    return Reproduction(paper, table, tuple(shown), rules, rounds, seeds)


def _outcome(folder: Path, run: StudyRun, failed: Mapping[str, str]) -> RunOutcome | None:
    """How a run ended, as far as the folder knows."""
    if run.name in failed:
        return RunOutcome(run, folder / "cells" / run.name, error=failed[run.name])
    # An earlier call may have asked for fewer seeds than there are, never for more.
    return read_outcome(folder, replace(run, config=msgspec.structs.replace(run.config, seeds=1)))


def _joined(before: ReproducedRow, now: ReproducedRow) -> ReproducedRow:
    """A row together with the numbers of an earlier call."""
    ours = {**before.ours, **now.ours}
    errors = {rules: e for rules, e in {**before.errors, **now.errors}.items() if rules not in ours}
    reason = "" if ours else now.reason
    return replace(now, ours=ours, runs={**before.runs, **now.runs}, reason=reason, errors=errors)
