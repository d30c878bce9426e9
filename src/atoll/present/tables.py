"""Tables as values, and every way to write one: terminal, Markdown, LaTeX, CSV and HTML.

A `Table` has columns, rows of cells, a title, a caption and notes. `make_table` builds one from
plain values. A `Cell` may hold a number with its spread over seeds, and a mark for the best.

A `ResultTable` has a `Number` for each row (usually a method) and column (usually a federation). It
marks the best of each column, and every row that prints the same digits as the best.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from atoll.core.errors import ConfigError
from atoll.core.files import write_atomically
from atoll.experiment.metrics import spread

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Align = Literal["left", "center", "right"]
Mark = Literal["", "best", "second"]
DASH = "–"
"""Stands where there is no number."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: The heading.
        align: Where its cells stand.
        wrap: Whether a terminal may break its cells into lines.
        width: Least width in a terminal.
        below: HTML below the heading on a page: a scale, or a key of colours.
    """

    name: str
    align: Align = "right"
    wrap: bool = False
    width: int | None = None
    below: str = ""


@dataclass(frozen=True)
class Cell:
    """One printed cell.

    Attributes:
        text: The words or the number.
        spread: Standard deviation over seeds; empty for one seed.
        mark: Whether it is the best or the second of its column.
        sign: A superscript, such as "≈" for a difference that is not significant.
        style: Rich's name of a colour or a weight, for the terminal only.
        html: Markup that a page shows in place of the text.
    """

    text: str = ""
    spread: str = ""
    mark: Mark = ""
    sign: str = ""
    style: str = ""
    html: str = ""

    @property
    def plain(self) -> str:
        """`78.1 ± 0.6`."""
        return self.text + (f" ± {self.spread}" if self.spread else "") + self.sign


@dataclass(frozen=True)
class Table:
    """Rows of cells below named columns.

    Attributes:
        columns: In order.
        rows: As many cells each as there are columns.
        title: What the table shows.
        caption: How to read it.
        notes: One sentence each, below the table.
        sections: Places of the rows above which a terminal draws a line.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    caption: str = ""
    notes: tuple[str, ...] = ()
    sections: tuple[int, ...] = ()


def make_table(
    columns: Iterable[str | Column],
    rows: Iterable[Iterable[object]],
    *,
    left: int = 1,
    title: str = "",
    caption: str = "",
    notes: Iterable[str] = (),
    sections: Iterable[int] = (),
) -> Table:
    """A table of plain values.

    Args:
        columns: Names, or columns with more than a name.
        rows: Cells, or values to print; None is an empty cell.
        left: How many of the first names are aligned left; the others are aligned right.
        title: What the table shows.
        caption: How to read it.
        notes: Sentences below it.
        sections: Places of the rows that begin a section.
    """
    named = (
        one if isinstance(one, Column) else Column(one, "left" if place < left else "right")
        for place, one in enumerate(columns)
    )
    lines = (tuple(_cell(value) for value in row) for row in rows)
    return Table(tuple(named), tuple(lines), title, caption, tuple(notes), tuple(sections))


def _cell(value: object) -> Cell:
    return value if isinstance(value, Cell) else Cell("" if value is None else str(value))


def record_table(records: Sequence[Mapping[str, object]], names: Sequence[str] = ()) -> Table:
    """A table with a row for each record; a missing value is an empty cell."""
    names = names or list(records[0])
    return make_table(names, ([record.get(name) for name in names] for record in records))


def rich_table(table: Table, *, gap: int = 1, framed: Align | None = None) -> RichTable:
    """The table for a terminal; its notes are left to the caller.

    Args:
        table: The table.
        gap: Spaces between two columns.
        framed: Draw a frame, and put title and caption there; None draws neither of them.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    if framed is None:
        drawn = RichTable(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0)
        )
    else:
        drawn = RichTable(
            title=Text(table.title),
            caption=Text(table.caption) if table.caption else None,
            title_justify=framed,
            caption_justify=framed,
        )
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
        drawn.add_row(*(Text(cell.plain, style=cell.style or _RICH[cell.mark]) for cell in row))
    return drawn


_RICH: Mapping[Mark, str] = {"": "", "best": "bold", "second": "underline"}
_MARKDOWN: Mapping[Mark, str] = {"": "", "best": "**", "second": "*"}
_LATEX: Mapping[Mark, str] = {"": "", "best": "\\textbf", "second": "\\underline"}
_HTML: Mapping[Mark, str] = {"": "", "best": "b", "second": "u"}


def markdown(table: Table, *, level: int = 0, escaped: str = "|*_") -> str:
    """The table for a README or an issue.

    Args:
        table: The table.
        level: Of its heading; 0 writes the title in bold.
        escaped: Characters to write with a backslash.
    """
    special = str.maketrans({letter: f"\\{letter}" for letter in escaped} | {"\n": " "})

    def cell_text(cell: Cell) -> str:
        mark = _MARKDOWN[cell.mark]
        return f"{mark}{cell.plain.strip().translate(special)}{mark}"

    title = table.title.translate(special)
    heading = f"{'#' * level} {title}" if level else f"**{title}**"
    lines = [heading, ""] if title else []
    lines.append(_bars(column.name.translate(special) for column in table.columns))
    rules = {"left": "---", "right": "---:", "center": ":---:"}
    lines.append(f"|{'|'.join(rules[column.align] for column in table.columns)}|")
    lines += [_bars(map(cell_text, row)) for row in table.rows]
    if table.notes:
        lines += ["", *(f"- {note}" for note in table.notes)]
    if table.caption:
        lines += ["", table.caption.translate(special)]
    return "\n".join(lines) + "\n"


def _bars(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


NEEDS_BOOKTABS = "% needs \\usepackage{booktabs}"


def latex(table: Table, *, place: str = "[t]") -> str:
    """The table for a paper, which needs booktabs.

    Args:
        table: Without title and caption, it is no float.
        place: Where the float may stand.
    """
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
    text = f"{_LATEX[cell.mark]}{{{tex(cell.text)}}}" if cell.mark else tex(cell.text)
    spread = f"{{\\scriptsize$\\pm${cell.spread}}}" if cell.spread else ""
    return text + spread + (f"$^{{{tex(cell.sign).strip('$')}}}$" if cell.sign else "")


_TEX = {
    "\\": "\\textbackslash{}",
    "&": "\\&",
    "%": "\\%",
    "$": "\\$",
    "#": "\\#",
    "_": "\\_",
    "{": "\\{",
    "}": "\\}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "≈": "$\\approx$",
    DASH: "--",
    "−": "$-$",
}


def tex(text: str) -> str:
    """Text with LaTeX's special characters written out."""
    return "".join(_TEX.get(letter, letter) for letter in text)


def csv_text(table: Table) -> str:
    """The table for programs: names, then one line for each row."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows([cell.plain for cell in row] for row in table.rows)
    return text.getvalue()


def html(table: Table, *, label: str = "") -> str:
    """The table for a page, in a region that scrolls by itself.

    Args:
        table: The table.
        label: What a screen reader calls the region; the title if empty.
    """
    head = "".join(map(_html_head, table.columns))
    body = "".join(
        f'<tr><th scope="row">{_html_cell(row[0])}</th>'
        + "".join(
            f"<td{' class=n' if column.align == 'right' else ''}>{_html_cell(cell)}</td>"
            for column, cell in zip(table.columns[1:], row[1:], strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    notes = "".join(
        f'<p class="note">{escape(line)}</p>' for line in (table.caption, *table.notes) if line
    )
    name = escape(label or table.title)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}">'
        f"<table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{notes}"
    )


def _html_head(column: Column) -> str:
    if column.below:
        return f'<th scope="col" class="wide">{escape(column.name)}{column.below}</th>'
    number = " class=n" if column.align == "right" else ""
    return f'<th scope="col"{number}>{escape(column.name)}</th>'


def _html_cell(cell: Cell) -> str:
    if cell.html:
        return cell.html
    mark = _HTML[cell.mark]
    text = f"<{mark}>{escape(cell.text)}</{mark}>" if mark else escape(cell.text)
    spread = f' <span class="pm">± {escape(cell.spread)}</span>' if cell.spread else ""
    return text + spread + (f"<sup>{escape(cell.sign)}</sup>" if cell.sign else "")


@dataclass(frozen=True)
class Number:
    """A mean over seeds, or the reason why there is none.

    Attributes:
        mean: NaN where there is no number.
        std: Standard deviation over seeds; None for one seed.
        values: Each seed's.
        why: Stands in the place of a missing number, such as "failed".
    """

    mean: float = float("nan")
    std: float | None = None
    values: tuple[float, ...] = ()
    why: str = DASH

    @property
    def known(self) -> bool:
        return bool(np.isfinite(self.mean))

    def cell(self, scale: float = 100.0, digits: int = 1, sign: str = "") -> Cell:
        """The cell that prints it; `sign` is "+" for a difference."""
        if not self.known:
            return Cell(self.why)
        text = f"{self.mean * scale:{sign}.{digits}f}".replace("-", "−")
        return Cell(text, "" if self.std is None else f"{self.std * scale:.{digits}f}")


def number(values: Sequence[float]) -> Number:
    """The number for some seeds' values."""
    if not len(values):
        return Number()
    return Number(float(np.mean(values)), spread(values), tuple(float(value) for value in values))


class _Metric(Protocol):
    def __getitem__(self, key: Literal["per_seed"], /) -> Sequence[float]: ...


def number_of(metrics: Mapping[str, _Metric], name: str) -> Number:
    """The number for a metric of a result (`Result.metrics`, or result.json)."""
    return number(metrics[name]["per_seed"]) if name in metrics else Number()


@dataclass(frozen=True)
class ResultTable:
    """Numbers by row and column.

    Attributes:
        title: What the numbers are, such as "Test accuracy, in percent".
        rows: Names of the rows, in order.
        columns: Names of the columns, in order.
        cells: By (row, column); a missing one is a dash.
        caption: How the numbers were made, in one or two sentences.
        corner: What the rows are.
        metric: The metric's plain name, for the CSV file.
        scale: The factor of a printed number: 100 for percent. CSV files hold fractions.
        digits: After the decimal point of a printed number.
        higher: Whether more is better; None marks nothing as best.
        signed: Columns of differences, whose numbers show their sign.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Number]
    caption: str = ""
    corner: str = "method"
    metric: str = "test_accuracy"
    scale: float = 100.0
    digits: int = 1
    higher: bool | None = True
    signed: tuple[str, ...] = ()

    def cell(self, row: str, column: str) -> Number:
        return self.cells.get((row, column), Number())

    def best(self, column: str) -> set[str]:
        """The rows that are best in a column, in the digits that are printed."""
        means = {row: self.cell(row, column) for row in self.rows}
        shown = {r: round(n.mean * self.scale, self.digits) for r, n in means.items() if n.known}
        if self.higher is None or len(shown) < 2:  # nothing to be better than
            return set()
        top = max(shown.values()) if self.higher else min(shown.values())
        return {row for row, value in shown.items() if value == top}

    def texts(self, row: str, column: str) -> tuple[str, str]:
        """Mean and spread as printed; the spread is empty where there is none."""
        cell = self.printed(row, column)
        return cell.text, cell.spread

    def printed(self, row: str, column: str) -> Cell:
        """The printed number with its mark."""
        sign = "+" if column in self.signed else ""
        cell = self.cell(row, column).cell(self.scale, self.digits, sign)
        return replace(cell, mark="best") if row in self.best(column) else cell

    def table(self) -> Table:
        """The printed table."""
        rows = [[row, *(self.printed(row, column) for column in self.columns)] for row in self.rows]
        return make_table(
            (self.corner, *self.columns), rows, title=self.title, caption=self.caption
        )


def result_markdown(tables: Sequence[ResultTable]) -> str:
    """The tables for a README or an issue."""
    return "\n".join(markdown(table.table()) for table in tables)


def result_latex(tables: Sequence[ResultTable]) -> str:
    r"""The tables for a paper; they need \usepackage{booktabs}."""
    return "\n".join([NEEDS_BOOKTABS, *(latex(table.table()) for table in tables)])


def result_csv(tables: Sequence[ResultTable]) -> str:
    """The tables for programs: one line for each number, with every seed's value."""
    names = ("metric", "row", "column", "mean", "std", "seeds", "per_seed", "missing")
    lines = []
    for table in tables:
        for row in table.rows:
            for column in table.columns:
                found = table.cell(row, column)
                lines.append(
                    (
                        table.metric,
                        row,
                        column,
                        _digits(found.mean),
                        _digits(found.std),
                        len(found.values),
                        " ".join(f"{value:.10g}" for value in found.values),
                        "" if found.known else found.why,
                    )
                )
    return csv_text(make_table(names, lines))


def _digits(value: float | None) -> str:
    return f"{value:.10g}" if value is not None and np.isfinite(value) else ""


FORMS = {"md": result_markdown, "tex": result_latex, "csv": result_csv}


def write_tables(tables: Sequence[ResultTable], files: Mapping[str, Path | None]) -> list[Path]:
    """Write tables in the forms that have a file: {"md": path, "tex": None, ...}."""
    written = []
    for form, path in files.items():
        if path is not None:
            check_file(path)
            write_atomically(path, FORMS[form](tables).encode())
            written.append(path)
    return written


def check_file(path: Path) -> None:
    """Refuse a path at which no file can be written."""
    if path.is_dir():
        raise ConfigError(f"'{path}' is a folder; give the name of a file")
    there = next(p for p in path.absolute().parents if p.exists())
    if not there.is_dir():
        raise ConfigError(f"'{path}' cannot be written: '{there}' is a file; give another name")
