"""The conclusions of a comparison as sentences, and its printed tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from atoll.core.errors import counted
from atoll.experiment.baseline import BOUND, KINDS, NOT_FEDERATED, POOLED, WINS
from atoll.present import tables as present
from atoll.present.tables import DASH, Cell, Column, Table, make_table
from atoll.present.terminal import listed
from atoll.studies.compare import statistics
from atoll.studies.compare.plan import ComparisonRequest
from atoll.studies.compare.statistics import ALPHA, PairedTest, least_pairs
from atoll.studies.compare.tables import ComparedRow, ComparisonTable, settings_text

CSV_COLUMNS = (
    *("cell", "data", "clients", "method", "point", "chosen", "seed", "metric", "scored"),
    *("validation", "test", "bytes_per_round", "seconds_per_round", "error"),
)
EACH = 2  # up to this number, each test without a finding gets a sentence


def printed_tables(tables: Iterable[ComparisonTable], alpha: float) -> list[Table]:
    """Make every table with its conclusions, its notes and the errors of failed rows."""
    found, given = [], set[str]()  # print a note of several tables only once
    for table in tables:
        notes = [*_which_test(table, alpha), *_scored_models(table), *_networks(table)]
        if positive := table.about.get("positive_class"):
            notes.append(f"Positive class: {positive}.")
        notes = [note for note in notes if note not in given]
        given.update(notes)
        failed = [f"Failed: {row.method}: {row.error}" for row in table.rows if row.error]
        chosen = [
            f"{row.method}: {settings_text(row.point)}, selected among {row.points} points by "
            "validation scores; only its test scores are read."
            for row in table.rows
            if row.points > 1 and row.point
        ]
        test = table.tests[0].by if table.tests else ""
        p = {"wilcoxon": "p (Wilcoxon)", "t": "p (t)"}.get(test, "p")
        head = [table.metric.replace("_", " "), "", "rank", "gap", p, "MB/round", "s/round"]
        columns = [Column("method", "left", wrap=True), *map(Column, head)]
        rows = [_cells(table, row) for row in table.rows]
        notes = [*_findings(table, alpha), *chosen, *notes, *failed]
        found.append(make_table(columns, rows, title=_heading(table), notes=notes))
    return found


def sentences(table: ComparisonTable, alpha: float) -> list[str]:
    """Return the results of the tests of one table, and the reason for the choice of test."""
    return [*_findings(table, alpha), *_which_test(table, alpha)]


def _findings(table: ComparisonTable, alpha: float) -> list[str]:
    """State significant differences, and the seeds that the other differences would need."""
    if sum(row.finished for row in table.rows) < 2:
        return []
    if table.reference is None:
        return ["The method to compare against has no result here, so no test was made."]
    if table.tests[0].by == "nothing":
        return [
            "One seed cannot separate a difference from noise, so no test was made; give --seeds "
            f"{least_pairs(alpha, len(table.tests))} or more."
        ]
    best = max(row.mean for row in table.rows if row.method in table.best)
    found = [
        f"{row.method} {WINS}."
        for row in table.rows
        if row.method in table.best and row.scored == NOT_FEDERATED
    ]
    found += [
        f"{row.method} {BOUND}: {_points(row.mean - best)} compared with the best of the others."
        for row in table.rows
        if row.finished and row.scored == POOLED and row.method not in table.best
    ]
    if not (apart := [test for test in table.tests if test.different]):
        few = f"{counted(table.seeds, 'seed')} are too few to call any method"
        found.append(f"On {_where(table)}, {few} better or worse than {table.reference}.")
    for better, word in ((False, "better"), (True, "worse")):
        tests = [test for test in apart if (test.sign > 0) == better]
        if names := [f"{t.name} ({_points(-t.difference)}, {p_text(t.p, alpha)})" for t in tests]:
            found.append(f"{table.reference} is {word} than {listed(names)}.")
    found += _too_few([test for test in table.tests if not test.different], table, alpha)
    if (ranks := table.rank_test) is not None:
        words = "do not differ significantly in rank."
        if ranks.p < alpha:
            words = (
                "differ in rank; two mean ranks differ significantly (Nemenyi) if they are "
                f"more than {ranks.critical_difference:.2f} apart."
            )
        blocks, p = counted(ranks.blocks, "block"), p_text(ranks.p, alpha)
        found.append(f"Over {blocks} Friedman's test gives {p}: the methods {words}")
    return found


def _which_test(table: ComparisonTable, alpha: float) -> list[str]:
    """Explain why Wilcoxon's test does not decide, if it does not."""
    if not table.tests or table.tests[0].by != "t":
        return []
    pairs, family = min(t.pairs for t in table.tests), len(table.tests)
    floor = statistics.smallest_wilcoxon(pairs)
    corrected = f", {min(1.0, floor * family):.3g} after Holm's correction" if family > 1 else ""
    seeds = math.ceil(least_pairs(alpha, family) / table.problems)
    return [
        f"With {counted(pairs, 'pair')}, Wilcoxon's test cannot reach p < {alpha:g} for any "
        f"scores (its smallest p is {floor:.3g}{corrected}; it needs {seeds} seeds), so the paired "
        "t-test decides here, which assumes normal differences."
    ]


def _too_few(tests: Sequence[PairedTest], table: ComparisonTable, alpha: float) -> list[str]:
    """Return a sentence for each test without a finding, or one for all if there are many."""
    alike = [test for test in tests if test.wins == test.losses == 0]
    if alike or len(tests) <= EACH:
        return [_noise(test, table, alpha) for test in tests]
    seeds = [_seeds_for(test, table) for test in tests]
    most = "more than" if any(test.needed is None for test in tests) else "about"
    gaps = sorted(test.difference for test in tests)
    names = listed([test.name for test in tests])
    return [
        f"{counted(table.seeds, 'seed')} are too few to tell {names} from "
        f"{table.reference} ({_points(gaps[0])} to {_points(gaps[-1])}); {most} {max(seeds)} seeds "
        f"would show all of these differences, and {min(seeds)} the clearest."
    ]


def _seeds_for(test: PairedTest, table: ComparisonTable) -> int:
    """Return the number of seeds that would show a difference of this size and spread."""
    needed = test.needed or statistics.MOST_PAIRS
    return max(table.seeds + 1, math.ceil(needed / table.problems))


def _noise(test: PairedTest, table: ComparisonTable, alpha: float) -> str:
    if test.wins == test.losses == 0:
        return f"{test.name} and {test.against} have the same score everywhere."
    begin = f"For {test.name} against {test.against}, "
    if test.by == "t" and (test.std or 0.0) < 1e-9:
        return begin + (
            f"all {test.pairs} differences are {_points(test.difference)}, so they have no "
            "variance; use more seeds."
        )
    about = "more than" if test.needed is None else "about"
    found = f"{_points(test.difference, test.std)} ({p_text(test.p, alpha)})"
    return begin + (
        f"{counted(table.seeds, 'seed')} are too few to tell: {found}; {about} "
        f"{_seeds_for(test, table)} seeds would show a difference of this size and spread."
    )


def _scored_models(table: ComparisonTable) -> list[str]:
    """List the evaluated models if they differ, and the rows without federation or privacy."""
    kinds: dict[str, list[str]] = {}
    for row in table.rows:
        if row.finished and row.scored not in KINDS:
            kinds.setdefault(row.scored, []).append(row.method)
    models = [f"the {kind} model of {listed(names)}" for kind, names in kinds.items()]
    baselines = [row.method for row in table.rows if row.scored in KINDS]
    pooled = [row.method for row in table.rows if row.scored == POOLED]
    notes = {
        f"Scored: {'; '.join(models)}.": len(kinds) > 1,
        f"Not federated, only for comparison: {listed(baselines)}.": baselines,
        f"Trained on the pooled data of all clients, without privacy: {listed(pooled)}.": pooled,
    }
    return [note for note, applies in notes.items() if applies]


def _networks(table: ComparisonTable) -> list[str]:
    """List the networks of the methods if they differ."""
    nets: dict[str, list[str]] = {}
    for row in table.rows:
        if row.network:
            nets.setdefault(row.network, []).append(row.method)
    if len(nets) < 2:
        return []
    used = "; ".join(f"{net} of {listed(names)}" for net, names in nets.items())
    return [f"Networks: {used}. Differences can be effects of the networks (--set net=NAME)."]


def p_text(p: float, alpha: float = ALPHA) -> str:
    """Format a p-value, such as `p = 0.031`, with enough digits to compare it with alpha."""
    if p < 0.001:
        return "p < 0.001"
    digits = 2
    while digits < 8 and (float(f"{p:.{digits}g}") < alpha) != (p < alpha):
        digits += 1
    return f"p = {p:.{digits}g}"


def _points(value: float, std: float | None = None) -> str:
    spread = "" if std is None else f" ± {100 * std:.1f}"
    return f"{100 * value:+.1f}{spread} points".replace("-", "−")


def _where(table: ComparisonTable) -> str:
    """Format the problem: `cora, 10 clients`, or all problems."""
    if not table.data:
        return f"all {table.problems} problems"
    clients = "" if table.clients is None else f", {counted(table.clients, 'client')}"
    return f"{table.data}{clients}"


def _heading(table: ComparisonTable) -> str:
    """Describe the problem and its runs."""
    seeds, about = counted(table.seeds, "seed"), table.about
    if not table.data:
        blocks = counted(table.seeds * table.problems, "block")
        return f"Over {_where(table)}, {seeds} each ({blocks})"
    rounds = counted(about["rounds"] or 0, "round")
    return f"{_where(table)}, {about['partition']}, {rounds}, {seeds}, protocol {about['protocol']}"


def caption(tables: Sequence[ComparisonTable], reference: str | None) -> str:
    """Explain how to read the tables."""
    told = f"distinguishable from {reference or 'the best'}"
    several = any(table.seeds > 1 for table in tables)
    spread = "mean ± standard deviation over seeds; " if several else ""
    return (
        f"Test scores in percent, {spread}bold: the best, ≈: not {told}. rank: mean over "
        "seeds, 1 is best; gap: in points; p: two-sided, Holm-corrected over the table; MB: "
        "training traffic per round, up and down."
    )


def _cells(table: ComparisonTable, row: ComparedRow) -> list[Cell]:
    if not row.finished:
        return [Cell(text) for text in (row.label, "failed", "", *[DASH] * 5)]
    test, best = table.test_of(row.method), row.method in table.best
    if row.method == table.reference:
        gap, p = "best" if best else "reference", ""
    elif test is None:
        gap, p = DASH, DASH
    else:
        gap = f"{100 * test.difference:+.1f}".replace("-", "−")
        p = "<0.001" if test.p < 0.001 else f"{test.p:.3f}"
        p = DASH if math.isnan(test.p) else p
    costs = f"{row.megabytes:.2f}", f"{row.seconds:.3f}"
    others = (_tie(table, row), f"{row.rank:.2f}", gap, p, *costs)
    named = [Cell(text, best=best) for text in (row.label, _score(row))]
    return [*named, *(Cell(text, style="bold" if best else "") for text in others)]


def _score(row: ComparedRow) -> str:
    """Format a score: `81.9 ± 1.7`."""
    spread = "" if row.std is None else f" ± {100 * row.std:.1f}"
    return f"{100 * row.mean:.1f}{spread}"


def _tie(table: ComparisonTable, row: ComparedRow) -> str:
    """Return "≈" if the deciding test finds no difference from the reference, otherwise ""."""
    test = table.test_of(row.method)
    return "≈" if test is not None and not test.different else ""


def comparison_latex(
    tables: Sequence[ComparisonTable], overall: ComparisonTable | None, request: ComparisonRequest
) -> str:
    """Render one table for a paper: methods as rows, problems as columns."""
    problems = [Column(_where(table), "center") for table in tables]
    rows = []
    for place, row in enumerate((overall or tables[0]).rows):
        cells: list[object] = []
        for problem, own in ((one, one.rows[place]) for one in tables):
            best = own.method in problem.best
            cell = Cell(_score(own), best=best, sign=_tie(problem, own))
            cells.append(cell if own.finished else DASH)
        rank = f"{row.rank:.2f}" if math.isfinite(row.rank) else DASH
        marked = (one.rows[place].marked for one in tables if one.rows[place].scored)
        rows.append([next(marked, row.method), *cells, rank])
    tests = {"t": "paired t-test", "wilcoxon": "Wilcoxon signed-rank test"}
    used = {test.by for table in tables for test in table.tests}
    by = " or ".join(words for name, words in tests.items() if name in used) or "no test"
    text = (
        f"Test {tables[0].metric.replace('_', ' ')} in percent, mean ± standard deviation over "
        f"{counted(tables[0].seeds, 'seed')}; the same partitions and seeds for all methods. Bold: "
        "best; ≈: not distinguishable "
        f"from {request.against or 'the best'} at {request.alpha:g} ({by}, Holm-corrected)."
    )
    if any(row.points > 1 for table in tables for row in table.rows):
        text += " Validation scores selected the hyper-parameters."
    columns = [Column("Method", "left"), *problems, Column("Rank")]
    table = make_table(columns, rows, caption=text)
    return f"{present.NEEDS_BOOKTABS}\n{present.latex(table, place='')}"
