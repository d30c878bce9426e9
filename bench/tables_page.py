"""`python -m bench tables-page`: what `bench tables` found, as the tables of a page."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

import click

from atoll.studies.reproduce.printed import METRIC_WORDS, value_text
from atoll.studies.reproduce.recipes import read_paper
from atoll.studies.reproduce.table import GAINS, tolerance, verdict
from bench.tables import KEY

MARKS = "<!-- tables: made by bench -->", "<!-- end of tables -->"

Line = Mapping[str, str]
Cell = dict[str, Line]
"""One printed number: its line under each protocol."""


@click.command("tables-page")
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="A picture, too.")
def tables_page(table: Path, page: Path, plot: Path | None) -> None:
    """Write the numbers of TABLE, a CSV file, between the marks of PAGE."""
    with table.open(newline="", encoding="utf-8") as file:
        cells = by_number(csv.DictReader(file))
    text = page.read_text(encoding="utf-8")
    begin, end = MARKS
    if text.count(begin) != 1 or text.count(end) != 1:
        raise click.ClickException(f"{page} needs the lines '{begin}' and '{end}', once each")
    before, after = text.split(begin)[0], text.split(end)[1]
    made = "\n".join([*summary(cells), "", *sections(cells)])
    page.write_text(f"{before}{begin}\n\n{made}\n{end}{after}", encoding="utf-8")
    if plot is not None:
        draw(cells, plot)
    near = sum(comes_out(cell) for cell in cells)
    click.echo(f"{len(cells)} printed numbers, {near} come out")


def by_number(lines: Iterable[Line]) -> list[Cell]:
    """The lines of each printed number together."""
    found: dict[tuple[str, ...], Cell] = {}
    for line in lines:
        *number, protocol = (line[name] for name in KEY)
        found.setdefault(tuple(number), {})[protocol] = line
    return list(found.values())


def comes_out(cell: Cell) -> bool:
    """Whether ours, under the paper's own protocol, is near the print."""
    line = paper_line(cell)
    std = float(line["printed_std"]) if line["printed_std"] else None
    limit = tolerance(_recipe(line["paper"]), line["metric"], std)
    return verdict(_ours(cell) - _printed(cell), limit) == "reproduced"


_recipe = cache(read_paper)


def paper_line(cell: Cell) -> Line:
    """The line under the paper's own protocol."""
    return min(cell.items(), key=lambda one: one[0] == "strict")[1]


def summary(cells: Sequence[Cell]) -> Iterator[str]:
    """A column for each paper: whose numbers come out, and where its own method is first."""
    papers = by_paper(cells)
    about = [about_paper(some, name) for name, some in papers.items()]
    yield "## In short\n"
    yield (
        "Cells are compared in which the paper's method has at least five rivals. Its lead over "
        "the best of them is below zero where that one is better.\n"
    )
    yield "| | " + " | ".join(papers) + " |"
    yield "|---" * (len(papers) + 1) + "|"
    for fact in about[0] if about else ():
        yield f"| {fact} | " + " | ".join(one[fact] for one in about) + " |"


def about_paper(cells: Sequence[Cell], name: str) -> dict[str, str]:
    """Facts about a paper's numbers, in words."""
    own = [cell for cell in cells if paper_line(cell)["method"] == name]
    variants = [cell for cell in cells if _is_own(cell, name) and cell not in own]
    others = [cell for cell in cells if not _is_own(cell, name)]
    ahead = [*leads(cells, name)]
    behind = f"{sum(lead.clearly_behind for lead in ahead)} of {len(ahead)}" if ahead else "–"
    return {
        "numbers of its method that come out": _near(own),
        "of its variants": _near(variants),
        "of the baselines": _near(others),
        "its method: mean distance from the print (with the sign)": _away(own),
        "the baselines": _away(others),
        "its method is first in print; mean lead": _first([lead.printed for lead in ahead]),
        "here": _first([lead.ours for lead in ahead]),
        "here, under `strict`": _first([lead.strict for lead in ahead]),
        "here behind the first by more than both spreads": behind,
    }


def _near(cells: Sequence[Cell]) -> str:
    return f"{sum(map(comes_out, cells))} of {len(cells)}"


def _away(cells: Sequence[Cell]) -> str:
    """How far our scores are from the print on average, without and with the sign."""
    points = [_ours(cell) - _printed(cell) for cell in cells if not _is_gain(cell)]
    return f"{mean(map(abs, points)):.1f} ({mean(points):+.1f})" if points else "–"


def _first(leads: Sequence[float]) -> str:
    """How often a method leads, and by how much on average."""
    if not leads:
        return "–"
    return f"{sum(lead > 0 for lead in leads)} of {len(leads)}; {mean(leads):+.1f}"


def by_paper(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """The cells of each paper, by the name of its method."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        paper = paper_line(cell)["paper"]
        found.setdefault(PAPERS.get(paper, paper), []).append(cell)
    return found


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Printed across, ours up, a dot for each number; a panel for each paper, two in a row."""
    from matplotlib.figure import Figure

    papers = by_paper(cell for cell in cells if not _is_gain(cell))
    rows = (len(papers) + 1) // 2
    figure = Figure(figsize=(7, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat[len(papers) :]:
        panel.set_visible(False)
    for panel, (name, some) in zip(panels.flat, papers.items(), strict=False):
        for label, colour, size, part in (
            ("baselines", "0.6", 12, [cell for cell in some if not _is_own(cell, name)]),
            (
                "its own, and variants",
                "tab:blue",
                22,
                [cell for cell in some if _is_own(cell, name)],
            ),
        ):
            x, y = [_printed(cell) for cell in part], [_ours(cell) for cell in part]
            panel.scatter(x, y, size, colour, alpha=0.7, linewidths=0, label=label)
        panel.axline((60, 60), slope=1, color="black", linewidth=0.8)
        panel.set(title=f"{name}'s tables", aspect="equal")
    panels.flat[len(papers) - 1].legend(loc="lower right", frameon=False)
    figure.supxlabel("printed")
    figure.supylabel("ours, under the paper's protocol")
    figure.savefig(path, dpi=170)


@dataclass(frozen=True)
class Lead:
    """Points of the paper's method over the best other one of a cell, each time the best there."""

    printed: float
    ours: float
    strict: float
    spreads: float
    """Of the method and of the best other one here, together."""

    @property
    def clearly_behind(self) -> bool:
        return -self.ours > self.spreads


def leads(cells: Iterable[Cell], name: str) -> Iterator[Lead]:
    """Where a cell has both protocols of the paper's method and of at least five others."""
    groups: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in cells:
        line = paper_line(cell)
        if "strict" in cell:
            key = tuple(line[part] for part in ("table", "dataset", "setting", "clients", "metric"))
            groups.setdefault(key, {})[line["method"]] = cell
    for group in groups.values():
        rivals = [cell for cell in group.values() if not _is_own(cell, name)]
        if name in group and len(rivals) >= 5:
            own, best = group[name], max(rivals, key=_ours)
            yield Lead(
                *(read(own) - max(map(read, rivals)) for read in (_printed, _ours, _strict)),
                spreads=sum(float(paper_line(cell)["std"]) for cell in (own, best)),
            )


def _is_own(cell: Cell, name: str) -> bool:
    """Whether a row is the paper's own method or a variant of it."""
    return paper_line(cell)["method"].startswith(name)


def _is_gain(cell: Cell) -> bool:
    """Whether it is what clients gain, which is no score."""
    return paper_line(cell)["metric"] in GAINS


def _printed(cell: Cell) -> float:
    return float(paper_line(cell)["printed"])


def _ours(cell: Cell) -> float:
    return float(paper_line(cell)["ours"])


def _strict(cell: Cell) -> float:
    return float(cell["strict"]["ours"])


def sections(cells: Sequence[Cell]) -> Iterator[str]:
    """A heading for each table of each paper, and a table for each data set and setting.

    What clients gain stands beside their accuracy; other metrics have tables of their own.
    """
    grouped: dict[tuple[str, str], dict[tuple[str, str, str], list[Cell]]] = {}
    gains = {(line["paper"], line["table"]) for line in map(paper_line, filter(_is_gain, cells))}
    for cell in cells:
        line = paper_line(cell)
        table = line["paper"], line["table"]
        inner = line["dataset"], line["setting"], "" if table in gains else line["metric"]
        grouped.setdefault(table, {}).setdefault(inner, []).append(cell)
    for (paper, table), tables in grouped.items():
        yield f"## {PAPERS.get(paper, paper)}, Table {table}\n"
        for (dataset, setting, _), some in tables.items():
            near = sum(map(comes_out, some))
            how = ", ".join([SETTINGS.get(part, part) for part in setting.split(";")])
            what = ", ".join(METRIC_WORDS.get(metric, metric) for metric in _all(some, "metric"))
            yield f"**{dataset}**, {how} ({what}; {near} of {len(some)} come out):\n"
            yield from grid(some)
            yield ""


def _all(cells: Iterable[Cell], name: str) -> list[str]:
    """What there is in a column, each once."""
    return list(dict.fromkeys(paper_line(cell)[name] for cell in cells))


PAPERS = {"fedath": "FedATH", "fediih": "FedIIH", "fedtad": "FedTAD", "gcfl": "GCFL"}
SETTINGS = {
    "louvain-nonoverlap": "Louvain",
    "metis-nonoverlap": "METIS",
    "metis-overlap": "METIS, overlapping",
    "oneDS": "one data set for all clients",
    "multiDS": "a data set for each client",
}


def grid(cells: Sequence[Cell]) -> Iterator[str]:
    """Methods down, numbers of clients across, and metrics if there are several."""
    rows: dict[str, dict[tuple[str, str], Cell]] = {}
    for cell in cells:
        line = paper_line(cell)
        rows.setdefault(line["method"], {})[line["clients"], line["metric"]] = cell
    metrics = _all(cells, "metric")
    columns = [
        (number, metric) for number in sorted(_all(cells, "clients"), key=int) for metric in metrics
    ]
    heads = [
        f"{number} clients" + (f", {METRIC_WORDS.get(metric, metric)}" if len(metrics) > 1 else "")
        for number, metric in columns
    ]
    yield "| | " + " | ".join(heads) + " |"
    yield "|---" * (len(heads) + 1) + "|"
    for method, row in rows.items():
        shown = [words(row[column]) if column in row else "–" for column in columns]
        yield f"| {method} | " + " | ".join(shown) + " |"


def words(cell: Cell) -> str:
    """The print → ours, bold if it comes out; then ours under `strict`."""
    line = paper_line(cell)
    ours = _number(line)
    printed = value_text(float(line["printed"]), None, line["metric"])
    text = f"{printed} → " + (f"**{ours}**" if comes_out(cell) else ours)
    strict = cell.get("strict")
    return text if strict is None or strict is line else f"{text}, {_number(strict)}"


def _number(line: Line) -> str:
    return value_text(
        float(line["ours"]), float(line["std"]) if line["std"] else None, line["metric"]
    )
