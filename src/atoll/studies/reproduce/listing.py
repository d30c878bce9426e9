"""What can be reproduced: every table and figure of the papers, in a line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.present.tables import DASH, Column, Table, make_table
from atoll.present.terminal import duration
from atoll.studies.costs import estimate_seconds
from atoll.studies.reproduce.figure_plan import figure_runs
from atoll.studies.reproduce.recipes import Paper, absent, find_item, read_paper
from atoll.studies.reproduce.table import Wanted, needed, plan_table, unique
from atoll.studies.study_run import StudyRun


def listing(names: Sequence[str], root: str | None, seeds: int) -> tuple[list[Table], str]:
    """A table for each paper, with a row for each of its tables and figures; and how to read it."""
    wanted = Wanted(seeds=seeds, root=root)
    columns = [
        Column(name, "left" if name in ("what", "it shows", "data") else "right", wrap=True)
        for name in ("what", "it shows", "cells", "data", "rough time")
    ]
    tables = []
    for paper in map(read_paper, names):
        rows = [*_table_rows(paper, wanted), *_figure_rows(paper, wanted)]
        tables.append(make_table(columns, rows, title=f"{paper.name}: {paper.recipe.title}"))
    one = read_paper(names[0])
    first = next(number for number, table in one.recipe.tables.items() if not table.reason)
    example = (
        f"atoll reproduce {one.name} table{first} --only dataset={next(iter(one.recipe.data))}"
    )
    caption = (
        "cells: printed numbers of a table, runs of a figure. Data in brackets are not here. "
        f"Rough time: {seeds} seeds of what is here, one protocol, one core. "
        f"For example: {example}"
    )
    return tables, caption


def _table_rows(paper: Paper, wanted: Wanted) -> Iterator[tuple[object, ...]]:
    for number, recipe in paper.recipe.tables.items():
        if recipe.reason:
            yield f"table{number}", recipe.shows, DASH, "not a result", DASH
            continue
        rows = plan_table(paper, number, wanted)
        runs = unique(run for row in rows for run in needed(row))
        sets = dict.fromkeys(r.printed.dataset for r in rows)
        data = _data(paper, [one for one in sets if one in paper.recipe.data], wanted.root)
        yield f"table{number}", recipe.shows, len(rows), data, _time(runs)


def _figure_rows(paper: Paper, wanted: Wanted) -> Iterator[tuple[object, ...]]:
    for number, recipe in paper.recipe.figures.items():
        if recipe.reason:
            yield f"fig{number}", recipe.shows, DASH, _short_reason(recipe.reason), DASH
            continue
        runs = unique(figure_runs(paper, number, wanted))
        data = _data(paper, recipe.datasets, wanted.root)
        yield f"fig{number}", recipe.shows, len(runs), data, _time(runs)


def _short_reason(reason: str) -> str:
    return "no numbers" if "drawing" in reason else "not drawn"


def _data(paper: Paper, sets: Sequence[str], root: str | None) -> str:
    """What a table needs, absent sets in brackets."""
    return ", ".join(f"({one})" if absent(paper.data_name(one), root) else one for one in sets)


def _time(runs: Sequence[StudyRun]) -> str:
    seconds = sum(estimate_seconds(run.config) for run in runs)
    if not seconds:
        return DASH  # nothing of it is here
    return duration(seconds).removeprefix("about ")


def items(paper: Paper, text: str) -> list[tuple[str, str]]:
    """What a word asks for: one table or figure, or all that are not drawings or descriptions."""
    if text.lower() != "all":
        return [find_item(paper, text)]
    tables, figures = paper.recipe.tables, paper.recipe.figures
    return [
        *(("table", number) for number, one in tables.items() if not one.reason),
        *(("figure", number) for number, one in figures.items() if not one.reason),
    ]
