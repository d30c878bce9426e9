"""`python -m bench tables-page`: the results of `bench tables` as tables of a page."""

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
from atoll.studies.reproduce.table import GAINS, compatible, tolerance, verdict
from bench.tables import KEY

MARKS = "<!-- tables: made by bench -->", "<!-- end of tables -->"
CHANGES = "<!-- changes: made by bench -->", "<!-- end of changes -->"

Line = Mapping[str, str]
Cell = dict[str, Line]
"""One published value: its line under each protocol."""


@click.command("tables-page")
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Picture to write.")
@click.option("--before", type=click.Path(dir_okay=False, path_type=Path),
              help="An earlier table, to count the effect of each recipe change.")  # fmt: skip
def tables_page(table: Path, page: Path, plot: Path | None, before: Path | None) -> None:
    """Write the values of TABLE, a CSV file, between the marks of PAGE."""
    cells = read_cells(table)
    made = "\n".join([*summary(cells), "", *sections(cells)])
    text = between(page, page.read_text(encoding="utf-8"), MARKS, made)
    if before is not None:
        earlier = read_cells(before)
        moved = "\n".join([*changes(earlier, cells), "", *by_method(earlier, cells)]) + "\n"
        text = between(page, text, CHANGES, moved)
    page.write_text(text, encoding="utf-8")
    if plot is not None:
        draw(cells, plot)
    near = sum(comes_out(cell) for cell in cells)
    agree = sum(is_compatible(cell) is True for cell in cells)
    either = sum(comes_out(cell) or is_compatible(cell) is True for cell in cells)
    click.echo(
        f"{len(cells)} published values, {near} reproduced, {agree} compatible by both spreads, "
        f"{either} reproduced or compatible"
    )


def between(page: Path, text: str, marks: tuple[str, str], made: str) -> str:
    """Return the text of a page with new lines between two marks."""
    begin, end = marks
    if text.count(begin) != 1 or text.count(end) != 1:
        raise click.ClickException(f"{page} needs the lines '{begin}' and '{end}', once each")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    return f"{before}{begin}\n\n{made}\n{end}{after}"


def read_cells(table: Path) -> list[Cell]:
    """Return the published values of a CSV file, each with its lines."""
    if not table.exists():
        raise click.ClickException(f"no table {table}; give the file of an earlier run")
    with table.open(newline="", encoding="utf-8") as file:
        return by_number(csv.DictReader(file))


def changes(before: Sequence[Cell], now: Sequence[Cell]) -> Iterator[str]:
    """Yield each recipe change: its source, and the reproduced values before and now."""
    earlier = {_number_key(cell): cell for cell in before}
    yield "| paper | change | source | values | reproduced before | now | gained | lost |"
    yield "|---" * 3 + "|---:" * 5 + "|"
    for paper, title in PAPERS.items():
        own = [cell for cell in now if paper_line(cell)["paper"] == paper]
        every = [("all changes", "", own)] if own else []
        for one in _recipe(paper).recipe.changes:
            touched = [
                cell
                for cell in own
                if not one.methods or paper_line(cell)["method"] in one.methods
                if not one.tables or paper_line(cell)["table"] in one.tables
            ]
            every.append((one.what, one.source, touched))
        for what, source, touched in every:
            pairs = [(earlier[_number_key(c)], c) for c in touched if _number_key(c) in earlier]
            judged = [(comes_out(old), comes_out(new)) for old, new in pairs]
            counts = [len(judged), sum(old for old, _ in judged), sum(new for _, new in judged)]
            counts += [sum(new and not old for old, new in judged)]
            counts += [sum(old and not new for old, new in judged)]
            yield f"| {title} | {what} | {source} | " + " | ".join(map(str, counts)) + " |"


def by_method(before: Sequence[Cell], now: Sequence[Cell]) -> Iterator[str]:
    """Yield the reproduced values of each method and paper: before, now, and the total."""
    counts: dict[str, dict[str, list[int]]] = {}
    earlier = {_number_key(cell): cell for cell in before}
    papers = by_paper(now)
    for title, own in papers.items():
        for cell in own:
            method = paper_line(cell)["method"]
            name = f"{title}, variants" if _is_own(cell, title) and method != title else method
            count = counts.setdefault(name, {}).setdefault(title, [0, 0, 0])
            old = earlier.get(_number_key(cell))
            for place, one in enumerate((old is not None and comes_out(old), comes_out(cell), 1)):
                count[place] += one
    yield "| reproduced before → now | " + " | ".join(papers) + " |"
    yield "|---|" + "---:|" * len(papers)
    for name, row in counts.items():
        shown = ("{} → {} of {}".format(*row[title]) if title in row else "–" for title in papers)
        yield f"| {name} | " + " | ".join(shown) + " |"


def _number_key(cell: Cell) -> tuple[str, ...]:
    return tuple(paper_line(cell)[name] for name in KEY[:-1])


def by_number(lines: Iterable[Line]) -> list[Cell]:
    """Group the lines by published value."""
    found: dict[tuple[str, ...], Cell] = {}
    for line in lines:
        *number, protocol = (line[name] for name in KEY)
        found.setdefault(tuple(number), {})[protocol] = line
    return list(found.values())


def comes_out(cell: Cell) -> bool:
    """Whether Atoll reproduces the published value under the paper's own protocol."""
    line = paper_line(cell)
    std = float(line["printed_std"]) if line["printed_std"] else None
    limit = tolerance(_recipe(line["paper"]), line["metric"], std)
    return verdict(_ours(cell) - _printed(cell), limit) == "reproduced"


def is_compatible(cell: Cell) -> bool | None:
    """Whether published value and Atoll's agree by both spreads. All data draws count."""
    line = paper_line(cell)
    draws = [one for rules, one in cell.items() if rules.partition(":")[2].isdigit()]
    ours = [
        (float(one["ours"]), float(one["std"]) if one["std"] else None, int(one["seeds"]))
        for one in draws or [line]
    ]
    std = float(line["printed_std"]) if line["printed_std"] else None
    return compatible(_recipe(line["paper"]), line["metric"], float(line["printed"]), std, ours)


_recipe = cache(read_paper)


def paper_line(cell: Cell) -> Line:
    """The line under the paper's own protocol."""
    return min(cell.items(), key=lambda one: (one[0] == "strict", ":" in one[0]))[1]


def summary(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a table with a column per paper: reproduced values, and leads of its method."""
    papers = by_paper(cells)
    about = [about_paper(some, name) for name, some in papers.items()]
    yield "## Summary\n"
    yield (
        "The table compares cells in which the paper's method has at least five rivals.\n"
        "A negative lead means that the best rival is better.\n"
    )
    yield "| | " + " | ".join(papers) + " |"
    yield "|---|" + "---:|" * len(papers)
    for fact in about[0] if about else ():
        yield f"| {fact} | " + " | ".join(one[fact] for one in about) + " |"


def about_paper(cells: Sequence[Cell], name: str) -> dict[str, str]:
    """Return the rows of the summary for one paper."""
    own = [cell for cell in cells if paper_line(cell)["method"] == name]
    variants = [cell for cell in cells if _is_own(cell, name) and cell not in own]
    others = [cell for cell in cells if not _is_own(cell, name)]
    ahead = [*leads(cells, name)]
    behind = f"{sum(lead.clearly_behind for lead in ahead)} of {len(ahead)}" if ahead else "–"
    return {
        "reproduced values of its method": _near(own),
        "reproduced values of its variants": _near(variants),
        "reproduced values of the baselines": _near(others),
        "all reproduced values": _near(cells),
        "all values compatible by both spreads": _agree(cells),
        "its method: mean absolute (signed) difference from the published values": _away(own),
        "baselines: mean absolute (signed) difference": _away(others),
        "its method is first in the paper; mean lead": _first([lead.printed for lead in ahead]),
        "its method is first in Atoll; mean lead": _first([lead.ours for lead in ahead]),
        "first in Atoll under `strict`; mean lead": _first([lead.strict for lead in ahead]),
        "its method is behind in Atoll by more than both spreads": behind,
    }


def _near(cells: Sequence[Cell]) -> str:
    return f"{sum(map(comes_out, cells))} of {len(cells)}"


def _agree(cells: Sequence[Cell]) -> str:
    judged = [one for one in map(is_compatible, cells) if one is not None]
    return f"{sum(judged)} of {len(judged)}"


def _away(cells: Sequence[Cell]) -> str:
    """Return the mean absolute and the mean signed difference from the published scores."""
    points = [_ours(cell) - _printed(cell) for cell in cells if not _is_gain(cell)]
    return f"{mean(map(abs, points)):.1f} ({mean(points):+.1f})" if points else "–"


def _first(leads: Sequence[float]) -> str:
    """Return how often a method leads, and its mean lead."""
    if not leads:
        return "–"
    return f"{sum(lead > 0 for lead in leads)} of {len(leads)}; {mean(leads):+.1f}"


def by_paper(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Group the cells by paper, under the name of its method."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        paper = paper_line(cell)["paper"]
        found.setdefault(PAPERS.get(paper, paper), []).append(cell)
    return found


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draw published values (x) and Atoll's (y) as dots, one panel per paper, two per row."""
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
                "its method and variants",
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
    figure.supxlabel("published")
    figure.supylabel("Atoll, under the paper's protocol")
    figure.savefig(path, dpi=170)


@dataclass(frozen=True)
class Lead:
    """Points of the paper's method over the best other method of a cell, in each column."""

    printed: float
    ours: float
    strict: float
    spreads: float
    """The sum of the spreads of the method and of the best other method in Atoll."""

    @property
    def clearly_behind(self) -> bool:
        return -self.ours > self.spreads


def leads(cells: Iterable[Cell], name: str) -> Iterator[Lead]:
    """Yield the lead in cells with both protocols of the method and of five others or more."""
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
    """Whether the metric is a gain of clients, not a score."""
    return paper_line(cell)["metric"] in GAINS


def _printed(cell: Cell) -> float:
    return float(paper_line(cell)["printed"])


def _ours(cell: Cell) -> float:
    return float(paper_line(cell)["ours"])


def _strict(cell: Cell) -> float:
    return float(cell["strict"]["ours"])


def sections(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a heading for each table of each paper, and a table for each data set and setting.

    Gains of clients are in the same table as their accuracy. Other metrics have separate tables.
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
            yield f"**{dataset}**, {how} ({what}; {near} of {len(some)} reproduced):\n"
            yield from grid(some)
            yield ""


def _all(cells: Iterable[Cell], name: str) -> list[str]:
    """Return the distinct values of a column."""
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
    """Yield a table: a row per method, a column per number of clients and metric."""
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
    yield "|---|" + "---:|" * len(heads)
    for method, row in rows.items():
        shown = [words(row[column]) if column in row else "–" for column in columns]
        yield f"| {method} | " + " | ".join(shown) + " |"


def words(cell: Cell) -> str:
    """Return the text of a cell: published → Atoll's value, `strict`, last round or other draws.

    Bold means reproduced, and `~` means compatible by both spreads.
    """
    line = paper_line(cell)
    ours = _number(line)
    printed = value_text(float(line["printed"]), None, line["metric"])
    text = f"{printed} → " + (f"**{ours}**" if comes_out(cell) else ours)
    text += " ~" if is_compatible(cell) else ""
    strict = cell.get("strict")
    text += "" if strict is None or strict is line else f", {_number(strict)}"
    for rules, other in cell.items():
        name = rules.partition(":")[2]
        same = other["ours"] == line["ours"]  # the paper's own seed of the data
        text += f"; {name}: {_number(other)}" if name and not same else ""
    return text


def _number(line: Line) -> str:
    return value_text(
        float(line["ours"]), float(line["std"]) if line["std"] else None, line["metric"]
    )
