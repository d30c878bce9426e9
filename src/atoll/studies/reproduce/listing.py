"""What can be reproduced: every table and figure of the papers, in a line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.present.tables import DASH, Column, Part, heading, make_table, quiet
from atoll.present.terminal import duration
from atoll.studies.reproduce.figures import Figure
from atoll.studies.reproduce.recipes import Paper, absent, find_item, read_paper
from atoll.studies.reproduce.table import Wanted, needed, plan_table, unique
from atoll.studies.study_run import StudyRun, cost_of


def listing_parts(names: Sequence[str], root: str | None, seeds: int) -> list[Part]:
    """A table for each paper, with a row for each of its tables and figures; and how to read it."""
    wanted = Wanted(seeds=seeds, root=root)
    columns = [
        Column(name, "left" if name in ("what", "it shows", "data") else "right", wrap=True)
        for name in ("what", "it shows", "cells", "data", "rough time")
    ]
    tables = [
        make_table(columns, _rows(one, wanted), title=f"{one.name}: {one.recipe.title}")
        for one in map(read_paper, names)
    ]
    paper = read_paper(names[0])
    first = next(number for number, table in paper.recipe.tables.items() if not table.reason)
    caption = (
        "cells: printed numbers of a table, runs of a figure. Data in brackets are not here. "
        f"Rough time: {seeds} seeds of what is here, one protocol, one core. For example: "
        f"atoll reproduce {paper.name} table{first} --only dataset={next(iter(paper.recipe.data))}"
    )
    parts = [part for table in tables for part in (heading(table.title), table, "")]
    return [*parts, quiet(caption)]


def _rows(paper: Paper, wanted: Wanted) -> Iterator[tuple[object, ...]]:
    for number, table in paper.recipe.tables.items():
        start = f"table{number}", table.shows
        if table.reason:
            yield *start, DASH, "made of the data" if table.from_data else "not a result", DASH
            continue
        rows = plan_table(paper, number, wanted)
        names = dict.fromkeys(row.printed.dataset for row in rows)
        sets = [name for name in names if name in paper.recipe.data]
        runs = unique(run for row in rows for run in needed(row))
        yield *start, len(rows), *_data_and_time(paper, sets, runs, wanted.root)
    for number, figure in paper.recipe.figures.items():
        start = f"fig{number}", figure.shows
        if figure.reason:
            yield *start, DASH, "no numbers" if "drawing" in figure.reason else "not drawn", DASH
            continue
        runs = Figure(paper, number, "", wanted).runs()
        yield *start, len(runs), *_data_and_time(paper, figure.datasets, runs, wanted.root)


def _data_and_time(
    paper: Paper, sets: Sequence[str], runs: Sequence[StudyRun], root: str | None
) -> tuple[str, str]:
    """The data sets of a table, absent ones in brackets, and the time that its runs take here."""
    words = [f"({one})" if absent(paper.data_name(one), root) else one for one in sets]
    seconds = sum(cost_of(run.config) for run in runs)
    return ", ".join(words), duration(seconds).removeprefix("about ") if seconds else DASH


def items(paper: Paper, text: str) -> list[tuple[str, str]]:
    """The items of a word: one table or figure, or all that are not drawings or descriptions."""
    if text.lower() != "all":
        return [find_item(paper, text)]
    return [
        *(("table", number) for number, one in paper.recipe.tables.items() if not one.reason),
        *(("figure", number) for number, one in paper.recipe.figures.items() if not one.reason),
    ]
