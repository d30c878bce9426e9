"""`python -m bench tables-page`: what `bench tables` found, as the tables of a page."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

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
        names = ("paper", "table", "dataset", "setting", "clients", "method", "metric", "printed")
        found.setdefault(tuple(line[name] for name in names), {})[line["protocol"]] = line
    return list(found.values())


def comes_out(cell: Cell) -> bool:
    """Whether ours, under the paper's own protocol, is near the print."""
    line = paper_line(cell)
    limit = max(TOLERANCE, float(line["printed_std"] or 0))
    return verdict(_ours(cell) - _printed(cell), limit) == "reproduced"


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
    behind = sum(lead.clearly_behind for lead in ahead)
    return {
        "numbers of its method that come out": _near(own),
        "of its variants": _near(variants),
        "of the baselines": _near(others),
        "its method: mean distance from the print (with the sign)": _away(own),
        "the baselines": _away(others),
        "its method is first in print; mean lead": _first([lead.printed for lead in ahead]),
        "here": _first([lead.ours for lead in ahead]),
        "here, under `strict`": _first([lead.strict for lead in ahead]),
        "here behind the first by more than both spreads": f"{behind} of {len(ahead)}",
    }


def _near(cells: Sequence[Cell]) -> str:
    return f"{sum(map(comes_out, cells))} of {len(cells)}"


def _away(cells: Sequence[Cell]) -> str:
    """How far ours are from the print on average, without and with the sign."""
    points = [_ours(cell) - _printed(cell) for cell in cells]
    return f"{mean(map(abs, points)):.1f} ({mean(points):+.1f})" if points else "–"


def _first(leads: Sequence[float]) -> str:
    """How often a method leads, and by how much on average."""
    average = f"; {mean(leads):+.1f}" if leads else ""
    return f"{sum(lead > 0 for lead in leads)} of {len(leads)}{average}"


def by_paper(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """The cells of each paper, by the name of its method."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        paper = paper_line(cell)["paper"]
        found.setdefault(PAPERS.get(paper, paper), []).append(cell)
    return found


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Printed across, ours up, a dot for each number; a panel for each paper."""
    from matplotlib.figure import Figure

    papers = by_paper(cells)
    figure = Figure(figsize=(3 * len(papers), 3.3), layout="constrained")
    panels = figure.subplots(1, len(papers), sharex=True, sharey=True, squeeze=False)[0]
    for panel, (name, some) in zip(panels, papers.items(), strict=True):
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
        panel.set(title=f"{name}'s tables", xlabel="printed", aspect="equal")
    panels[0].set_ylabel("ours, under the paper's protocol")
    panels[-1].legend(loc="lower right", frameon=False)
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


def _printed(cell: Cell) -> float:
    return float(paper_line(cell)["printed"])


def _ours(cell: Cell) -> float:
    return float(paper_line(cell)["ours"])


def _strict(cell: Cell) -> float:
    return float(cell["strict"]["ours"])


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
