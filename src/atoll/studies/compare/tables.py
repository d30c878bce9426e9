"""Tables of finished runs: means, ranks, costs and tests, for each problem and over all.

Test scores are read once, after validation scores have selected the winner of each grid. The test
scores of other points are never shown.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

import numpy as np

from atoll.engines.ledger import SCORE
from atoll.experiment.baseline import KINDS, POOLED
from atoll.experiment.metrics import spread
from atoll.nn import NETS
from atoll.studies.compare.plan import ComparisonRequest, problem_of
from atoll.studies.compare.statistics import PairedTest, RankTest, against, rank_test, ranks
from atoll.studies.study_run import Json, RunOutcome

CHANGED = "its clients differ from the other methods' clients: the data have changed since"


@dataclass(frozen=True)
class ComparedRow:
    """One method in one table."""

    method: str  # the arm's label
    scores: np.ndarray  # test scores, one per block (seed of each problem); NaN if it failed
    mean: float = math.nan
    std: float | None = None  # over seeds, or None for one seed
    rank: float = math.nan  # mean rank over blocks, among the finished methods; 1 is best
    megabytes: float = math.nan  # training traffic per round, up and down
    seconds: float = math.nan  # of the median round
    scored: str = ""  # the evaluated model: "global", "personalised", "local", or a baseline's kind
    network: str = ""  # as in `--set net=NAME`; "" if it has none
    validation: float = math.nan  # mean validation score, or NaN if missing
    point: Mapping[str, object] = field(default_factory=dict)  # selected by validation
    points: int = 1  # size of the grid; 1 without a grid
    error: str | None = None  # the error if it, or a point of its grid, failed

    @property
    def finished(self) -> bool:
        return math.isfinite(self.mean)

    @property
    def marked(self) -> str:
        """The method's label, followed by its kind in brackets if it is a baseline."""
        return f"{self.method} ({self.scored})" if self.scored in KINDS else self.method

    @property
    def label(self) -> str:
        """The method with the selected grid point."""
        return f"{self.method} ({settings_text(self.point)})" if self.point else self.marked


@dataclass(frozen=True)
class ComparisonTable:
    """All methods on one problem, or over all problems."""

    data: str  # the problem's name; "" over all
    clients: int | None  # its number of clients
    metric: str  # name of the metric
    seeds: int
    rows: tuple[ComparedRow, ...]
    problems: int = 1  # blocks per seed: 1, except in the table over all problems
    about: Json = field(default_factory=dict)  # partition, split, protocol, rounds, positive_class
    reference: str | None = None  # the reference method of the tests
    tests: tuple[PairedTest, ...] = ()  # each other method against the reference
    rank_test: RankTest | None = None  # of all methods, or None with too few blocks or methods

    @property
    def best(self) -> list[str]:
        """The methods with the highest mean. Rows with pooled data count only if all rows pool."""
        rows = _candidates(self.rows)
        return [one.method for one in rows if one.mean >= max(row.mean for row in rows) - 1e-12]

    def test_of(self, method: str) -> PairedTest | None:
        return next((test for test in self.tests if test.name == method), None)


def settings_text(settings: Mapping[str, object]) -> str:
    """Format settings: `mu=0.1 lr=0.01`."""
    return " ".join(f"{key}={value}" for key, value in settings.items())


def compare_problem(
    group: Sequence[RunOutcome], request: ComparisonRequest
) -> tuple[ComparisonTable, list[Json]]:
    """Make the table of one problem from its runs, and its lines of compare.csv."""
    data, clients = problem_of(group[0].run)
    summaries = [one.summary for one in group if one.summary is not None]
    # Use the metric of the data if it is defined.
    own = {s["metric"] if f"test_{s['metric']}" in s["metrics"] else "accuracy" for s in summaries}
    metric = request.metric or (own.pop() if len(own) == 1 else "accuracy")
    points: dict[str, list[RunOutcome]] = {name: [] for name in request.methods}
    for outcome in group:
        points[outcome.run.labels["method"]].append(outcome)
    winners = {name: _winner(outcomes, metric) for name, outcomes in points.items()}
    rows = [_row(name, winners[name], points[name], metric) for name in points]
    # A baseline has no rounds, so a method describes the problem if possible.
    federated = [one for one in summaries if one["scored"] not in KINDS]
    shown = next(iter(federated or summaries), None)
    keys = ("partition", "split", "protocol", "rounds", "positive_class")
    about = {key: shown and shown.get(key) for key in keys}
    clients = shown["clients"] if shown else clients
    seeds, same = group[0].run.config.seeds, _same_clients(rows, winners)
    table = ComparisonTable(data, clients, metric, seeds, same, about=about)
    chosen = list(winners.values())
    lines = [_lines(one, metric, clients, winner=any(one is w for w in chosen)) for one in group]
    return _with_tests(table, request), list(itertools.chain(*lines))


def _winner(outcomes: Sequence[RunOutcome], metric: str) -> RunOutcome | None:
    """Return the finished point with the best validation score, the first of equals, or None."""
    finished = [one for one in outcomes if one.summary is not None]
    if len(outcomes) > 1:
        finished = [one for one in finished if math.isfinite(_validation(one, metric))]
    return max(finished, key=lambda one: _validation(one, metric), default=None)


def _validation(outcome: RunOutcome, metric: str) -> float:
    assert outcome.summary is not None
    found = outcome.summary["metrics"].get(f"val_{metric}")
    return math.nan if found is None else float(found["mean"])


def _row(
    name: str, winner: RunOutcome | None, outcomes: Sequence[RunOutcome], metric: str
) -> ComparedRow:
    seeds, points = outcomes[0].run.config.seeds, len(outcomes)
    errors = [one.error for one in outcomes if one.error is not None]
    several = f"{len(errors)} of {points} points failed: " if points > 1 else ""
    error = f"{several}{errors[0]}" if errors else None
    empty = ComparedRow(name, np.full(seeds, math.nan), points=points, error=error)
    if winner is None or (summary := winner.summary) is None:
        reason = f"no validation {metric}, which would select the grid point"
        return replace(empty, error=error or reason)
    found = summary["metrics"].get(f"test_{metric}", {"per_seed": []})["per_seed"]
    if len(found) < seeds:
        return replace(empty, error=f"its test {metric} is not defined for every seed")
    scores, rounds = np.array(found, dtype=float), (summary["rounds"] or 1) * summary["seeds"]
    costs: Json = {"seconds": summary["seconds"]["per_round"]}
    costs["megabytes"] = sum(summary["bytes"].values()) / rounds / 1e6
    about: Json = {"scored": summary["scored"], "point": winner.run.labels["point"]}
    about["network"] = _network(winner)
    about |= {"validation": _validation(winner, metric), "std": spread(scores)}
    return replace(empty, scores=scores, mean=float(scores.mean()), **costs, **about)


def _network(outcome: RunOutcome) -> str:
    """Return the name of a run's network, whose class is in the description of its model."""
    models = sorted(outcome.folder.glob("model/seed-*/model.toml"))
    made = tomllib.loads(models[0].read_text()).get("net", "") if models else ""
    return next((name for name, kind in NETS.items() if kind.__name__ == made), str(made))


def _same_clients(
    rows: Sequence[ComparedRow], winners: Mapping[str, RunOutcome | None]
) -> tuple[ComparedRow, ...]:
    """Mark a row as failed if its clients differ from the first row's, because the data changed."""
    clients = {}
    for row in rows:
        if row.finished and (winner := winners[row.method]):
            files = sorted(winner.folder.glob("seed-*/partition.npz"))
            clients[row.method] = [(f.parent.name, sha256(f.read_bytes()).digest()) for f in files]
    first = next(iter(clients.values()), [])
    same = [clients.get(row.method, first) == first for row in rows]
    return tuple(r if ok else _failed(r, CHANGED) for r, ok in zip(rows, same, strict=True))


def _failed(row: ComparedRow, error: str) -> ComparedRow:
    return ComparedRow(row.method, np.full_like(row.scores, math.nan), error=error)


def _with_tests(table: ComparisonTable, request: ComparisonRequest) -> ComparisonTable:
    """Add ranks and tests of the rows that have all scores."""
    finished = [row for row in table.rows if row.finished]
    scores = {row.method: row.scores for row in finished}
    best = max(_candidates(table.rows), key=lambda row: row.mean, default=None)
    reference = best.method if best is not None and request.against is None else request.against
    stacked = np.stack(list(scores.values()), axis=1) if scores else np.empty((0, 0))
    places = dict(zip(scores, ranks(stacked).mean(0) if scores else [], strict=True))
    return replace(
        table,
        rows=tuple(replace(r, rank=float(places.get(r.method, math.nan))) for r in table.rows),
        reference=reference if reference in scores else None,
        tests=tuple(against(reference, scores, request.alpha) if reference in scores else []),
        rank_test=rank_test(stacked, request.alpha),
    )


def _candidates(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """Return finished rows that can be best: rows with pooled data only if there are no others."""
    finished = [row for row in rows if row.finished]
    return [row for row in finished if row.scored != POOLED] or finished


def compare_overall(
    tables: Sequence[ComparisonTable], request: ComparisonRequest
) -> ComparisonTable:
    """Compare the methods over all problems. A method that failed on one of them has no score."""
    rows = []
    for own in zip(*(table.rows for table in tables), strict=True):
        row = ComparedRow(own[0].method, np.concatenate([one.scores for one in own]))
        if lost := sum(not one.finished for one in own):
            rows.append(_failed(row, f"failed on {lost} of {len(tables)} problems"))
            continue
        by_seed = np.mean([one.scores for one in own], 0)
        found: Json = {"mean": float(by_seed.mean()), "std": spread(by_seed)}
        for name in ("megabytes", "seconds", "validation"):
            found[name] = float(np.mean([getattr(one, name) for one in own]))
        found |= {name: getattr(own[0], name) for name in ("scored", "network", "points")}
        rows.append(replace(row, **found))
    metric = tables[0].metric if len({table.metric for table in tables}) == 1 else "score"
    overall = ComparisonTable("", None, metric, tables[0].seeds, tuple(rows), len(tables))
    return _with_tests(overall, request)


def _lines(outcome: RunOutcome, metric: str, clients: int | None, *, winner: bool) -> list[Json]:
    """Return the lines of a run in compare.csv: one per seed, or one for a failed run."""
    labels, config, summary = outcome.run.labels, outcome.run.config, outcome.summary
    start: Json = {"cell": outcome.run.name, "data": labels["data"], "clients": clients}
    start |= {"method": labels["method"], "point": settings_text(labels["point"])}
    start["chosen"] = int(winner)
    if summary is None:
        return [{**start, "error": outcome.error}]
    rounds = summary["rounds"] or 1

    def of_seed(role: str, number: int) -> float | None:
        found = summary["metrics"].get(f"{role}_{metric}", {"per_seed": []})["per_seed"]
        return found[number] if len(found) == config.seeds else None

    rows = []
    for number in range(config.seeds):
        seed = config.seed + number
        steps = [row for step, row in summary["ledger"][str(seed)].items() if step != SCORE]
        line = {**start, "seed": seed, "metric": metric, "scored": summary["scored"]}
        line["validation"] = of_seed("val", number)
        line["test"] = of_seed("test", number) if winner else None
        line["bytes_per_round"] = sum(step["up"] + step["down"] for step in steps) / rounds
        line["seconds_per_round"] = summary["seconds"]["per_round"]
        rows.append(line)
    return rows
