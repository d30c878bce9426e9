"""A comparison for people: tables in the terminal, in Markdown, in LaTeX and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.files import write_atomically
from atoll.present.terminal import counted
from atoll.studies.compare.findings import failures, point_text, remarks, where
from atoll.studies.compare.tables import Comparison, Row, Table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable

COLUMNS = (
    "cell",
    "data",
    "clients",
    "method",
    "point",
    "chosen",
    "seed",
    "metric",
    "scored",
    "validation",
    "test",
    "bytes_per_round",
    "seconds_per_round",
    "error",
)
"""Of compare.csv."""


def comparison_text(found: Comparison) -> Group:
    """Every table with what it says."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    for table, said, notes in remarks(found):
        parts += [Text(heading(table), style="bold"), Text(), _rich_table(table), Text()]
        parts += [Text(line) for line in said]
        parts += [Text(line, style="dim") for line in notes]
        parts += [Text(f"Failed: {line}", style="yellow") for line in failures(table)]
        parts.append(Text())
    return Group(*parts, Text(caption(found), style="dim"))


def plain_text(found: Comparison) -> str:
    """The same without colours."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=88, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(comparison_text(found))
    return captured.get().rstrip()


def heading(table: Table) -> str:
    """What was compared, and how."""
    seeds = counted(table.seeds, "seed")
    if not table.data:
        return (
            f"Over {where(table)}, {seeds} each ({counted(table.seeds * table.problems, 'block')})"
        )
    about = table.about
    return (
        f"{where(table)}, {about['partition']}, {counted(about['rounds'] or 0, 'round')}, {seeds}, "
        f"protocol {about['protocol']}"
    )


def caption(found: Comparison) -> str:
    """How to read the tables."""
    reference = found.asked["against"]
    told = f"told from {reference}" if reference else "told from the best"
    several = any(table.seeds > 1 for table in found)
    spread = "mean ± standard deviation over seeds; " if several else ""
    return (
        f"Test scores in percent, {spread}bold: the best, ≈: cannot be {told}. rank: mean over "
        "seeds, 1 is best; gap: in points; p: two-sided, Holm-corrected over the table; MB: what "
        "training moved in a round, up and down."
    )


def _rich_table(table: Table) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(header(table)):
        # A method with settings is one long word; it is folded, so that all of it can be read.
        drawn.add_column(
            name, justify="right" if number else "left", no_wrap=number > 0, overflow="fold"
        )
    for row in table.rows:
        style = "bold" if row.method in table.best else ""
        drawn.add_row(*(Text(text, style=style) for text in cells(table, row)))
    return drawn


def header(table: Table) -> list[str]:
    """Names of the columns."""
    test = table.tests[0].by if table.tests else ""
    p = {"wilcoxon": "p (Wilcoxon)", "t": "p (t)"}.get(test, "p")
    return ["method", table.metric.replace("_", " "), "", "rank", "gap", p, "MB/round", "s/round"]


def cells(table: Table, row: Row) -> list[str]:
    """One row as text."""
    label = f"{row.method} ({point_text(row)})" if row.point else row.method
    if not row.finished:
        return [label, "failed", "", "–", "–", "–", "–", "–"]
    test = table.test_of(row.method)
    if row.method == table.reference:
        gap, p = "best" if row.method in table.best else "reference", ""
    elif test is None:
        gap, p = "–", "–"
    else:
        gap, p = f"{100 * test.difference:+.1f}".replace("-", "−"), _p(test.p)
    return [
        label,
        score_text(row, table),
        "≈" if _tied(table, row) else "",
        f"{row.rank:.2f}",
        gap,
        p,
        f"{row.megabytes:.2f}",
        f"{row.seconds:.3f}",
    ]


def score_text(row: Row, table: Table) -> str:
    """`81.9 ± 1.7`."""
    spread = "" if row.std is None else f" ± {100 * row.std:.1f}"
    return f"{100 * row.mean:.1f}{spread}"


def _p(p: float) -> str:
    return "–" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def _tied(table: Table, row: Row) -> bool:
    """Whether this method cannot be told from the reference."""
    test = table.test_of(row.method)
    return test is not None and not test.different


def markdown(found: Comparison) -> str:
    """All tables, one below the other."""
    parts = ["# Comparison", ""]
    for table, said, notes in remarks(found):
        parts += [f"## {heading(table)}", "", _line(header(table))]
        parts.append("|---|" + "---:|" * 7)
        for row in table.rows:
            texts = [text.strip().replace("|", "\\|") for text in cells(table, row)]
            if row.method in table.best:
                texts[:2] = [f"**{text}**" for text in texts[:2]]
            parts.append(_line(texts))
        lines = [*said, *notes, *(f"Failed: {line}" for line in failures(table))]
        parts += ["", *(f"- {line}" for line in lines), ""]
    return "\n".join([*parts, caption(found), ""])


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def latex(found: Comparison) -> str:
    """One table for a paper (needs booktabs): methods as rows, problems as columns."""
    tables = found.tables
    last = found.overall or tables[0]
    names = [tex(where(table)) for table in tables]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{tex(caption_of_tex(found))}}}",
        f"  \\begin{{tabular}}{{l{'c' * len(tables)}r}}",
        "    \\toprule",
        f"    Method & {' & '.join(names)} & Rank \\\\",
        "    \\midrule",
    ]
    for position, row in enumerate(last.rows):
        texts = [_tex_cell(table, table.rows[position]) for table in tables]
        rank = f"{row.rank:.2f}" if math.isfinite(row.rank) else "--"
        lines.append(f"    {tex(row.method)} & {' & '.join(texts)} & {rank} \\\\")
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""]
    return "\n".join(lines)


def caption_of_tex(found: Comparison) -> str:
    """What the paper's readers must know."""
    first = found.tables[0]
    reference = found.asked["against"]
    tests = {"wilcoxon": "Wilcoxon signed-rank test", "t": "paired t-test"}
    used = {t.by for table in found.tables for t in table.tests if t.by in tests}
    by = " or ".join(tests[name] for name in sorted(used)) or "no test"
    text = (
        f"Test {first.metric.replace('_', ' ')} in percent, mean ± standard deviation over "
        f"{counted(first.seeds, 'seed')}; the same partitions and seeds for all methods. Bold: "
        f"best; ≈: not told from {reference or 'the best'} at {found.alpha:g} ({by}, "
        "Holm-corrected)."
    )
    if any(row.points > 1 for table in found.tables for row in table.rows):
        text += " Hyper-parameters were chosen by validation scores."
    return text


def _tex_cell(table: Table, row: Row) -> str:
    if not row.finished:
        return "--"
    text = tex(score_text(row, table))
    if row.method in table.best:
        text = f"\\textbf{{{text}}}"
    return text + ("$^{\\approx}$" if _tied(table, row) else "")


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
    "−": "$-$",
}


def tex(text: str) -> str:
    """Text with LaTeX's own characters written out."""
    return "".join(_TEX.get(character, character) for character in text)


def write_csv(found: Comparison, path: Path) -> Path:
    """One line per cell and seed; the test scores of points that were not chosen are left out."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(found.cells)
    return write_text(text.getvalue(), path)


def write_text(text: str, path: Path) -> Path:
    """A file that appears whole or not at all."""
    write_atomically(path, text.encode())
    return path


def write_study(found: Comparison, folder: Path) -> None:
    """The tables, beside the cells that they are of."""
    content = json.dumps(found.summary(), indent=2, allow_nan=False)
    write_csv(found, folder / "compare.csv")
    write_text(markdown(found), folder / "compare.md")
    write_text(content + "\n", folder / "compare.json")
