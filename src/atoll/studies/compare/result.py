"""The result of a comparison: tables, tests, sentences, and the files that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.core.files import write_atomically
from atoll.present.files import plain_json
from atoll.present.tables import Table, csv_text
from atoll.present.terminal import noted_table, plain_text
from atoll.studies.compare.findings import sentences
from atoll.studies.compare.printed import (
    caption,
    comparison_latex,
    comparison_markdown,
    csv_table,
    printed_tables,
)
from atoll.studies.compare.tables import ComparisonTable, compare_overall, compare_runs
from atoll.studies.study_run import Json, RunOutcome


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`.

    Attributes:
        tables: One per problem.
        overall: Over all problems; None if there is only one.
        alpha: Chance of a false alarm that the tests allow.
        cells: One row per run and seed, for `to_csv`.
        failed: Runs that failed, with their sentences.
        asked: The request.
        folder: Where the study is; None if it was not saved.
    """

    tables: tuple[ComparisonTable, ...]
    overall: ComparisonTable | None
    alpha: float
    cells: tuple[Mapping[str, object], ...]
    failed: Mapping[str, str]
    asked: Json
    folder: Path | None

    def __repr__(self) -> str:
        return plain_text(*map(noted_table, self.printed()), self.caption)

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def markdown(self) -> str:
        """The tables with their findings."""
        return comparison_markdown(tuple(self), self.alpha, self.asked["against"])

    def latex(self) -> str:
        """One table for a paper: methods as rows, problems as columns."""
        return comparison_latex(self.tables, self.overall, self.alpha, self.asked["against"])

    def __iter__(self) -> Iterator[ComparisonTable]:
        """The tables, the one over all last."""
        return iter((*self.tables, *([self.overall] if self.overall else [])))

    @property
    def caption(self) -> str:
        """How to read the printed tables."""
        return caption(tuple(self), self.asked["against"])

    def printed(self) -> list[Table]:
        """The tables as they are printed, each with its findings as notes."""
        return printed_tables(self, self.alpha)

    def table(self) -> list[Json]:
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

    def tests(self) -> list[Json]:
        """One mapping per problem and comparison with the reference; data is None over all."""
        return [
            {"data": table.data or None, "clients": table.clients, **asdict(test), "p": test.p}
            for table in self
            for test in table.tests
        ]

    def sentences(self) -> list[str]:
        """Which differences are significant and which are noise, in plain words."""
        return [text for table in self for text in sentences(table, self.alpha)]

    def summary(self) -> Json:
        """The object that `--json` prints."""
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
        """One row per run and seed."""
        return _write(csv_text(csv_table(self.cells)), path)

    def to_markdown(self, path: str | Path) -> Path:
        """The tables with their findings, in Markdown."""
        return _write(self.markdown(), path)

    def to_tex(self, path: str | Path) -> Path:
        """One LaTeX table: methods as rows, problems as columns."""
        return _write(self.latex(), path)


def _write(text: str, path: str | Path) -> Path:
    write_atomically(Path(path), text.encode())
    return Path(path)


def make_comparison(
    outcomes: Sequence[RunOutcome],
    *,
    methods: Sequence[str],
    against: str | None,
    metric: str | None,
    alpha: float,
    folder: Path | None,
    asked: Json,
) -> Comparison:
    """Tables and tests of the runs that finished, sentences of those that failed."""
    problems = compare_runs(outcomes, methods, against, metric, alpha)
    tables = tuple(problem.table for problem in problems)
    return Comparison(
        tables,
        compare_overall(tables, against, alpha) if len(tables) > 1 else None,
        alpha,
        tuple(line for problem in problems for line in problem.lines),
        {o.run.name: o.error for o in outcomes if o.error is not None},
        asked,
        folder,
    )
