"""Tables as values, and every output format: terminal, Markdown, LaTeX, CSV and HTML.

`make_table` builds a table from plain values. A `ResultTable` contains a `Number` for each row
(usually a method) and column (usually a federation). It marks every row whose printed number is
the best of its column. A command prints a list of `Part`: `layout` stacks text, tables and trees.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from atoll.core.errors import ConfigError
from atoll.core.files import write_atomically
from atoll.experiment.metrics import spread

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table as RichTable
    from rich.tree import Tree

Align = Literal["left", "center", "right"]
DASH = "–"  # replaces a missing number
NEEDS_BOOKTABS = "% needs \\usepackage{booktabs}"
_TEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "≈": "$\\approx$",
    DASH: "--",
    "−": "$-$",
}


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str  # the heading
    align: Align = "right"
    wrap: bool = False  # whether a terminal may wrap its cells
    width: int | None = None  # the minimum width in a terminal
    below: str = ""  # HTML below the heading on a page: a scale, or a legend of colours


@dataclass(frozen=True)
class Cell:
    """One printed cell."""

    text: str = ""
    spread: str = ""  # standard deviation over seeds; empty for one seed
    best: bool = False  # whether it is the best of its column
    sign: str = ""  # a superscript, such as "≈" for a difference that is not significant
    style: str = ""  # rich's name of a colour or weight, only for the terminal
    html: str = ""  # markup that a page shows instead of the text

    @property
    def plain(self) -> str:
        """The cell as plain text, such as `78.1 ± 0.6`."""
        return self.text + (f" ± {self.spread}" if self.spread else "") + self.sign


@dataclass(frozen=True)
class Table:
    """Rows of cells below named columns."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    caption: str = ""  # explains how to read the table
    notes: tuple[str, ...] = ()  # sentences below the table
    sections: tuple[int, ...] = ()  # rows above which a terminal draws a line


def make_table(
    columns: Iterable[str | Column],
    rows: Iterable[Iterable[object]],
    *,
    left: int = 1,
    wrap: bool = False,
    title: str = "",
    caption: str = "",
    notes: Iterable[str] = (),
    sections: Iterable[int] = (),
) -> Table:
    """Make a table of plain values. None is an empty cell.

    A column that is only a name is left-aligned among the first `left` columns, and else
    right-aligned. With `wrap`, a terminal may wrap its cells.
    """

    def cell(value: object) -> Cell:
        return value if isinstance(value, Cell) else Cell("" if value is None else str(value))

    named = (
        one if isinstance(one, Column) else Column(one, "left" if place < left else "right", wrap)
        for place, one in enumerate(columns)
    )
    lines = (tuple(map(cell, row)) for row in rows)
    return Table(tuple(named), tuple(lines), title, caption, tuple(notes), tuple(sections))


def record_table(records: Sequence[Mapping[str, object]], names: Sequence[str] = ()) -> Table:
    """Make a table with one row per record. A missing value is an empty cell."""
    names = names or list(records[0])
    return make_table(names, ([record.get(name) for name in names] for record in records))


def rich_table(table: Table, *, gap: int = 1, framed: Align | None = None) -> RichTable:
    """Make the table for a terminal, with `gap` spaces between columns, but without its notes.

    `framed` adds a frame, title and caption, and aligns the latter two. None omits all three.
    """
    from rich import box
    from rich.text import Text

    from atoll.present.terminal import FittedTable

    if framed is None:
        lines = box.SIMPLE_HEAD
        drawn = FittedTable(box=lines, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    else:
        caption = Text(table.caption) if table.caption else None
        drawn = FittedTable(title=Text(table.title), caption=caption)
        drawn.title_justify = drawn.caption_justify = framed
    for column in table.columns:
        drawn.add_column(
            column.name,
            justify=column.align,
            no_wrap=not column.wrap,
            overflow="fold" if column.wrap else "ellipsis",
            min_width=column.width,
        )
    for place, row in enumerate(table.rows):
        if place in table.sections:
            drawn.add_section()
        drawn.add_row(*(Text(c.plain, c.style or ("bold" if c.best else "")) for c in row))
    return drawn


def markdown(table: Table, *, level: int = 0, escaped: str = "|*_") -> str:
    """Render the table as Markdown. Without a heading `level`, the title is bold."""
    special = str.maketrans({letter: f"\\{letter}" for letter in escaped} | {"\n": " "})

    def cell_text(cell: Cell) -> str:
        mark = "**" if cell.best else ""
        return f"{mark}{cell.plain.strip().translate(special)}{mark}"

    title = table.title.translate(special)
    heading = f"{'#' * level} {title}" if level else f"**{title}**"
    lines = [heading, ""] if title else []
    heads = [column.name.translate(special) for column in table.columns]
    lines.append(f"| {' | '.join(heads)} |")
    rules = {"left": "---", "right": "---:", "center": ":---:"}
    lines.append(f"|{'|'.join(rules[column.align] for column in table.columns)}|")
    lines += [f"| {' | '.join(map(cell_text, row))} |" for row in table.rows]
    if table.notes:
        lines += ["", *(f"- {note}" for note in table.notes)]
    if table.caption:
        lines += ["", table.caption.translate(special)]
    return "\n".join(lines) + "\n"


def latex(table: Table, *, place: str = "[t]") -> str:
    """Render the table as LaTeX (booktabs). Without title and caption, it is not a float."""
    letters = "".join(column.align[0] for column in table.columns)
    lines = [
        f"\\begin{{tabular}}{{{letters}}}",
        "  \\toprule",
        f"  {' & '.join(tex(column.name) for column in table.columns)} \\\\",
        "  \\midrule",
        *(f"  {' & '.join(map(_tex_cell, row))} \\\\" for row in table.rows),
        "  \\bottomrule",
        "\\end{tabular}",
    ]
    words = f"{table.title}. {table.caption}".strip() if table.title else table.caption
    if not words:
        return "\n".join(line.strip() for line in lines) + "\n"
    lines = [
        f"\\begin{{table}}{place}",
        "  \\centering",
        f"  \\caption{{{tex(words)}}}",
        *(f"  {line}" for line in lines),
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _tex_cell(cell: Cell) -> str:
    text = f"\\textbf{{{tex(cell.text)}}}" if cell.best else tex(cell.text)
    spread = f"{{\\scriptsize$\\pm${cell.spread}}}" if cell.spread else ""
    return text + spread + (f"$^{{{tex(cell.sign).strip('$')}}}$" if cell.sign else "")


def tex(text: str) -> str:
    """Escape LaTeX's special characters."""
    return "".join(_TEX.get(letter, letter) for letter in text)


def csv_text(table: Table) -> str:
    """Render the table as CSV: the names, then one line per row."""
    text = io.StringIO(newline="")
    lines = ([cell.plain for cell in row] for row in table.rows)
    heads = [column.name for column in table.columns]
    csv.writer(text, lineterminator="\n").writerows([heads, *lines])
    return text.getvalue()


def html(table: Table, *, label: str = "") -> str:
    """Render the table as HTML, in a scrolling region that a screen reader calls `label`."""
    kinds = [" class=n" if column.align == "right" else "" for column in table.columns]
    head = body = ""
    for column, kind in zip(table.columns, kinds, strict=True):
        wide = ' class="wide"' if column.below else kind
        head += f'<th scope="col"{wide}>{escape(column.name)}{column.below}</th>'
    for first, *rest in table.rows:
        cells = (f"<td{k}>{_html_cell(c)}</td>" for k, c in zip(kinds[1:], rest, strict=True))
        body += f'<tr><th scope="row">{_html_cell(first)}</th>{"".join(cells)}</tr>'
    lines = (table.caption, *table.notes)
    notes = "".join(f'<p class="note">{escape(line)}</p>' for line in lines if line)
    name = escape(label or table.title)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}">'
        f"<table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{notes}"
    )


def _html_cell(cell: Cell) -> str:
    if cell.html:
        return cell.html
    text = f"<b>{escape(cell.text)}</b>" if cell.best else escape(cell.text)
    spread = f' <span class="pm">± {escape(cell.spread)}</span>' if cell.spread else ""
    return text + spread + (f"<sup>{escape(cell.sign)}</sup>" if cell.sign else "")


@dataclass(frozen=True)
class Number:
    """A mean over seeds, or the reason why it is missing."""

    mean: float = float("nan")
    std: float | None = None  # over seeds; None for one seed
    values: tuple[float, ...] = ()  # of each seed
    why: str = DASH  # text instead of a missing number, such as "failed"

    @property
    def known(self) -> bool:
        return bool(np.isfinite(self.mean))

    def cell(self, scale: float = 100.0, digits: int = 1, sign: str = "") -> Cell:
        """Return the printed cell. `sign` is "+" for a difference."""
        if not self.known:
            return Cell(self.why)
        text = f"{self.mean * scale:{sign}.{digits}f}".replace("-", "−")
        return Cell(text, "" if self.std is None else f"{self.std * scale:.{digits}f}")


def number(values: Sequence[float]) -> Number:
    """Return the mean and standard deviation of the seeds' values."""
    if not len(values):
        return Number()
    return Number(float(np.mean(values)), spread(values), tuple(float(value) for value in values))


def number_of(metrics: Mapping[str, Mapping[str, Sequence[float]]], name: str) -> Number:
    """Return the number of a metric in a result (`Result.metrics`, or result.json)."""
    return number(metrics[name]["per_seed"]) if name in metrics else Number()


@dataclass(frozen=True)
class ResultTable:
    """Numbers by row and column."""

    title: str  # names the numbers, such as "Test accuracy, in percent"
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Number]  # by (row, column); a dash replaces a missing number
    caption: str = ""  # explains how the numbers were computed
    corner: str = "method"  # the heading of the column with the rows' names
    metric: str = "test_accuracy"  # the metric's plain name, for the CSV file
    scale: float = 100.0  # factor of a printed number: 100 for percent; CSV files contain fractions
    digits: int = 1
    higher: bool | None = True  # whether higher is better; None marks no row as best
    signed: tuple[str, ...] = ()  # columns of differences, whose numbers show their sign
    bounds: tuple[str, ...] = ()  # rows that show only an upper bound, and are never best

    def cell(self, row: str, column: str) -> Number:
        return self.cells.get((row, column), Number())

    def best(self, column: str) -> set[str]:
        """Return the best rows of a column, by printed digits. A single number is never best."""
        means = {row: self.cell(row, column) for row in self.rows if row not in self.bounds}
        shown = {r: round(n.mean * self.scale, self.digits) for r, n in means.items() if n.known}
        if self.higher is None or len(shown) < 2:  # no second row to compare with
            return set()
        top = max(shown.values()) if self.higher else min(shown.values())
        return {row for row, value in shown.items() if value == top}

    def printed(self, row: str, column: str) -> Cell:
        """Return the printed number with its mark."""
        sign = "+" if column in self.signed else ""
        cell = self.cell(row, column).cell(self.scale, self.digits, sign)
        return replace(cell, best=row in self.best(column))

    def table(self) -> Table:
        """Return the printed table."""
        rows = [[row, *(self.printed(row, column) for column in self.columns)] for row in self.rows]
        heads = (self.corner, *self.columns)
        return make_table(heads, rows, title=self.title, caption=self.caption)


def result_markdown(tables: Sequence[ResultTable]) -> str:
    """Render the tables as Markdown."""
    return "\n".join(markdown(table.table()) for table in tables)


def result_latex(tables: Sequence[ResultTable]) -> str:
    r"""Render the tables as LaTeX. They need \usepackage{booktabs}."""
    return "\n".join([NEEDS_BOOKTABS, *(latex(table.table()) for table in tables)])


def result_csv(tables: Sequence[ResultTable]) -> str:
    """Render the tables as CSV: one line per number, with the value of every seed."""
    names = ("metric", "row", "column", "mean", "std", "seeds", "per_seed", "missing")
    lines = []
    for table in tables:
        for row, column in itertools.product(table.rows, table.columns):
            found = table.cell(row, column)
            seeds = " ".join(f"{value:.10g}" for value in found.values)
            mean = f"{found.mean:.10g}" if found.known else ""
            std = "" if found.std is None or not np.isfinite(found.std) else f"{found.std:.10g}"
            numbers = mean, std, len(found.values), seeds
            lines.append((table.metric, row, column, *numbers, "" if found.known else found.why))
    return csv_text(make_table(names, lines))


def write_tables(tables: Sequence[ResultTable], files: Mapping[str, Path | None]) -> list[Path]:
    """Write tables in each format that has a file: {"md": path, "tex": None, ...}."""
    forms = {"md": result_markdown, "tex": result_latex, "csv": result_csv}
    given = {form: path for form, path in files.items() if path is not None}
    for form, path in given.items():
        check_file(path)
        write_atomically(path, forms[form](tables).encode())
    return list(given.values())


def check_file(path: Path) -> None:
    """Raise an error if this path is a folder, or is below a file."""
    if path.is_dir():
        raise ConfigError(f"'{path}' is a folder; give the name of a file")
    there = next(p for p in path.absolute().parents if p.exists())
    if not there.is_dir():
        raise ConfigError(f"'{path}' cannot be written: '{there}' is a file; give another name")


@dataclass(frozen=True)
class Words:
    """A paragraph with a style of rich, such as "bold" or "dim"."""

    text: str
    style: str = ""


@dataclass
class Branch:
    """A node of a tree: a line, a dim note after it, and its branches."""

    text: str
    remark: str = ""
    below: list[Branch] = field(default_factory=list)

    def tree(self) -> Tree:
        """Return the tree for `rich.console.Console.print`."""
        from rich.text import Text
        from rich.tree import Tree

        line = Text(self.text)
        tree = Tree(line.append(self.remark, style="dim"), guide_style="dim")
        tree.children = [branch.tree() for branch in self.below]
        return tree


Part = str | Words | Table | Branch  # a string is a plain paragraph; an empty one is an empty line


def heading(text: str) -> Words:
    """Return a heading, which is bold."""
    return Words(text, "bold")


def quiet(text: str) -> Words:
    """Return a caption or a note, which is dim."""
    return Words(text, "dim")


def layout(parts: Iterable[Part], *, gap: int = 1, framed: Align | None = None) -> Group:
    """Arrange the parts for `rich.console.Console.print`. `rich_table` explains the options."""
    from rich.console import Group
    from rich.text import Text

    shown: list[RenderableType] = []
    for part in parts:
        match part:
            case Table():
                shown.append(rich_table(part, gap=gap, framed=framed))
            case Branch():
                shown.append(part.tree())
            case Words():
                shown.append(Text(part.text, style=part.style))
            case _:  # rich would parse square brackets in a plain string as markup
                shown.append(Text(part))
    return Group(*shown)
