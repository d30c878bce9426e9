"""Run the rows that are missing in a CSV file, and write each row soon after its run ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from atoll.experiment.observers import Observer
from atoll.experiment.problem import FederationCache
from atoll.studies.leaderboard.leagues import Entry, tuned_run
from atoll.studies.leaderboard.rows import TRIALS, Row, add_rows, make_row, read_rows
from atoll.studies.study import run_study
from atoll.studies.study_run import Json, RunOutcome, StudyObserver, StudyRun
from atoll.studies.tune.runner import DIVERGED, Blinded

EVERY = 5.0  # minimum seconds between two writes of the file


def trials_file(path: Path) -> Path:
    """Return the file with the trials of the search, next to the file of the rows."""
    return path.with_name(f"{path.stem}-{TRIALS}{path.suffix}")


def run_entries(
    entries: Sequence[Entry],
    path: Path,
    problems: list[str],
    *,
    observer: StudyObserver | None = None,
    jobs: int | str = 1,
    out: Path | None = None,
) -> None:
    """Run the missing rows. Each failed run adds a sentence to `problems`.

    Several `jobs` begin with the cheapest runs. Raise `Stopped` if the observer stops the runs. The
    file then contains the rows of all finished runs. With `out`, keep whole runs and their
    checkpoints in this folder, otherwise only the rows.
    """
    with contextlib.ExitStack() as stack:
        folder = out or Path(stack.enter_context(TemporaryDirectory(prefix="atoll-leaderboard-")))

        def play(runs: Sequence[tuple[str, StudyRun]], kind: str, to: Path, role: str) -> None:
            """Run pairs of recipe and run, and write their rows. Trials do not see test nodes."""
            recipes = {run.name: recipe for recipe, run in runs}
            keeper = _Keeper(observer or StudyObserver(), to, recipes, role, problems)
            few = [replace(run, light=out is None) for _, run in runs]
            about = {"kind": f"leaderboard {kind}"}
            federations = Blinded() if role == "val" else FederationCache()
            how: Json = {"jobs": jobs, "adds": True, "dearest_first": False}
            with contextlib.closing(keeper):
                where = folder / kind
                run_study(where, few, about=about, observer=keeper, federations=federations, **how)

        def play_ready(some: Sequence[Entry]) -> None:
            """Run every missing row that needs no trials, or whose trials have ended."""
            rows, tried = read_rows(path), read_rows(trials_file(path))
            lacking = [one for one in some if not one.is_known(rows)]
            chosen = [(o.recipe, tuned_run(o, tried) if o.trials else o.run) for o in lacking]
            if ready := [(recipe, run) for recipe, run in chosen if run is not None]:
                play(ready, "rows", path, "test")

        play_ready(entries)
        rows, known = read_rows(path), {row.recipe for row in read_rows(trials_file(path)).values()}
        lacking = [one for one in entries if one.trials and not one.is_known(rows)]
        trials = {recipe: run for one in lacking for recipe, run in one.trials.items()}
        if untried := [(recipe, run) for recipe, run in trials.items() if recipe not in known]:
            play(untried, TRIALS, trials_file(path), "val")
            play_ready(lacking)


@dataclass
class _Keeper(StudyObserver):
    """Writes a row for each run that finishes or diverges, and forwards all events."""

    observer: StudyObserver
    path: Path
    recipes: Mapping[str, str]  # by the name of a run
    role: str  # "test" or "val"
    problems: list[str]
    waiting: list[Row] = field(default_factory=list)
    wrote: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        """Write the buffered rows."""
        if self.waiting:
            add_rows(self.path, self.waiting)
        self.waiting, self.wrote = [], time.monotonic()

    def ended(self, outcome: RunOutcome) -> None:
        if outcome.error is None or outcome.kind in DIVERGED:  # it would diverge again
            self.waiting.append(make_row(outcome, self.recipes[outcome.run.name], self.role))
        if outcome.error is not None:
            self.problems.append(f"{outcome.run.name}: {outcome.error}")
        if time.monotonic() > self.wrote + EVERY:
            self.close()
        self.observer.ended(outcome)

    def begin(self, runs: Sequence[StudyRun], finished: int) -> None:
        self.observer.begin(runs, finished)

    def parallel(self, jobs: int, threads: int) -> None:
        self.observer.parallel(jobs, threads)

    def run(self, run: StudyRun) -> Observer:
        return self.observer.run(run)

    def should_stop(self) -> bool:
        return self.observer.should_stop()
