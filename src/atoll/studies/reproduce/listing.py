"""What can be reproduced: every table and figure of the papers, in a line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from atoll.present.terminal import duration
from atoll.studies.costs import estimate_seconds
from atoll.studies.reproduce.figure_plan import figure_runs
from atoll.studies.reproduce.recipes import Paper, absent, find_item, read_paper
from atoll.studies.reproduce.table import Wanted, needed, plan_table, unique


def listing(names: Sequence[str], root: str | None, seeds: int) -> Group:
    """What can be reproduced: one line for each table and figure."""
    parts: list[Any] = []
    for name in names:
        paper = read_paper(name)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for column in ("what", "it shows", "cells", "data", "rough time"):
            left = column in ("what", "it shows", "data")
            table.add_column(column, justify="left" if left else "right")
        wanted = Wanted(seeds=seeds, root=root)
        for number, recipe in paper.recipe.tables.items():
            if recipe.reason:
                table.add_row(f"table{number}", recipe.shows, "–", "not a result", "–")
                continue
            rows = plan_table(paper, number, wanted)
            cells = unique(cell for row in rows for cell in needed(row))
            sets = list(dict.fromkeys(r.printed.dataset for r in rows))
            known = [one for one in sets if one in paper.recipe.data]
            table.add_row(
                f"table{number}",
                recipe.shows,
                str(len(rows)),
                _data(paper, known, root),
                _time(sum(estimate_seconds(cell.config) for cell in cells)),
            )
        for number, figure in paper.recipe.figures.items():
            if figure.reason:
                table.add_row(f"fig{number}", figure.shows, "–", _short_reason(figure.reason), "–")
                continue
            own = unique(figure_runs(paper, number, wanted))
            table.add_row(
                f"fig{number}",
                figure.shows,
                str(len(own)),
                _data(paper, figure.datasets, root),
                _time(sum(estimate_seconds(cell.config) for cell in own)),
            )
        title = f"{name}: {paper.recipe.title}"
        parts += [Text(title, style="bold"), table, Text()]
    one = read_paper(names[0])
    first = next(number for number, table in one.recipe.tables.items() if not table.reason)
    example = (
        f"atoll reproduce {one.name} table{first} --only dataset={next(iter(one.recipe.data))}"
    )
    parts.append(
        Text(
            "cells: printed numbers of a table, runs of a figure. Data in brackets are not here. "
            f"Rough time: {seeds} seeds of what is here, one protocol, one core. "
            f"For example: {example}",
            style="dim",
        )
    )
    return Group(*parts)


def _short_reason(reason: str) -> str:
    return "no numbers" if "drawing" in reason else "not drawn"


def _data(paper: Paper, sets: Sequence[str], root: str | None) -> str:
    """What a table needs, absent sets in brackets."""
    return ", ".join(f"({one})" if absent(paper.data_name(one), root) else one for one in sets)


def _time(seconds: float) -> str:
    if not seconds:
        return "–"  # nothing of it is here
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
