"""From finished cells to tables: means, ranks, costs and tests, problem by problem and over all.

Test scores are read once, after validation scores have chosen each grid's winner; the test scores
of other points appear nowhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.engines.ledger import SCORE
from atoll.experiment.metrics import spread
from atoll.present.plots import plain_json
from atoll.studies.compare.statistics import PairedTest, RankTest, against, rank_test, ranks
from atoll.studies.study import Outcome

METRICS = ("accuracy", "macro_f1", "weighted_f1", "auc")


@dataclass(frozen=True)
class Row:
    """One method in one table.

    Attributes:
        method: The arm's label.
        scores: Test scores, one per block (seed, or seed of each problem), (B,); NaN if it failed.
        mean: Of the scores.
        std: Over seeds; None for one.
        rank: Mean rank over blocks, among the methods that finished; 1 is best.
        megabytes: What training moved in a round, up and down.
        seconds: Of the median round.
        scored: The model behind the scores: "global", "personalised" or "local".
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
    point: Mapping[str, Any] = field(default_factory=dict)
    points: int = 1
    error: str | None = None

    @property
    def finished(self) -> bool:
        return math.isfinite(self.mean)


@dataclass(frozen=True)
class Table:
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
    about: Mapping[str, Any]
    rows: tuple[Row, ...]
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


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `compare` found.

    Attributes:
        tables: One per problem.
        overall: Over all problems; None if there is only one.
        alpha: Chance of a false alarm that the tests allow.
        cells: One row per cell and seed, for `to_csv`.
        failed: Cells that failed, with their sentences.
        asked: The request.
        folder: Where the study is; None if it was not saved.
    """

    tables: tuple[Table, ...]
    overall: Table | None
    alpha: float
    cells: tuple[Mapping[str, Any], ...]
    failed: Mapping[str, str]
    asked: Mapping[str, Any]
    folder: Path | None

    def __repr__(self) -> str:
        from atoll.studies.compare.show import plain_text

        return plain_text(self)

    def _repr_markdown_(self) -> str:
        from atoll.studies.compare.show import markdown

        return markdown(self)

    def __iter__(self) -> Iterator[Table]:
        """The tables, the one over all last."""
        return iter((*self.tables, *([self.overall] if self.overall else [])))

    def table(self) -> list[dict[str, Any]]:
        """One mapping per problem and method; data is None over all problems."""
        return [
            {
                "data": table.data or None,
                "clients": table.clients,
                "metric": table.metric,
                **asdict(row),
                "scores": row.scores.tolist(),
                "point": dict(row.point),
                "best": row.method in table.best,
            }
            for table in self
            for row in table.rows
        ]

    def tests(self) -> list[dict[str, Any]]:
        """One mapping per problem and comparison with the reference; data is None over all."""
        return [
            {"data": table.data or None, "clients": table.clients, **asdict(test), "p": test.p}
            for table in self
            for test in table.tests
        ]

    def sentences(self) -> list[str]:
        """What can be told apart and what is noise, in plain words."""
        from atoll.studies.compare.findings import sentences

        return [text for table in self for text in sentences(table, self.alpha)]

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        from atoll.studies.compare.findings import sentences

        tables = [
            {
                "data": table.data or None,
                "clients": table.clients,
                "metric": table.metric,
                "seeds": table.seeds,
                **table.about,
                "reference": table.reference,
                "rows": [
                    {**asdict(row), "point": dict(row.point), "best": row.method in table.best}
                    for row in table.rows
                ],
                "tests": [{**asdict(test), "p": test.p} for test in table.tests],
                "ranks": None if table.rank_test is None else asdict(table.rank_test),
                "sentences": sentences(table, self.alpha),
            }
            for table in self
        ]
        whole = {
            "kind": "compare",
            "methods": list(self.asked["methods"]),
            "alpha": self.alpha,
            "tables": tables[: len(self.tables)],
            "overall": tables[-1] if self.overall else None,
            "cells": len({row["cell"] for row in self.cells}),
            "failed": dict(self.failed),
            "out": None if self.folder is None else str(self.folder),
        }
        return dict(plain_json(whole))

    def to_csv(self, path: str | Path) -> Path:
        """One row per cell and seed."""
        from atoll.studies.compare.show import write_csv

        return write_csv(self, Path(path))

    def to_markdown(self, path: str | Path) -> Path:
        """The tables and what they say, in Markdown."""
        from atoll.studies.compare.show import markdown, write_text

        return write_text(markdown(self), Path(path))

    def to_tex(self, path: str | Path) -> Path:
        """One LaTeX table: methods as rows, problems as columns."""
        from atoll.studies.compare.show import latex, write_text

        return write_text(latex(self), Path(path))


def make_comparison(
    outcomes: Sequence[Outcome],
    *,
    methods: Sequence[str],
    against: str | None,
    metric: str | None,
    alpha: float,
    folder: Path | None,
    asked: Mapping[str, Any],
) -> Comparison:
    """Tables and tests of the cells that finished, sentences of those that failed."""
    tables, lines = [], []
    groups = itertools.groupby(
        outcomes, lambda o: (o.cell.labels["data"], o.cell.labels["clients"])
    )
    for (data, clients), members in groups:
        group = list(members)
        summaries = [one.summary for one in group if one.summary is not None]
        chosen = _metric(metric, summaries)
        picked = {
            name: _pick([o for o in group if o.cell.labels["method"] == name], chosen)
            for name in methods
        }
        rows = _same_clients([_row(name, *picked[name], chosen) for name in methods], picked)
        about = {
            key: summaries[0][key] if summaries else None
            for key in ("partition", "split", "protocol", "rounds")
        }
        seeds = group[0].cell.config.seeds
        known = summaries[0]["clients"] if summaries else clients
        problem = (data, known, chosen, seeds, 1, about)
        tables.append(_tested(*problem, rows, against, alpha))
        winners = {id(winner) for winner, _ in picked.values()}
        for outcome in group:
            lines += _lines(outcome, chosen, known, winner=id(outcome) in winners)
    overall = _overall(tables, against, alpha) if len(tables) > 1 else None
    failed = {o.cell.name: o.error for o in outcomes if o.error is not None}
    return Comparison(tuple(tables), overall, alpha, tuple(lines), failed, asked, folder)


def _metric(asked: str | None, summaries: Sequence[Mapping[str, Any]]) -> str:
    """What was asked for, else what the data are scored by, where it is defined."""
    if asked is not None:
        return asked
    own = {s["metric"] if f"test_{s['metric']}" in s["metrics"] else "accuracy" for s in summaries}
    return own.pop() if len(own) == 1 else "accuracy"


def _pick(outcomes: Sequence[Outcome], metric: str) -> tuple[Outcome | None, list[Outcome]]:
    """The point with the best mean validation score, the first of equals; and all of them."""
    finished = [one for one in outcomes if one.summary is not None]
    if len(outcomes) > 1:
        finished = [one for one in finished if math.isfinite(_validation(one, metric))]
    best = max(finished, key=lambda one: _validation(one, metric), default=None)
    return best, list(outcomes)


def _validation(outcome: Outcome, metric: str) -> float:
    assert outcome.summary is not None
    found = outcome.summary["metrics"].get(f"val_{metric}")
    return math.nan if found is None else float(found["mean"])


def _row(name: str, winner: Outcome | None, outcomes: Sequence[Outcome], metric: str) -> Row:
    seeds, points = outcomes[0].cell.config.seeds, len(outcomes)
    errors = [one.error for one in outcomes if one.error is not None]
    error = errors[0] if errors else None
    if errors and points > 1:
        error = f"{len(errors)} of {points} points failed: {errors[0]}"
    nothing = np.full(seeds, math.nan)
    if winner is None or winner.summary is None:
        error = error or f"no validation {metric}, which would choose the point of the grid"
        return Row(name, nothing, points=points, error=error)
    found = winner.summary["metrics"].get(f"test_{metric}", {"per_seed": []})["per_seed"]
    if len(found) < seeds:
        error = f"its test {metric} is not defined for every seed"
        return Row(name, nothing, points=points, error=error)
    scores = np.array(found, dtype=float)
    rounds = (winner.summary["rounds"] or 1) * winner.summary["seeds"]
    return Row(
        name,
        scores,
        float(scores.mean()),
        spread(scores),
        math.nan,
        sum(winner.summary["bytes"].values()) / rounds / 1e6,
        winner.summary["seconds"]["per_round"],
        winner.summary["scored"],
        _validation(winner, metric),
        winner.cell.labels["point"],
        points,
        error,
    )


def _same_clients(
    rows: list[Row], picked: Mapping[str, tuple[Outcome | None, list[Outcome]]]
) -> list[Row]:
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
            checked.append(Row(row.method, np.full_like(row.scores, math.nan), error=error))
    return checked


def _tested(
    data: str,
    clients: int | None,
    metric: str,
    seeds: int,
    problems: int,
    about: Mapping[str, Any],
    rows: Sequence[Row],
    wanted: str | None,
    alpha: float,
) -> Table:
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
    return Table(
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


def _overall(tables: Sequence[Table], wanted: str | None, alpha: float) -> Table:
    """Methods over all problems: those that finished on each of them."""
    rows = []
    for position, first in enumerate(tables[0].rows):
        own = [table.rows[position] for table in tables]
        scores = np.concatenate([row.scores for row in own])
        lost = sum(not row.finished for row in own)
        if lost:
            error = f"failed on {lost} of {len(tables)} problems"
            rows.append(Row(first.method, np.full_like(scores, math.nan), error=error))
            continue
        by_seed = np.mean([row.scores for row in own], axis=0)
        rows.append(
            Row(
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


def _lines(
    outcome: Outcome, metric: str, clients: int | None, *, winner: bool
) -> list[dict[str, Any]]:
    """A cell in compare.csv: one line per seed; a failed one has one line."""
    labels, config = outcome.cell.labels, outcome.cell.config
    point = " ".join(f"{key}={value}" for key, value in labels["point"].items())
    start = {
        "cell": outcome.cell.name,
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
