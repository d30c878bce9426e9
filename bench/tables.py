"""`python -m bench tables`: every run of the papers' tables, in many processes.

Each run is a cell of `atoll reproduce PAPER TABLE --both` and has its name. Most runs keep only
config.toml and result.json, so the folder stays small. runs.jsonl has a line with the seconds of
each run that ended. A second call continues and skips finished runs; `--jobs 0` only writes the
table. Values in the given table are not run again either, so another machine needs no folder of
runs. A new table starts from scratch. The column `recipe` is a hash of the configurations behind a
value: after a change of a recipe, only its values are run again.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console

COLUMNS = (
    "paper", "table", "dataset", "setting", "clients", "method", "metric", "printed", "printed_std",
    "protocol", "ours", "std", "seeds", "device", "recipe",
)  # fmt: skip
KEY = ("paper", "table", "dataset", "setting", "clients", "method", "metric", "printed", "protocol")
"""The columns that identify a line."""
Key = tuple[str, ...]
TOLD = 30
"""Seconds between two lines about the progress."""


def planned(papers: Sequence[str], data_root: Path | None, seeds: int) -> Iterator[Any]:
    """Yield (paper, table, row) of every published value with a run and with data here."""
    from atoll.studies.reproduce.recipes import read_paper
    from atoll.studies.reproduce.table import Wanted, plan_table

    wanted = Wanted(both=True, seeds=seeds, root=None if data_root is None else str(data_root))
    for name in papers:
        paper = read_paper(name)
        for table, recipe in paper.recipe.tables.items():
            rows = [] if recipe.reason else plan_table(paper, table, wanted)
            yield from ((paper, table, row) for row in rows if not row.reason)


@dataclass
class Runs:
    """Record the seconds of each run, delete most of its files, and stop when time is up.

    The observer of a study (`studies.study_run.StudyObserver`).

    Attributes:
        whole: Names of runs that keep all files, because their clients are compared.
        end: When to stop, in seconds since the epoch.
        console: Shows the progress every `TOLD` seconds.
        lines: The file runs.jsonl.
    """

    whole: frozenset[str]
    end: float
    console: Console
    lines: TextIO
    runs: int = 0
    finished: int = 0
    problems: list[str] = field(default_factory=list)
    told: float = field(default_factory=time.time)
    begun: dict[str, float] = field(default_factory=dict)

    def begin(self, runs: Sequence[Any], finished: int) -> None:
        self.runs = len(runs)

    def parallel(self, jobs: int, threads: int) -> None:
        pass

    def run(self, run: Any) -> Until:
        self.begun[run.name] = time.time()
        return Until(self)

    def should_stop(self) -> bool:
        return time.time() > self.end

    def ended(self, outcome: Any) -> None:
        name, took = outcome.run.name, (outcome.summary or {}).get("seconds", {})
        seconds = time.time() - self.begun.get(name, time.time())
        self.lines.write(json.dumps(line(name, seconds, outcome.error or "", took)) + "\n")
        self.lines.flush()
        if outcome.error is None and name not in self.whole:
            keep_little(outcome.folder)
        self.finished += 1
        self.problems += [f"{name}: {outcome.error}"] if outcome.error else []
        if time.time() > self.told + TOLD:
            self.told = time.time()
            words = f"{name} took {seconds:.1f} s"
            self.console.print(f"{self.finished} of {self.runs}; {words}", markup=False)


@dataclass
class Until:
    """Stops a run when time is up (`experiment.run.Observer`)."""

    study: Runs

    def begin(self, *about: Any) -> None:
        pass

    def round(self, *about: Any) -> None:
        pass

    def should_stop(self) -> bool:
        return self.study.should_stop()


def keep_little(folder: Path) -> None:
    """Delete all files of a finished run except its configuration and its result."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in ("config.toml", "result.json"):
            path.unlink()


def line(name: str, seconds: float, problem: str, took: Mapping[str, float]) -> dict[str, Any]:
    """A line of runs.jsonl."""
    return {
        "name": name, "seconds": round(seconds, 3), "setup": took.get("setup"),
        "train": took.get("train"), "problem": problem,
    }  # fmt: skip


def share_of(cells: Sequence[Any], every: int) -> list[Any]:
    """Return all cells of every Nth federation, which share its clients as in the full plan."""
    from atoll.experiment.problem import group_of

    kins = [group_of(cell.config) for cell in cells]
    chosen = set(list(dict.fromkeys(kins))[::every])
    return [cell for cell, kin in zip(cells, kins, strict=True) if kin in chosen]


def run_all(
    folder: Path,
    cells: Sequence[Any],
    whole: frozenset[str],
    jobs: str,
    seconds: float,
    console: Console,
    at_once: bool | None = False,
    *,
    dearest_first: bool = True,
) -> list[str]:
    """Run as many cells as fit into the time, and return the problems.

    If `at_once` is None, neighbours that differ only in numbers are one program on a GPU.
    """
    from atoll.experiment.run import Stopped
    from atoll.studies.study import run_study

    warnings.simplefilter("ignore")
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    with (folder / "runs.jsonl").open("a", encoding="utf-8") as lines:
        runs = Runs(whole, time.time() + seconds, console, lines)
        with contextlib.suppress(Stopped):  # a later call continues at the last checkpoints
            few = [replace(one, light=at_once is False and one.name not in whole) for one in cells]
            about = {"kind": "bench tables"}
            how = {"at_once": at_once, "dearest_first": dearest_first, "jobs": jobs}
            run_study(folder, few, about=about, observer=runs, adds=True, **how)
    return runs.problems


def read_table(path: Path | None) -> dict[Key, list[str]]:
    """Return the lines of a table, or nothing if the file does not exist yet."""
    if path is None or not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        if tuple(lines.fieldnames or ()) != COLUMNS:
            raise click.ClickException(f"{path} does not have the columns of this command's table")
        return {tuple(line[name] for name in KEY): list(line.values()) for line in lines}


def key_of(paper: Any, number: str, row: Any, rules: str) -> Key:
    """Return the values of `KEY` for a line."""
    one = row.printed
    about = one.dataset, one.setting, one.clients, one.method, one.metric, one.value
    return tuple(map(str, (paper.name, number, *about, rules)))


def cells_of(row: Any, rules: str) -> list[Any]:
    """The runs behind a line, including the baseline of its gains."""
    return [run for run in (*row.runs[rules], row.baseline) if run is not None]


def recipe_of(row: Any, rules: str) -> str:
    """Return a hash of the runs behind a line. A run's name identifies its configuration."""
    names = " ".join(run.name for run in cells_of(row, rules))
    return hashlib.sha256(names.encode()).hexdigest()[:8]


def unknown_lines(
    found: Sequence[Any], known: Mapping[Key, list[str]], seeds: int
) -> list[tuple[Any, str]]:
    """Return (row, protocol) of lines that are missing, have fewer seeds or an old recipe."""
    at, recipe = COLUMNS.index("seeds"), COLUMNS.index("recipe")

    def is_known(row: Any, rules: str, line: list[str] | None) -> bool:
        return line is not None and int(line[at]) >= seeds and line[recipe] == recipe_of(row, rules)

    return [
        (row, rules)
        for paper, number, row in found
        for rules in row.runs
        if not is_known(row, rules, known.get(key_of(paper, number, row, rules)))
    ]


def table(found: Sequence[Any], folder: Path, known: Mapping[Key, list[str]]) -> list[list[Any]]:
    """Return a line for each published value and protocol, from its runs or from `known`.

    Other known lines (other papers, data on other machines) come last.
    """
    from atoll.studies.reproduce.table import Gains, filled, needed
    from atoll.studies.study_run import read_outcome

    gains = Gains()
    lines: dict[Key, list[Any]] = {}
    for paper, number, row in found:
        outcomes = {cell.name: read_outcome(folder, cell) for cell in needed(row)}
        done = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
        one, ours = row.printed, filled(row, done, gains).ours
        for rules, cells in row.runs.items():
            key = key_of(paper, number, row, rules)
            if rules not in ours:
                lines |= {key: known[key]} if key in known else {}
                continue
            devices = {done[cell.name].summary["device"] for cell in cells}
            mean, std = ours[rules].mean, ours[rules].std
            lines[key] = [
                paper.name, number, one.dataset, one.setting, one.clients, one.method, one.metric,
                one.value, one.std, rules, round(mean, 2), None if std is None else round(std, 2),
                ours[rules].seeds, "+".join(sorted(devices)), recipe_of(row, rules),
            ]  # fmt: skip
    return list((lines | {key: line for key, line in known.items() if key not in lines}).values())


@click.command("tables")
@click.option("--data-root", envvar="ATOLL_DATA", type=click.Path(path_type=Path),
              help="Folder of the data sets; ATOLL_DATA by default.")  # fmt: skip
@click.option("--papers", default="fedath,fediih,fedtad,gcfl", show_default=True)
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--jobs", default="auto", show_default=True,
              help="Processes; auto: as many as save time; 0 runs nothing.")  # fmt: skip
@click.option(
    "--every",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Run only every Nth federation of the plan, to estimate the time.",
)
@click.option("--cheapest", is_flag=True, help="Start with the shortest runs.")
@click.option("--own", is_flag=True, help="Only the papers' own protocols, without strict.")
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(min=0))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path),
              help="Folder of the runs; a second call continues there.")  # fmt: skip
@click.option("--csv", "to", type=click.Path(dir_okay=False, path_type=Path),
              help="The table to extend; its values are not run again.")  # fmt: skip
def tables(
    data_root: Path | None,
    papers: str,
    seeds: int,
    jobs: str,
    every: int,
    cheapest: bool,
    own: bool,
    minutes: float,
    out: Path,
    to: Path | None,
) -> None:
    """Run the papers' tables under their own protocols and under `strict`."""
    from atoll.core.errors import AtollError
    from atoll.core.files import write_atomically
    from atoll.studies.parallel import check_jobs
    from atoll.studies.reproduce.table import unique
    from atoll.studies.study_run import read_outcome

    console = Console(stderr=True, highlight=False)
    try:
        check_jobs(1 if jobs == "0" else jobs)
        found = list(planned(papers.split(","), data_root, seeds))
    except AtollError as error:
        raise click.ClickException(str(error)) from error
    known = read_table(to)
    lacking = unknown_lines(found, known, seeds)
    lacking = [(row, rules) for row, rules in lacking if not own or rules != "strict"]
    cells = share_of(unique(cell for line in lacking for cell in cells_of(*line)), every)
    left = [cell for cell in cells if read_outcome(out, cell) is None]
    count = sum(len(row.runs) for *_, row in found)
    console.print(
        f"{len(found)} published values, {count} lines, {count - len(lacking)} of them known; "
        f"{len(cells)} runs, {len(left)} to do"
    )
    began = time.time()
    gains = [line for line in lacking if line[0].baseline is not None]  # clients are compared
    whole = frozenset(cell.name for line in gains for cell in cells_of(*line))
    how = out, left, whole, jobs, 60 * minutes, console
    problems = run_all(*how, dearest_first=not cheapest) if jobs != "0" else []
    lines = table(found, out, known)
    if to is not None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([COLUMNS, *lines])
        write_atomically(to, text.getvalue().encode())  # its runs may be deleted
    for problem in problems:
        console.print(problem, markup=False)
    still = sum(read_outcome(out, cell) is None for cell in cells)
    console.print(
        f"{len(left) - still} runs in {time.time() - began:.0f} s, {still} left; "
        f"{len(lines)} lines in the table"
    )
