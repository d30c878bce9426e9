"""A comparison in plain sentences: what differs, what is noise, and how many seeds would tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from atoll.experiment.baseline import KINDS, POOLED
from atoll.present.terminal import counted
from atoll.studies.compare.statistics import (
    ALPHA,
    MOST_PAIRS,
    PairedTest,
    least_pairs,
    smallest_wilcoxon,
)
from atoll.studies.compare.tables import ComparisonTable


def where(table: ComparisonTable) -> str:
    """`cora, 10 clients`, or all problems."""
    if not table.data:
        return f"all {table.problems} problems"
    return (
        table.data if table.clients is None else f"{table.data}, {counted(table.clients, 'client')}"
    )


def remarks(
    tables: Iterable[ComparisonTable], alpha: float
) -> Iterator[tuple[ComparisonTable, list[str], list[str]]]:
    """Each table with its findings and its notes; a note on several tables is given once."""
    given: set[str] = set()
    for table in tables:
        notes = [*which_test(table, alpha), *scored_models(table), *baselines(table)]
        notes = [note for note in notes if note not in given]
        given.update(notes)
        yield table, findings(table, alpha), [*chosen_points(table), *notes]


def sentences(table: ComparisonTable, alpha: float) -> list[str]:
    """What the tests of one table say, and by which right."""
    return [*findings(table, alpha), *which_test(table, alpha)]


def findings(table: ComparisonTable, alpha: float) -> list[str]:
    """Who differs, who does not as far as can be told, and how many seeds would tell."""
    if sum(row.finished for row in table.rows) < 2:
        return []
    if table.reference is None:
        return ["The method to compare against has no result here, so nothing is tested."]
    if table.tests[0].by == "nothing":
        return [
            "One seed cannot tell a difference from noise, so nothing is tested; give --seeds "
            f"{least_pairs(alpha, len(table.tests))} or more."
        ]
    said = []
    apart = [test for test in table.tests if test.different]
    if not apart:
        said.append(
            f"All differences from {table.reference} are within the noise: on {where(table)}, no "
            "method can be called better or worse than it."
        )
    for better, word in ((False, "better"), (True, "worse")):
        found = [test for test in apart if (test.difference > 0) == better]
        if found:
            listed = _and(
                [f"{t.name} ({_points(-t.difference)}, {p_text(t.p, alpha)})" for t in found]
            )
            said.append(f"{table.reference} is {word} than {listed}.")
    said += [_noise(test, table, alpha) for test in table.tests if not test.different]
    return [*said, *_all_at_once(table, alpha)]


def which_test(table: ComparisonTable, alpha: float) -> list[str]:
    """Why it is not Wilcoxon's test that decides, where it is not."""
    if not table.tests or table.tests[0].by != "t":
        return []
    pairs, family = min(t.pairs for t in table.tests), len(table.tests)
    floor = smallest_wilcoxon(pairs)
    corrected = f", {min(1.0, floor * family):.3g} after Holm's correction" if family > 1 else ""
    seeds = math.ceil(least_pairs(alpha, family) / table.problems)
    return [
        f"With {counted(pairs, 'pair')} Wilcoxon's test cannot reach p < {alpha:g} whatever the "
        f"scores (its smallest p is {floor:.3g}{corrected}; it takes {seeds} seeds), so the paired "
        "t-test decides here, which takes the differences as normal."
    ]


def _noise(test: PairedTest, table: ComparisonTable, alpha: float) -> str:
    if test.wins == test.losses == 0:
        return f"{test.name} and {test.against} have the same score everywhere."
    begin = f"{test.name} cannot be told from {test.against}: "
    if test.by == "t" and (test.std or 0.0) < 1e-9:
        return begin + (
            f"all {test.pairs} differences are {_points(test.difference)}, so that there is no "
            "spread to measure by; more seeds would tell."
        )
    begin += (
        f"{_points(test.difference, test.std)} is within the noise of "
        f"{counted(table.seeds, 'seed')} ({p_text(test.p, alpha)}); "
    )
    seeds = max(table.seeds + 1, math.ceil((test.needed or MOST_PAIRS) / table.problems))
    about = "more than" if test.needed is None else "about"
    return begin + f"a difference of this size and spread would take {about} {seeds} seeds to show."


def _all_at_once(table: ComparisonTable, alpha: float) -> list[str]:
    found = table.rank_test
    if found is None:
        return []
    said = f"Over {counted(found.blocks, 'block')} Friedman's test gives {p_text(found.p, alpha)}"
    if found.p >= alpha:
        return [f"{said}: the methods rank alike as far as can be told."]
    return [
        f"{said}: the methods do not all rank alike; mean ranks differ (Nemenyi) where they are "
        f"more than {found.critical_difference:.2f} apart."
    ]


def chosen_points(table: ComparisonTable) -> list[str]:
    """Which points of the grids the numbers are of, and who chose them."""
    return [
        f"{row.method}: {_settings(row.point)}, chosen from {row.points} points by validation "
        "scores; test scores are read for it alone."
        for row in table.rows
        if row.points > 1 and row.point
    ]


def scored_models(table: ComparisonTable) -> list[str]:
    """Whose which model is scored, where that differs between methods."""
    kinds: dict[str, list[str]] = {}
    for row in table.rows:
        if row.finished and row.scored not in KINDS:
            kinds.setdefault(row.scored, []).append(row.method)
    if len(kinds) < 2:
        return []
    listed = [f"the {kind} model of {_and(names)}" for kind, names in kinds.items()]
    return [f"Scored: {'; '.join(listed)}."]


def baselines(table: ComparisonTable) -> list[str]:
    """The rows that are no federated methods, and those that break privacy."""
    names = [row.method for row in table.rows if row.scored in KINDS]
    pooled = [row.method for row in table.rows if row.scored == POOLED]
    sentences = (
        ("Not federated, only to compare with", names),
        ("Trained on the pooled data of all clients, without privacy", pooled),
    )
    return [f"{words}: {_and(rows)}." for words, rows in sentences if rows]


def failures(table: ComparisonTable) -> list[str]:
    """The sentence of every method that failed here, wholly or in part."""
    return [f"{row.method}: {row.error}" for row in table.rows if row.error]


def _settings(point: Mapping[str, object]) -> str:
    """`mu=0.1 lr=0.01`."""
    return " ".join(f"{key}={value}" for key, value in point.items())


def p_text(p: float, alpha: float = ALPHA) -> str:
    """`p = 0.031`, `p < 0.001`; with enough digits to see on which side of alpha it is."""
    if p < 0.001:
        return "p < 0.001"
    digits = 2
    while digits < 8 and (float(f"{p:.{digits}g}") < alpha) != (p < alpha):
        digits += 1
    return f"p = {p:.{digits}g}"


def _points(value: float, std: float | None = None) -> str:
    spread = "" if std is None else f" ± {100 * std:.1f}"
    return f"{100 * value:+.1f}{spread} points".replace("-", "−")


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
