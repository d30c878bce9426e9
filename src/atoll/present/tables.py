"""Result tables for papers and pages: Markdown, LaTeX and CSV, written in this one place.

A `ResultTable` has a number with its spread for each row (usually a method) and column (usually a
federation). `compare` and `report` fill it in; the best of each column is bold, and so is whoever
cannot be told from it in the digits that are printed. `result_csv` writes plain fractions and every
seed's value, the other two what people read.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import ConfigError
from atoll.engines.checkpoint import write_atomically


@dataclass(frozen=True)
class Number:
    """One cell: a mean over seeds, or why there is none.

    Attributes:
        mean: NaN where there is no number.
        std: Standard deviation over seeds; NaN for one seed.
        values: Each seed's.
        why: What stands in the place of a missing number, such as "failed".
    """

    mean: float = float("nan")
    std: float = float("nan")
    values: tuple[float, ...] = ()
    why: str = "–"

    @property
    def known(self) -> bool:
        return bool(np.isfinite(self.mean))


def number(values: Sequence[float]) -> Number:
    """The cell for some seeds' values."""
    if not len(values):
        return Number()
    std = float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
    return Number(float(np.mean(values)), std, tuple(float(v) for v in values))


def number_of(metrics: Mapping[str, Mapping[str, Any]], name: str) -> Number:
    """The cell for a metric of a result (`Result.metrics`, or result.json)."""
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
        scale: What a number is multiplied by where people read it: 100 for percent.
        digits: After the decimal point, where people read it.
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
        found = self.cell(row, column)
        if not found.known:
            return found.why, ""
        sign = "+" if column in self.signed else ""
        mean = f"{found.mean * self.scale:{sign}.{self.digits}f}".replace("-", "−")
        spread = f"{found.std * self.scale:.{self.digits}f}" if np.isfinite(found.std) else ""
        return mean, spread


def result_markdown(tables: Sequence[ResultTable]) -> str:
    """The tables for a README or an issue."""
    return "\n".join(_markdown(table) for table in tables)


def _markdown(table: ResultTable) -> str:
    lines = [f"**{_plain(table.title)}**", ""]
    head = [table.corner, *table.columns]
    lines.append("| " + " | ".join(map(_plain, head)) + " |")
    lines.append("|" + "---|" + "---:|" * len(table.columns))
    for row in table.rows:
        cells = [_plain(row)]
        for column in table.columns:
            mean, spread = table.texts(row, column)
            text = _plain(mean) + (f" ± {spread}" if spread else "")
            cells.append(f"**{text}**" if row in table.best(column) else text)
        lines.append("| " + " | ".join(cells) + " |")
    if table.caption:
        lines += ["", _plain(table.caption)]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text in which Markdown sees nothing of its own."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("\n", " ")


def result_latex(tables: Sequence[ResultTable]) -> str:
    r"""The tables for a paper; they need \usepackage{booktabs}."""
    return "\n".join(["% needs \\usepackage{booktabs}", *map(_latex, tables)])


def _latex(table: ResultTable) -> str:
    lines = [
        "\\begin{table}[t]",
        "  \\centering",
        f"  \\caption{{{_tex(table.title)}. {_tex(table.caption)}}}",
        f"  \\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        "    \\toprule",
        "    " + " & ".join(map(_tex, (table.corner, *table.columns))) + " \\\\",
        "    \\midrule",
    ]
    for row in table.rows:
        cells = [_tex(row)]
        for column in table.columns:
            mean, spread = table.texts(row, column)
            text = f"\\textbf{{{_tex(mean)}}}" if row in table.best(column) else _tex(mean)
            cells.append(text + (f"{{\\scriptsize$\\pm${spread}}}" if spread else ""))
        lines.append("    " + " & ".join(cells) + " \\\\")
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


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
    "–": "--",
    "−": "$-$",
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


def result_csv(tables: Sequence[ResultTable]) -> str:
    """The tables for programs: one line for each number, with every seed's value."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["metric", "row", "column", "mean", "std", "seeds", "per_seed", "missing"])
    for table in tables:
        for row in table.rows:
            for column in table.columns:
                found = table.cell(row, column)
                each = " ".join(f"{value:.10g}" for value in found.values)
                writer.writerow(
                    [
                        table.metric,
                        row,
                        column,
                        _digits(found.mean),
                        _digits(found.std),
                        len(found.values),
                        each,
                        "" if found.known else found.why,
                    ]
                )
    return text.getvalue()


def _digits(value: float) -> str:
    return f"{value:.10g}" if np.isfinite(value) else ""


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
    """Whether a file can be written there, in one sentence if not."""
    if path.is_dir():
        raise ConfigError(f"'{path}' is a folder; give the name of a file")
    there = next(p for p in path.absolute().parents if p.exists())
    if not there.is_dir():
        raise ConfigError(f"'{path}' cannot be written: '{there}' is a file; give another name")
