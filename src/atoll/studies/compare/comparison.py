"""Several methods on the same clients and seeds: `atoll.compare`, its result and its files.

All arms share the seeds of a problem (`plan` defines both), and therefore its partitions, splits
and noise. An arm with a grid has one run per point, and only validation scores select its winner.

`study.json` contains "kind" ("compare"), "command" and "request" (`plan.ComparisonRequest`). The
labels of a run are data, clients (null: the data or the protocol decide), method (the arm's label)
and grid point. `compare.json`, `compare.csv` and `compare.md` appear when all runs have ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

import msgspec

from atoll.core.errors import ConfigError
from atoll.core.files import folder_of, write_atomically
from atoll.core.method import Method
from atoll.experiment.config import in_python, option_words
from atoll.experiment.folder import check_folder, read_json
from atoll.experiment.loggers import open_logs
from atoll.experiment.options import CompareOptions
from atoll.experiment.problem import Data, FederationCache
from atoll.present.files import plain_json
from atoll.present.notebook import with_progress
from atoll.present.tables import Table, csv_text, markdown, record_table
from atoll.present.terminal import noted_table, plain_text
from atoll.studies.compare import plan, printed
from atoll.studies.compare.plan import SEEDS, ComparisonRequest, Grid, Methods, Several
from atoll.studies.compare.statistics import ALPHA
from atoll.studies.compare.tables import ComparisonTable, compare_overall, compare_problem
from atoll.studies.study import run_study
from atoll.studies.study_run import Json, RunOutcome, StudyObserver


@with_progress
def compare(
    methods: Methods,
    data: Several = "lagoon",
    *,
    clients: int | Sequence[int] | None = None,
    seeds: int = SEEDS,
    grid: Grid | None = None,
    against: str | None = None,
    metric: str | None = None,
    alpha: float = ALPHA,
    out: str | Path | None = None,
    observer: StudyObserver | None = None,
    log: str | Sequence[str] = (),
    jobs: int | str = 1,
    **options: Unpack[CompareOptions],
) -> Comparison:
    """Run methods on the same partitions and seeds, and test whether they differ.

    Args:
        methods: Names of methods or baselines, with settings (`fedprox:mu=0.1`) and labels
            (`strong=fedprox:mu=1`), or objects. A mapping also gives them labels.
        data: One or several names, paths, results of `atoll.load`, or federations.
        clients: One or several numbers of clients.
        seeds: Number of seeds.
        grid: Values by hyper-parameter (`"mu"`, or `"fedprox:mu"`). Validation selects one.
        against: Label of the reference method of the tests. None takes the best method.
        metric: One of `experiment.metrics.COMPARED`, for the tests and the selected round. None
            takes the metric of the data.
        alpha: Significance level of the tests.
        out: Folder of the study, which may contain a stopped study. None saves nothing.
        observer: Is notified of progress.
        log: Further loggers: "tensorboard", "mlflow", or both.
        jobs: Number of processes, or "auto", which depends on cores and memory.
        **options: Options of all runs, as in `atoll.run`: protocol, rounds, epochs, set, ...

    Example:
        >>> import atoll
        >>> found = atoll.compare(["local", "fedavg"], "lagoon:nodes=200", rounds=3, seeds=3)
        >>> [test["pairs"] for test in found.tests()]  # one for each seed
        [3]
    """
    arms, sources = plan.named_arms(methods), plan.named_data(data)
    tested: Json = {"against": against, "metric": metric, "alpha": alpha}
    asked: Json = {"clients": clients, "grid": grid, "options": {"seeds": seeds, **options}}
    request = plan.make_request(arms, sources.values(), **asked, **tested)
    given = {k: v for k, v in arms.items() if not isinstance(v, str)}
    objects = {k: v for k, v in sources.items() if not isinstance(v, str)}
    kept = folder_of(out)
    with contextlib.ExitStack() as stack:
        if kept is None:
            open_logs(log, None)  # raises an error for loggers that would be lost with the folder
            folder = stack.enter_context(TemporaryDirectory(prefix="atoll-compare-"))
        where = kept or Path(folder)
        found = run_request(request, where, observer, given, objects, log=log, jobs=jobs)
    return replace(found, folder=None) if out is None else found


def run_request(
    request: ComparisonRequest,
    folder: Path,
    observer: StudyObserver | None = None,
    methods: Mapping[str, Method] | None = None,
    data: Mapping[str, Data] | None = None,
    *,
    log: str | Sequence[str] = (),
    jobs: int | str = 1,
    tested: Json | None = None,
    overwrite: bool = False,
) -> Comparison:
    """Run all unfinished runs in the folder, compare them, and write the tables into it.

    `tested` overrides the options of the tests (against, metric, alpha) for this call. The study
    and its tables keep their own options. `overwrite` deletes an earlier study in the folder.
    """
    shown = msgspec.structs.replace(request, **(tested or {}))
    runs = plan.make_runs(request, methods or {}, data or {})
    federations = FederationCache()
    check_folder(folder, resuming=True)
    plan.check(shown, runs, None if overwrite else folder, federations)
    about = {"kind": "compare", "command": command(request, folder)}
    about["request"] = msgspec.to_builtins(request)
    how: Json = {"observer": observer, "federations": federations, "log": log, "jobs": jobs}
    outcomes = run_study(folder, runs, about=about, overwrite=overwrite, **how)
    found = make_comparison(outcomes, request, folder)
    found.to_csv(folder / "compare.csv")
    found.to_markdown(folder / "compare.md")
    content = json.dumps(found.summary(), indent=2, allow_nan=False) + "\n"
    write_atomically(folder / "compare.json", content.encode())
    return found if shown == request else make_comparison(outcomes, shown, folder)


def read_request(folder: Path) -> ComparisonRequest:
    """Read the request of the study in a folder."""
    if not (folder / "study.json").exists():
        problem = f"'{folder}' contains no study to resume (study.json is missing)"
        raise ConfigError(f"{problem}; give the folder of a study")
    about = read_json(folder / "study.json")
    if (kind := about.get("kind")) != "compare":
        raise ConfigError(f"the study in '{folder}' is of the kind '{kind}', not 'compare'")
    try:
        request = msgspec.convert(about["request"], ComparisonRequest)
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(f"study.json in '{folder}' cannot be used: {error}") from error
    if request.objects:
        objects = f"objects ({', '.join(request.objects)}), which its folder cannot contain"
        problem = f"the study in '{folder}' was started in Python with {objects}"
        raise ConfigError(f"{problem}; continue it with the same call of atoll.compare")
    return request


def command(request: ComparisonRequest, folder: Path) -> str:
    """Return the command that runs or continues this study, or a comment if it needs Python."""
    arms = [text if label == text else f"{label}={text}" for label, text in request.methods.items()]
    if request.objects:
        objects = f"objects ({', '.join(request.objects)}), which no file contains"
        return in_python("atoll.compare", objects, folder)
    if plan.named_arms(arms) != request.methods:
        return in_python("atoll.compare", "labels that a command line cannot have", folder)
    words = ["atoll", "compare", *arms, "--data", ",".join(request.data)]
    known = [str(number) for number in request.clients if number is not None]
    words += ["--clients", ",".join(known)] if known else []
    words += option_words({"grid": {k: ",".join(map(str, v)) for k, v in request.grid.items()}})
    more = {"against": request.against or None, "metric": request.metric or None}
    words += option_words({**request.options, **more})
    words += ["--alpha", str(request.alpha)] if request.alpha != ALPHA else []
    return shlex.join([*words, "--out", str(folder)])


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`."""

    tables: tuple[ComparisonTable, ...]  # one per problem
    overall: ComparisonTable | None  # over all problems; None if there is only one
    cells: tuple[Mapping[str, object], ...]  # one row per run and seed, for `to_csv`
    failed: Mapping[str, str]  # error of each failed run
    request: ComparisonRequest
    folder: Path | None  # folder of the study, or None if it was not saved

    def __repr__(self) -> str:
        return plain_text(*map(noted_table, self.printed()), self.caption)

    def __iter__(self) -> Iterator[ComparisonTable]:
        """Iterate over the tables. The table over all problems is the last."""
        return iter((*self.tables, *([self.overall] if self.overall else [])))

    def markdown(self) -> str:
        """Render the tables with their conclusions in Markdown."""
        parts = [markdown(table, level=2, escaped="|") for table in self.printed()]
        return "\n".join(["# Comparison\n", *parts, self.caption, ""])

    _repr_markdown_ = markdown

    def latex(self) -> str:
        """Render one table for a paper: methods as rows, problems as columns."""
        return printed.comparison_latex(self.tables, self.overall, self.request)

    @property
    def caption(self) -> str:
        """A caption that explains the printed tables."""
        return printed.caption(tuple(self), self.request.against)

    def printed(self) -> list[Table]:
        """Return the printed tables, each with its conclusions as notes."""
        return printed.printed_tables(self, self.request.alpha)

    def table(self) -> list[Json]:
        """Return one mapping per problem and method. `data` is None over all problems."""
        return [
            _about(table) | {"metric": table.metric} | row | {"scores": row["scores"].tolist()}
            for table in self
            for row in _rows(table)
        ]

    def tests(self) -> list[Json]:
        """Return one mapping per problem and comparison. `data` is None over all problems."""
        return [_about(table) | test for table in self for test in _tests(table)]

    def sentences(self) -> list[str]:
        """Return the conclusions of the tests as sentences."""
        return [text for table in self for text in printed.sentences(table, self.request.alpha)]

    def summary(self) -> Json:
        """Return the object that `--json` prints."""
        tables = [
            _about(table)
            | {"metric": table.metric, "seeds": table.seeds, **table.about}
            | {"reference": table.reference, "rows": _rows(table), "tests": _tests(table)}
            | {"ranks": None if table.rank_test is None else asdict(table.rank_test)}
            | {"sentences": printed.sentences(table, self.request.alpha)}
            for table in self
        ]
        whole: Json = {"kind": "compare", "methods": list(self.request.methods)}
        whole |= {"alpha": self.request.alpha, "tables": tables[: len(self.tables)]}
        whole |= {"overall": tables[-1] if self.overall else None}
        whole |= {"cells": len({row["cell"] for row in self.cells}), "failed": dict(self.failed)}
        whole |= {"out": None if self.folder is None else str(self.folder)}
        return dict(plain_json(whole))

    def to_csv(self, path: str | Path) -> Path:
        """Write one row per run and seed."""
        return _write(csv_text(record_table(self.cells, printed.CSV_COLUMNS)), path)

    def to_markdown(self, path: str | Path) -> Path:
        """Write the tables with their conclusions in Markdown."""
        return _write(self.markdown(), path)

    def to_tex(self, path: str | Path) -> Path:
        """Write one LaTeX table: methods as rows, problems as columns."""
        return _write(self.latex(), path)


def _about(table: ComparisonTable) -> Json:
    return {"data": table.data or None, "clients": table.clients}


def _rows(table: ComparisonTable) -> list[Json]:
    return [
        asdict(row) | {"point": dict(row.point), "best": row.method in table.best}
        for row in table.rows
    ]


def _tests(table: ComparisonTable) -> list[Json]:
    return [asdict(test) | {"p": test.p} for test in table.tests]


def _write(text: str, path: str | Path) -> Path:
    write_atomically(Path(path), text.encode())
    return Path(path)


def make_comparison(
    outcomes: Sequence[RunOutcome], request: ComparisonRequest, folder: Path | None
) -> Comparison:
    """Make tables and tests of the finished runs, and collect the errors of failed runs."""
    groups = itertools.groupby(outcomes, lambda outcome: plan.problem_of(outcome.run))
    problems = [compare_problem(list(members), request) for _, members in groups]
    tables = tuple(table for table, _ in problems)
    overall = compare_overall(tables, request) if len(tables) > 1 else None
    lines = tuple(line for _, own in problems for line in own)
    failed = {one.run.name: one.error for one in outcomes if one.error is not None}
    return Comparison(tables, overall, lines, failed, request, folder)
