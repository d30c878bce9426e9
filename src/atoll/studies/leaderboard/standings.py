"""Mean ranks and tests of a league's rows, and the tables that show them.

A *problem* is a data set with a partition, and its score is the mean over seeds. For each data set
we average a method's rank over its problems. The mean rank averages these values over data sets.
The bootstrap resamples data sets, because problems of the same data set are correlated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.present.chart import BLUE, GREY, Axis, Bars, Chart, Dots, Mark, named
from atoll.present.tables import DASH, Number, ResultTable, Table, make_table
from atoll.present.terminal import counted
from atoll.studies.compare.statistics import ALPHA, PairedTest, against, ranks
from atoll.studies.leaderboard.leagues import Recipe
from atoll.studies.leaderboard.rows import Row

DRAWS = 10_000  # bootstrap samples
HALVES = ("homophilous", "heterophilous")
COVERED = 0.5  # minimum fraction of the problems for a ranked method
BY = {"wilcoxon": "p (Wilcoxon)", "t": "p (t-test)", "nothing": "p"}


@dataclass(frozen=True)
class Standings:
    """Ranked methods with all problems that they share, best mean rank first."""

    methods: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]
    scores: np.ndarray  # means over seeds, (problems, methods); 0 if a seed diverged
    mean_ranks: np.ndarray  # one per method, 1 is best
    intervals: np.ndarray  # lower and upper ends, 95%, (2, methods)
    notes: tuple[str, ...] = ()  # about methods and problems that are not ranked

    @property
    def sets(self) -> int:
        return len({data for data, _ in self.problems})

    def tests(self, reference: str) -> list[PairedTest]:
        """Test every other method against the reference, or return [] if it is not ranked."""
        scores = dict(zip(self.methods, self.scores.T, strict=True))
        return against(reference, scores) if reference in scores else []


def rank_methods(rows: Sequence[Row]) -> Standings | None:
    """Rank the methods that ran on at least half of the problems.

    Return None with fewer than two such methods, or without a problem that they share.
    """
    found = {(row.problem, row.method): row.mean or 0.0 for row in rows}
    problems = list(dict.fromkeys(row.problem for row in rows))
    every = list(dict.fromkeys(row.method for row in rows))
    count = {method: sum((problem, method) in found for problem in problems) for method in every}
    methods = [method for method in every if count[method] >= COVERED * len(problems)]
    common = [one for one in problems if all((one, method) in found for method in methods)]
    if len(methods) < 2 or not common:
        return None
    scores = np.array([[found[problem, method] for method in methods] for problem in common])
    placed, sets = ranks(scores), np.array([data for data, _ in common])
    by_set = np.stack([placed[sets == name].mean(0) for name in dict.fromkeys(sets.tolist())])
    mean, notes = by_set.mean(0), list[str]()
    if lost := len(problems) - len(common):
        notes.append(f"{counted(lost, 'problem')} without all of these methods: excluded.")
    if few := [method for method in every if method not in methods]:
        notes.append(f"Not ranked, with too few problems: {', '.join(few)}.")
    if diverged := dict.fromkeys(row.method for row in rows if row.mean is None):
        notes.append(f"If a seed diverged ({', '.join(diverged)}), the score of the method is 0.")
    order = np.argsort(mean, kind="stable")
    names, ends = tuple(methods[place] for place in order), bootstrap(by_set)[:, order]
    return Standings(names, tuple(common), scores[:, order], mean[order], ends, tuple(notes))


def bootstrap(by_set: np.ndarray) -> np.ndarray:
    """Return both ends of the 95% bootstrap interval of each method's mean over sets."""
    draws = np.random.default_rng(0).integers(len(by_set), size=(DRAWS, len(by_set)))
    return np.asarray(np.percentile(by_set[draws].mean(1), [2.5, 97.5], axis=0))


def rows_of(rows: Sequence[Row], recipe: Recipe, league: str, group: str) -> list[Row]:
    """Return the rows of a league and of one group of sets, in the order of the recipe."""
    sets, parts = [name.lower() for name in recipe.sets], list(recipe.partitions)
    place = {name: number for number, name in enumerate([*sets, *parts])}
    own = [row for row in rows if (row.league, recipe.set_of(row.data).group) == (league, group)]
    return sorted(own, key=lambda r: (place.get(r.data.lower(), 99), place.get(r.partition, 99)))


def rank_table(rows: Sequence[Row], recipe: Recipe) -> Table | None:
    """Make a table of mean ranks with intervals, scores and costs, or None with too few rows."""
    if (found := rank_methods(rows)) is None:
        return None
    halves: dict[str, Mapping[str, float]] = {}
    same = [row for row in rows if row.problem in found.problems and row.method in found.methods]
    for half in HALVES:
        of_half = [row for row in same if recipe.set_of(row.data).half == half]
        if len({row.data for row in of_half}) > 1 and (part := rank_methods(of_half)):
            halves[half] = dict(zip(part.methods, part.mean_ranks, strict=True))
    ranked, lines = [row for row in rows if row.problem in found.problems], list[list[str]]()
    for place, method in enumerate(found.methods):
        low, high = found.intervals[:, place]
        own = [row for row in ranked if row.method == method]
        parts = [f"{half[method]:.1f}" if method in half else DASH for half in halves.values()]
        ends = f"{low:.1f} to {high:.1f}" if found.sets > 1 else DASH
        numbers = [f"{found.mean_ranks[place]:.2f}", ends, *parts]
        numbers.append(_mean([row.mean for row in own], 100, 1))
        numbers.append(_mean([row.bytes_per_round for row in own], 1e-6, 2))
        numbers.append(_mean([row.ms_per_round for row in own], 1, 2))
        lines.append([method, *numbers])
    names = ["method", "mean rank", "95 % interval", *halves, "mean score", "MB/round", "ms/round"]
    words = f"{counted(len(found.problems), 'problem')} (set and partition) of "
    words += f"{counted(found.sets, 'set')}. ms/round is per seed, on "
    words += f"{' and '.join(sorted({row.device for row in ranked if row.device}))}, "
    words += "which several runs share."
    return make_table(names, lines, title="Mean ranks", notes=[words, *found.notes])


def rank_chart(found: Standings, reference: str) -> Chart:
    """Draw the mean rank of every method with its interval, best first."""
    marks = list[Mark]()
    for row, (method, rank) in enumerate(zip(found.methods, found.mean_ranks, strict=True)):
        low, high = found.intervals[:, row]
        colour = BLUE if method == reference else GREY
        marks.append(Bars([row], [high - low], [low], 0.5, colour, across=True, opacity=0.3))
        marks.append(Dots([rank], [row], colour, size=7.0))
    best = f"{found.methods[0]} first with {found.mean_ranks[0]:.1f}"
    return Chart(
        "Mean rank over data sets, with its 95 % interval",
        Axis("mean rank (1 is best)", 1, len(found.methods), whole=True),
        named("", found.methods, down=True),
        tuple(marks),
        size=(7.2, 1.2 + 0.24 * len(found.methods)),
        alt=f"Mean ranks of {len(found.methods)} methods as dots with intervals: {best}.",
    )


def _mean(values: Sequence[float | None], scale: float, digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{scale * float(np.mean(known)):.{digits}f}" if len(known) == len(values) else DASH


def against_table(rows: Sequence[Row], reference: str) -> Table | None:
    """Make a table of every other method against the reference, or None without tests."""
    found = rank_methods(rows)
    if found is None or not (tests := found.tests(reference)):
        return None
    lines = []
    for test in sorted(tests, key=lambda test: -test.difference):
        size, low, high = (
            f"{100 * one:+.1f}".replace("-", "−") for one in (test.difference, test.low, test.high)
        )
        p = DASH if test.by == "nothing" else "< 0.001" if test.p < 0.001 else f"{test.p:.3f}"
        verdict = "≈" if not test.different else "better" if test.difference > 0 else "worse"
        ends = DASH if test.pairs < 2 else f"{low} to {high}"
        lines.append([test.name, size, ends, f"{test.wins}/{test.losses}", p, verdict])
    names = ["method", "points", "95 % interval", "wins/losses", BY[tests[0].by], "verdict"]
    problems = counted(tests[0].pairs, "problem")
    note = f"Points of a method minus the points of {reference}, over {problems}."
    how = f"p is Holm-corrected; ≈: not distinguishable from {reference} (p at least {ALPHA})."
    return make_table(names, lines, title=f"Against {reference}", notes=[note, how])


def result_tables(rows: Sequence[Row], recipe: Recipe) -> list[Table]:
    """Make a table of scores for each partition, with methods in the order of their ranks."""
    found, tables = rank_methods(rows), list[Table]()
    every = [*(found.methods if found else ()), *(row.method for row in rows)]
    for part in recipe.partitions:
        own = [row for row in rows if row.partition == part]
        if not own:
            continue
        cells = {
            (r.method, r.data): Number(why="diverged") if r.mean is None else Number(r.mean, r.std)
            for r in own
        }
        methods = tuple(one for one in dict.fromkeys(every) if one in {row.method for row in own})
        seeds = " or ".join(map(str, sorted({row.seeds for row in own})))
        auc = ", ".join(dict.fromkeys(row.data for row in own if row.metric == "auc"))
        caption = f"Mean ± standard deviation over {seeds} seeds, in percent"
        caption += f": AUC for {auc}, else accuracy." if auc else ": accuracy."
        sets = tuple(dict.fromkeys(row.data for row in own))
        tables.append(ResultTable(part, methods, sets, cells, caption).table())
    return tables
