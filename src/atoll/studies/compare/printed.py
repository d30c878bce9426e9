"""The printed tables of a comparison, as values of `atoll.present.tables`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from atoll.present.tables import (
    DASH,
    NEEDS_BOOKTABS,
    Cell,
    Column,
    Table,
    latex,
    make_table,
    markdown,
    record_table,
)
from atoll.present.terminal import counted
from atoll.studies.compare.findings import failures, remarks, where
from atoll.studies.compare.tables import ComparedRow, ComparisonTable

CSV_COLUMNS = (
    *("cell", "data", "clients", "method", "point", "chosen", "seed", "metric", "scored"),
    *("validation", "test", "bytes_per_round", "seconds_per_round", "error"),
)


def printed_tables(tables: Iterable[ComparisonTable], alpha: float) -> list[Table]:
    """Every table with its findings, its notes and the errors of failed rows, in this order."""
    return [
        make_table(
            [Column("method", "left", wrap=True), *map(Column, _header(table))],
            [_cells(table, row) for row in table.rows],
            title=heading(table),
            notes=[*said, *notes, *(f"Failed: {line}" for line in failures(table))],
        )
        for table, said, notes in remarks(tables, alpha)
    ]


def heading(table: ComparisonTable) -> str:
    """The problem, and how it was run."""
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


def caption(tables: Sequence[ComparisonTable], reference: str | None) -> str:
    """How to read the tables."""
    told = f"told from {reference}" if reference else "told from the best"
    several = any(table.seeds > 1 for table in tables)
    spread = "mean ± standard deviation over seeds; " if several else ""
    return (
        f"Test scores in percent, {spread}bold: the best, ≈: cannot be {told}. rank: mean over "
        "seeds, 1 is best; gap: in points; p: two-sided, Holm-corrected over the table; MB: what "
        "training moved in a round, up and down."
    )


def _header(table: ComparisonTable) -> list[str]:
    """Names of the columns behind the method's."""
    test = table.tests[0].by if table.tests else ""
    p = {"wilcoxon": "p (Wilcoxon)", "t": "p (t)"}.get(test, "p")
    return [table.metric.replace("_", " "), "", "rank", "gap", p, "MB/round", "s/round"]


def _cells(table: ComparisonTable, row: ComparedRow) -> list[Cell]:
    if not row.finished:
        texts = [row.label, "failed", "", *[DASH] * 5]
        return [Cell(text) for text in texts]
    test = table.test_of(row.method)
    if row.method == table.reference:
        gap, p = "best" if row.method in table.best else "reference", ""
    elif test is None:
        gap, p = DASH, DASH
    else:
        gap, p = f"{100 * test.difference:+.1f}".replace("-", "−"), _p(test.p)
    best = row.method in table.best
    others = [
        "≈" if _tied(table, row) else "",
        f"{row.rank:.2f}",
        gap,
        p,
        f"{row.megabytes:.2f}",
        f"{row.seconds:.3f}",
    ]
    named = [Cell(text, mark="best" if best else "") for text in (row.label, _score(row))]
    return [*named, *(Cell(text, style="bold" if best else "") for text in others)]


def _score(row: ComparedRow) -> str:
    """`81.9 ± 1.7`."""
    spread = "" if row.std is None else f" ± {100 * row.std:.1f}"
    return f"{100 * row.mean:.1f}{spread}"


def _p(p: float) -> str:
    return DASH if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def _tied(table: ComparisonTable, row: ComparedRow) -> bool:
    """Whether the tests find no difference between this method and the reference."""
    test = table.test_of(row.method)
    return test is not None and not test.different


def comparison_markdown(
    tables: Sequence[ComparisonTable], alpha: float, reference: str | None
) -> str:
    """All tables, one below the other."""
    parts = [markdown(table, level=2, escaped="|") for table in printed_tables(tables, alpha)]
    return "\n".join(["# Comparison\n", *parts, caption(tables, reference), ""])


def comparison_latex(
    tables: Sequence[ComparisonTable],
    overall: ComparisonTable | None,
    alpha: float,
    reference: str | None,
) -> str:
    """One table for a paper: methods as rows, problems as columns."""
    columns = [
        Column("Method", "left"),
        *(Column(where(table), "center") for table in tables),
        Column("Rank"),
    ]
    rows = []
    for place, row in enumerate((overall or tables[0]).rows):
        rank = f"{row.rank:.2f}" if math.isfinite(row.rank) else DASH
        label = next((t.rows[place].marked for t in tables if t.rows[place].scored), row.method)
        rows.append([label, *(_paper_cell(t, t.rows[place]) for t in tables), rank])
    words = _paper_caption(tables, alpha, reference)
    return f"{NEEDS_BOOKTABS}\n{latex(make_table(columns, rows, caption=words), place='')}"


def _paper_cell(table: ComparisonTable, row: ComparedRow) -> Cell:
    if not row.finished:
        return Cell(DASH)
    mark, sign = row.method in table.best, _tied(table, row)
    return Cell(_score(row), mark="best" if mark else "", sign="≈" if sign else "")


def _paper_caption(tables: Sequence[ComparisonTable], alpha: float, reference: str | None) -> str:
    """What the paper's readers must know."""
    first = tables[0]
    tests = {"wilcoxon": "Wilcoxon signed-rank test", "t": "paired t-test"}
    used = {t.by for table in tables for t in table.tests if t.by in tests}
    by = " or ".join(tests[name] for name in sorted(used)) or "no test"
    text = (
        f"Test {first.metric.replace('_', ' ')} in percent, mean ± standard deviation over "
        f"{counted(first.seeds, 'seed')}; the same partitions and seeds for all methods. Bold: "
        "best; ≈: not told "
        f"from {reference or 'the best'} at {alpha:g} ({by}, Holm-corrected)."
    )
    if any(row.points > 1 for table in tables for row in table.rows):
        text += " Hyper-parameters were chosen by validation scores."
    return text


def csv_table(lines: Sequence[Mapping[str, object]]) -> Table:
    """One line per run and seed; points of a grid that were not chosen have no test scores."""
    return record_table(lines, CSV_COLUMNS)
