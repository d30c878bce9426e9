"""Mean ranks and tests of a league's rows, and the tables that show them.

A *problem* is a data set with a partition, and its score is the mean over seeds. For each data set
we average a method's rank, or its difference to the reference, over the problems. Means over data
sets follow. Intervals and the stricter of two tests treat data sets as the independent units,
because problems of the same data set are correlated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from atoll.core.errors import counted
from atoll.present.chart import BLUE, GREY, Axis, Bars, Chart, Dots, Mark, named
from atoll.present.tables import DASH, Number, ResultTable, Table, make_table
from atoll.studies.compare.statistics import (
    ALPHA,
    holm,
    interval,
    joint_flips,
    rank_sum,
    ranks,
    wilcoxon,
)
from atoll.studies.leaderboard.leagues import Recipe
from atoll.studies.leaderboard.rows import Row
from atoll.studies.study_run import method_costs

DRAWS = 10_000  # bootstrap samples
HALVES = ("homophilous", "heterophilous")
FEWEST = 6  # minimum sets for p < ALPHA of a test that counts each set once
BASE = "fedavg"  # the method that others are compared with in points and time
COVERED = 0.5  # minimum fraction of the problems for a ranked method


@dataclass(frozen=True)
class Comparison:
    """One method against the reference. Both p-values are corrected over all methods."""

    name: str
    points: float | None  # mean difference over sets; None if a seed of either diverged
    ends: tuple[float, float]  # 95% interval of the points, over sets
    wins: int  # problems
    losses: int
    by_problem: float  # Wilcoxon's p over problems, with Holm's correction
    by_set: float  # p of joint sign flips of the mean differences of sets
    sign: int  # 1 if both tests find the method better, -1 if both find it worse, otherwise 0


@dataclass(frozen=True)
class Standings:
    """Ranked methods with all problems that they share, best mean rank first."""

    methods: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]
    scores: np.ndarray  # means over seeds, (problems, methods); 0 if a seed diverged
    diverged: np.ndarray  # where a seed diverged, (problems, methods) bool
    mean_ranks: np.ndarray  # one per method, 1 is best
    intervals: np.ndarray  # lower and upper ends, 95%, (2, methods)
    excluded: int = 0  # problems that a ranked method lacks, or with several metrics
    notes: tuple[str, ...] = ()  # about methods and problems that are not ranked

    @property
    def sets(self) -> int:
        return len({data for data, _ in self.problems})

    def comparisons(self, reference: str) -> list[Comparison]:
        """Compare every other method with the reference, or return [] if it is not ranked."""
        if reference not in self.methods:
            return []
        place = self.methods.index(reference)
        others = [number for number in range(len(self.methods)) if number != place]
        gaps = self.scores[:, others] - self.scores[:, [place]]
        diverged = self.diverged[:, others] | self.diverged[:, [place]]
        means = self.by_set(gaps)
        problem_p, set_p = holm([wilcoxon(gap) for gap in gaps.T]), joint_flips(means)
        found = []
        for k, other in enumerate(others):
            sums = rank_sum(gaps[:, k]), rank_sum(means[:, k])
            apart = max(problem_p[k], set_p[k]) < ALPHA and sums[0] * sums[1] > 0
            points = None if diverged[:, k].any() else float(means[:, k].mean())
            found.append(
                Comparison(
                    name=self.methods[other],
                    points=points,
                    ends=interval(means[:, k]),
                    wins=int((gaps[:, k] > 0).sum()),
                    losses=int((gaps[:, k] < 0).sum()),
                    by_problem=problem_p[k],
                    by_set=float(set_p[k]),
                    sign=int(np.sign(sums[0])) if apart else 0,
                )
            )
        return found

    def by_set(self, values: np.ndarray) -> np.ndarray:
        """Average the rows of each data set, (problems, ...) to (sets, ...)."""
        sets = np.array([data for data, _ in self.problems])
        return np.stack([values[sets == name].mean(0) for name in dict.fromkeys(sets.tolist())])


def rank_methods(rows: Sequence[Row]) -> Standings | None:
    """Rank the methods that ran on at least half of the problems.

    Return None for fewer than two such methods, or if they share no problem with one metric.
    """
    found = {(row.problem, row.method): row for row in rows}
    problems = list(dict.fromkeys(row.problem for row in rows))
    every = list(dict.fromkeys(row.method for row in rows))
    count = {method: sum((problem, method) in found for problem in problems) for method in every}
    methods = [method for method in every if count[method] >= COVERED * len(problems)]

    def comparable(problem: tuple[str, str]) -> bool:
        own = [found.get((problem, method)) for method in methods]
        return None not in own and len({row.metric for row in own if row and row.metric}) < 2

    common = [problem for problem in problems if comparable(problem)]
    if len(methods) < 2 or not common:
        return None
    means = [[found[problem, method].mean for method in methods] for problem in common]
    diverged = np.array([[mean is None for mean in line] for line in means])
    scores, notes = np.array([[mean or 0.0 for mean in line] for line in means]), list[str]()
    lost = len(problems) - len(common)
    if lost:
        words = "without all of these methods, or with several metrics: excluded."
        notes.append(f"{counted(lost, 'problem')} {words}")
    if few := [method for method in every if method not in methods]:
        notes.append(f"Not ranked, with too few problems: {', '.join(few)}.")
    if names := [methods[place] for place in np.flatnonzero(diverged.any(axis=0))]:
        notes.append(f"If a seed diverged ({', '.join(names)}), the method is last on the problem.")
    none = np.zeros((2, len(methods)))
    table = Standings(tuple(methods), tuple(common), scores, diverged, none[0], none)
    by_set = table.by_set(ranks(scores))
    order = np.argsort(by_set.mean(0), kind="stable")
    return replace(
        table,
        methods=tuple(methods[place] for place in order),
        scores=scores[:, order],
        diverged=diverged[:, order],
        mean_ranks=by_set.mean(0)[order],
        intervals=bootstrap(by_set)[:, order].clip(1, len(methods)),
        excluded=lost,
        notes=tuple(notes),
    )


def bootstrap(by_set: np.ndarray) -> np.ndarray:
    """Return the 95% bootstrap interval of each method's mean over n sets, (2, methods).

    A percentile interval of few values is too narrow. The factor sqrt(n / (n - 1)) t / z widens it,
    where t and z are the quantiles of Student's and of the normal distribution.
    """
    sets, mean = len(by_set), by_set.mean(0)
    draws = np.random.default_rng(0).integers(sets, size=(DRAWS, sets))
    ends = np.percentile(by_set[draws].mean(1), [2.5, 97.5], axis=0)
    tails = [float(one.ppf(0.975)) for one in (stats.t(sets - 1), stats.norm())]
    wider = math.sqrt(sets / (sets - 1)) * tails[0] / tails[1] if sets > 1 else 1.0
    return np.asarray(mean + wider * (ends - mean))


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
    halves, costs = dict[str, Mapping[str, float]](), method_costs()
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
        plain = all(row.settings == "" for row in own)  # costs.toml is about defaults
        numbers.append(f"{costs[method] / costs[BASE]:.1f}" if plain and method in costs else DASH)
        lines.append([method, *numbers])
    names = ["method", "mean rank", "95 % interval", *halves, "mean score", "MB/round", "time"]
    words = f"{counted(len(found.problems), 'problem')} (set and partition) of "
    words += f"{counted(found.sets, 'set')}."
    notes = list(found.notes)
    if any(line[-1] != DASH for line in lines):
        notes.insert(0, f"time: CPU time of 100 rounds on Cora, as a multiple of {BASE}'s.")
    else:
        names, lines = names[:-1], [line[:-1] for line in lines]
    return make_table(names, lines, title="Mean ranks", notes=[words, *notes])


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
    if found is None or not (tests := found.comparisons(reference)):
        return None
    lines = []
    for test in sorted(tests, key=lambda test: math.inf if test.points is None else -test.points):
        size, low, high = (
            DASH if one is None else f"{100 * one:+.1f}".replace("-", "−")
            for one in (test.points, *test.ends)
        )
        ends = DASH if test.points is None or found.sets < 2 else f"{low} to {high}"
        each = [f"{p:.3f}" if p >= 0.001 else "< 0.001" for p in (test.by_problem, test.by_set)]
        verdict = {1: "better", 0: "≈", -1: "worse"}[test.sign]
        lines.append([test.name, size, ends, f"{test.wins}/{test.losses}", *each, verdict])
    names = ["method", "points", "95 % interval", "wins/losses", "p", "p (sets)", "verdict"]
    sizes = f"{counted(len(found.problems), 'problem')} of {counted(found.sets, 'set')}"
    notes = [
        f"Points of a method minus the points of {reference}: means over sets ({sizes}).",
        "The interval of the points is over sets, for one comparison.",
        "p: Wilcoxon's test over problems, Holm-corrected.",
        "p (sets): a test that counts each set once, because problems of one set are alike.",
        f"≈: not distinguishable from {reference}, because a p is at least {ALPHA}.",
    ]
    if found.sets < FEWEST:
        notes.append(f"With fewer than {FEWEST} sets, p (sets) is never below {ALPHA}.")
    return make_table(names, lines, title=f"Against {reference}", notes=notes)


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
