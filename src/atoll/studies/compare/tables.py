"""From finished cells to tables: means, ranks, costs and tests, problem by problem and over all.

Test scores are read once, after validation scores have chosen each grid's winner; the test scores
of other points appear nowhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.engines.ledger import SCORE
from atoll.experiment.baseline import KINDS
from atoll.experiment.metrics import spread
from atoll.studies.compare.statistics import PairedTest, RankTest, against, rank_test, ranks
from atoll.studies.study_run import Json, RunOutcome


@dataclass(frozen=True)
class ComparedRow:
    """One method in one table.

    Attributes:
        method: The arm's label.
        scores: Test scores, one per block (seed, or seed of each problem), (B,); NaN if it failed.
        mean: Of the scores.
        std: Over seeds; None for one.
        rank: Mean rank over blocks, among the methods that finished; 1 is best.
        megabytes: What training moved in a round, up and down.
        seconds: Of the median round.
        scored: The model behind the scores: "global", "personalised", "local", or one of a
            baseline's `KINDS`.
        validation: Mean validation score; NaN where there is none.
        point: What validation chose from the grid.
        points: How many points the grid has; 1 without a grid.
        error: One sentence if it, or a point of its grid, failed.
    """

    method: str
    scores: np.ndarray
    mean: float = math.nan
    std: float | None = None
    rank: float = math.nan
    megabytes: float = math.nan
    seconds: float = math.nan
    scored: str = ""
    validation: float = math.nan
    point: Mapping[str, object] = field(default_factory=dict)
    points: int = 1
    error: str | None = None

    @property
    def finished(self) -> bool:
        return math.isfinite(self.mean)

    @property
    def marked(self) -> str:
        """The method's name; that of a baseline says that it is not federated."""
        return f"{self.method} ({self.scored})" if self.scored in KINDS else self.method

    @property
    def label(self) -> str:
        """The method with the point of the grid that was chosen."""
        point = " ".join(f"{key}={value}" for key, value in self.point.items())
        return f"{self.method} ({point})" if point else self.marked


@dataclass(frozen=True)
class ComparisonTable:
    """All methods on one problem, or over all of them.

    Attributes:
        data: The problem's name; "" over all.
        clients: Its number of clients.
        metric: What the scores are.
        seeds: How many.
        problems: How many blocks each seed has: 1 but for the table over all.
        about: Partition, split, protocol and rounds.
        rows: One per method.
        reference: The method that the others are tested against; None if there is none.
        tests: Each other method against the reference.
        rank_test: All at once; None with too few blocks or methods.
    """

    data: str
    clients: int | None
    metric: str
    seeds: int
    problems: int
    about: Json
    rows: tuple[ComparedRow, ...]
    reference: str | None
    tests: tuple[PairedTest, ...]
    rank_test: RankTest | None

    @property
    def best(self) -> list[str]:
        """The method with the highest mean, and those that have exactly the same."""
        means = [row.mean for row in self.rows if row.finished]
        return [row.method for row in self.rows if row.finished and row.mean >= max(means) - 1e-12]

    def test_of(self, method: str) -> PairedTest | None:
        return next((test for test in self.tests if test.name == method), None)


@dataclass(frozen=True)
class ComparedProblem:
    """One problem of a comparison: its table, and its lines of compare.csv."""

    table: ComparisonTable
    lines: list[Json]


def compare_runs(
    outcomes: Sequence[RunOutcome],
    methods: Sequence[str],
    against: str | None,
    metric: str | None,
    alpha: float,
) -> list[ComparedProblem]:
    """A table for each problem, in the order of the runs."""
    groups = itertools.groupby(outcomes, lambda o: (o.run.labels["data"], o.run.labels["clients"]))
    return [
        _compare_problem(*problem, list(members), methods, against, metric, alpha)
        for problem, members in groups
    ]


def _compare_problem(
    data: str,
    clients: int | None,
    group: Sequence[RunOutcome],
    methods: Sequence[str],
    against: str | None,
    metric: str | None,
    alpha: float,
) -> ComparedProblem:
    summaries = [one.summary for one in group if one.summary is not None]
    chosen = _metric(metric, summaries)
    picked = {
        name: _pick([o for o in group if o.run.labels["method"] == name], chosen)
        for name in methods
    }
    rows = _same_clients([_row(name, *picked[name], chosen) for name in methods], picked)
    # A baseline has no rounds, so that a method describes the problem if there is one.
    federated = [one for one in summaries if one["scored"] not in KINDS]
    shown = next(iter(federated or summaries), None)
    about = {
        key: shown[key] if shown else None for key in ("partition", "split", "protocol", "rounds")
    }
    known = shown["clients"] if shown else clients
    seeds = group[0].run.config.seeds
    table = _tested(data, known, chosen, seeds, 1, about, rows, against, alpha)
    winners = {id(winner) for winner, _ in picked.values()}
    lines = [
        line
        for outcome in group
        for line in _lines(outcome, chosen, known, winner=id(outcome) in winners)
    ]
    return ComparedProblem(table, lines)


def _metric(asked: str | None, summaries: Sequence[Json]) -> str:
    """What was asked for, else what the data are scored by, where it is defined."""
    if asked is not None:
        return asked
    own = {s["metric"] if f"test_{s['metric']}" in s["metrics"] else "accuracy" for s in summaries}
    return own.pop() if len(own) == 1 else "accuracy"


def _pick(
    outcomes: Sequence[RunOutcome], metric: str
) -> tuple[RunOutcome | None, list[RunOutcome]]:
    """The point with the best mean validation score, the first of equals; and all of them."""
    finished = [one for one in outcomes if one.summary is not None]
    if len(outcomes) > 1:
        finished = [one for one in finished if math.isfinite(_validation(one, metric))]
    best = max(finished, key=lambda one: _validation(one, metric), default=None)
    return best, list(outcomes)


def _validation(outcome: RunOutcome, metric: str) -> float:
    assert outcome.summary is not None
    found = outcome.summary["metrics"].get(f"val_{metric}")
    return math.nan if found is None else float(found["mean"])


def _row(
    name: str, winner: RunOutcome | None, outcomes: Sequence[RunOutcome], metric: str
) -> ComparedRow:
    seeds, points = outcomes[0].run.config.seeds, len(outcomes)
    errors = [one.error for one in outcomes if one.error is not None]
    error = errors[0] if errors else None
    if errors and points > 1:
        error = f"{len(errors)} of {points} points failed: {errors[0]}"
    nothing = np.full(seeds, math.nan)
    if winner is None or winner.summary is None:
        error = error or f"no validation {metric}, which would choose the point of the grid"
        return ComparedRow(name, nothing, points=points, error=error)
    found = winner.summary["metrics"].get(f"test_{metric}", {"per_seed": []})["per_seed"]
    if len(found) < seeds:
        error = f"its test {metric} is not defined for every seed"
        return ComparedRow(name, nothing, points=points, error=error)
    scores = np.array(found, dtype=float)
    rounds = (winner.summary["rounds"] or 1) * winner.summary["seeds"]
    return ComparedRow(
        name,
        scores,
        float(scores.mean()),
        spread(scores),
        math.nan,
        sum(winner.summary["bytes"].values()) / rounds / 1e6,
        winner.summary["seconds"]["per_round"],
        winner.summary["scored"],
        _validation(winner, metric),
        winner.run.labels["point"],
        points,
        error,
    )


def _same_clients(
    rows: list[ComparedRow], picked: Mapping[str, tuple[RunOutcome | None, list[RunOutcome]]]
) -> list[ComparedRow]:
    """Drop a row whose clients are not the first one's: its data changed in between."""
    first: dict[str, bytes] | None = None
    checked = []
    for row in rows:
        winner = picked[row.method][0]
        if winner is None or not row.finished:
            checked.append(row)
            continue
        files = sorted(winner.folder.glob("seed-*/partition.npz"))
        clients = {path.parent.name: path.read_bytes() for path in files}
        first = clients if first is None else first
        if clients == first:
            checked.append(row)
        else:
            error = "its clients are not those of the other methods: the data have changed since"
            checked.append(ComparedRow(row.method, np.full_like(row.scores, math.nan), error=error))
    return checked


def _tested(
    data: str,
    clients: int | None,
    metric: str,
    seeds: int,
    problems: int,
    about: Json,
    rows: Sequence[ComparedRow],
    wanted: str | None,
    alpha: float,
) -> ComparisonTable:
    """Ranks and tests of the rows that have all scores."""
    there = [row for row in rows if row.finished]
    scores = {row.method: row.scores for row in there}
    best = max(there, key=lambda row: row.mean, default=None)
    reference = best.method if best is not None and wanted is None else wanted
    tests = against(reference, scores, alpha) if reference in scores else []
    stacked = np.stack(list(scores.values()), axis=1) if scores else np.empty((0, 0))
    placed = ranks(stacked).mean(0) if scores else []
    rank_of = dict(zip(scores, placed, strict=True))
    ranked = tuple(replace(row, rank=float(rank_of.get(row.method, math.nan))) for row in rows)
    return ComparisonTable(
        data,
        clients,
        metric,
        seeds,
        problems,
        about,
        ranked,
        reference if reference in scores else None,
        tuple(tests),
        rank_test(stacked, alpha),
    )


def compare_overall(
    tables: Sequence[ComparisonTable], wanted: str | None, alpha: float
) -> ComparisonTable:
    """Methods over all problems: those that finished on each of them."""
    rows = []
    for position, first in enumerate(tables[0].rows):
        own = [table.rows[position] for table in tables]
        scores = np.concatenate([row.scores for row in own])
        lost = sum(not row.finished for row in own)
        if lost:
            error = f"failed on {lost} of {len(tables)} problems"
            rows.append(ComparedRow(first.method, np.full_like(scores, math.nan), error=error))
            continue
        by_seed = np.mean([row.scores for row in own], axis=0)
        rows.append(
            ComparedRow(
                first.method,
                scores,
                float(by_seed.mean()),
                spread(by_seed),
                megabytes=float(np.mean([row.megabytes for row in own])),
                seconds=float(np.mean([row.seconds for row in own])),
                scored=first.scored,
                validation=float(np.mean([row.validation for row in own])),
                points=first.points,
            )
        )
    metrics = {table.metric for table in tables}
    metric = metrics.pop() if len(metrics) == 1 else "score"
    return _tested("", None, metric, tables[0].seeds, len(tables), {}, rows, wanted, alpha)


def _lines(outcome: RunOutcome, metric: str, clients: int | None, *, winner: bool) -> list[Json]:
    """A cell in compare.csv: one line per seed; a failed one has one line."""
    labels, config = outcome.run.labels, outcome.run.config
    point = " ".join(f"{key}={value}" for key, value in labels["point"].items())
    start = {
        "cell": outcome.run.name,
        "data": labels["data"],
        "clients": clients,
        "method": labels["method"],
        "point": point,
        "chosen": int(winner),
    }
    if outcome.summary is None:
        return [{**start, "error": outcome.error}]
    summary = outcome.summary
    metrics, rounds = summary["metrics"], summary["rounds"] or 1

    def of_seed(role: str, number: int) -> float | None:
        found = metrics.get(f"{role}_{metric}", {"per_seed": []})["per_seed"]
        return found[number] if len(found) == config.seeds else None

    rows = []
    for number in range(config.seeds):
        seed = config.seed + number
        steps = [row for step, row in summary["ledger"][str(seed)].items() if step != SCORE]
        rows.append(
            {
                **start,
                "seed": seed,
                "metric": metric,
                "scored": summary["scored"],
                "validation": of_seed("val", number),
                "test": of_seed("test", number) if winner else None,
                "bytes_per_round": sum(step["up"] + step["down"] for step in steps) / rounds,
                "seconds_per_round": summary["seconds"]["per_round"],
            }
        )
    return rows
