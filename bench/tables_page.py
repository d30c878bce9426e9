"""`python -m bench tables-page`: what `bench tables` found, as the tables of a page."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click

from atoll.study.reproduce import TOLERANCE, verdict
from atoll.study.reproduce_show import METRIC_WORDS

MARKS = "<!-- tables: made by bench -->", "<!-- end of tables -->"

Line = Mapping[str, str]
Cell = dict[str, Line]
"""One printed number: its line under each protocol."""


@click.command("tables-page")
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def tables_page(table: Path, page: Path) -> None:
    """Write the numbers of TABLE, a CSV file, between the marks of PAGE."""
    with table.open(newline="", encoding="utf-8") as file:
        cells = by_number(csv.DictReader(file))
    text = page.read_text(encoding="utf-8")
    begin, end = MARKS
    if text.count(begin) != 1 or text.count(end) != 1:
        raise click.ClickException(f"{page} needs the lines '{begin}' and '{end}', once each")
    before, after = text.split(begin)[0], text.split(end)[1]
    made = "\n".join(sections(cells))
    page.write_text(f"{before}{begin}\n\n{made}\n{end}{after}", encoding="utf-8")
    near = sum(comes_out(cell) for cell in cells)
    click.echo(f"{len(cells)} printed numbers, {near} come out")


def by_number(lines: Iterable[Line]) -> list[Cell]:
    """The lines of each printed number together."""
    found: dict[tuple[str, ...], Cell] = {}
    for line in lines:
        names = ("paper", "table", "dataset", "setting", "clients", "method", "metric", "printed")
        found.setdefault(tuple(line[name] for name in names), {})[line["protocol"]] = line
    return list(found.values())


def comes_out(cell: Cell) -> bool:
    """Whether ours, under the paper's own protocol, is near the print."""
    line = paper_line(cell)
    limit = max(TOLERANCE, float(line["printed_std"] or 0))
    return verdict(float(line["ours"]) - float(line["printed"]), limit) == "reproduced"


def paper_line(cell: Cell) -> Line:
    """The line under the paper's own protocol."""
    return min(cell.items(), key=lambda one: one[0] == "strict")[1]


def sections(cells: Iterable[Cell]) -> Iterator[str]:
    """A heading for each table of each paper, and a table for each data set and setting."""
    grouped: dict[tuple[str, str], dict[tuple[str, str, str], list[Cell]]] = {}
    for cell in cells:
        line = paper_line(cell)
        inner = line["dataset"], line["setting"], line["metric"]
        grouped.setdefault((line["paper"], line["table"]), {}).setdefault(inner, []).append(cell)
    for (paper, table), tables in grouped.items():
        yield f"## {PAPERS.get(paper, paper)}, Table {table}\n"
        for (dataset, setting, metric), some in tables.items():
            near = sum(map(comes_out, some))
            how = ", ".join([SETTINGS.get(part, part) for part in setting.split(";")])
            what = METRIC_WORDS.get(metric, metric)
            yield f"**{dataset}**, {how} ({what}; {near} of {len(some)} come out):\n"
            yield from grid(some)
            yield ""


PAPERS = {"fedath": "FedATH", "fediih": "FedIIH", "fedtad": "FedTAD", "gcfl": "GCFL"}
SETTINGS = {
    "louvain-nonoverlap": "Louvain",
    "metis-nonoverlap": "METIS",
    "metis-overlap": "METIS, overlapping",
}


def grid(cells: Iterable[Cell]) -> Iterator[str]:
    """Methods down, numbers of clients across."""
    rows: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        line = paper_line(cell)
        rows.setdefault(line["method"], {})[line["clients"]] = cell
    clients = sorted({number for row in rows.values() for number in row}, key=int)
    yield "| | " + " | ".join(f"{number} clients" for number in clients) + " |"
    yield "|---" * (len(clients) + 1) + "|"
    for method, row in rows.items():
        shown = [words(row[number]) if number in row else "–" for number in clients]
        yield f"| {method} | " + " | ".join(shown) + " |"


def words(cell: Cell) -> str:
    """The print → ours, bold if it comes out; then ours under `strict`."""
    line = paper_line(cell)
    ours = _number(line)
    text = f"{float(line['printed']):.1f} → " + (f"**{ours}**" if comes_out(cell) else ours)
    strict = cell.get("strict")
    return text if strict is None or strict is line else f"{text}, {_number(strict)}"


def _number(line: Line) -> str:
    return f"{float(line['ours']):.1f} ± {float(line['std']):.1f}"
