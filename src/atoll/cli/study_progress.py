"""A study's progress in the terminal: one bar for all runs, and the remaining time."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TimeRemainingColumn

from atoll.core.errors import counted
from atoll.experiment.config import RunConfig, resolve
from atoll.experiment.history import History
from atoll.experiment.metrics import label_of
from atoll.experiment.observers import Observer
from atoll.experiment.problem import task_of_object
from atoll.present.terminal import LiveProgress, duration, last_validation
from atoll.studies.study_run import RunOutcome, StudyObserver, StudyRun, cost_of

EVERY = 30.0  # minimum seconds between two lines about progress, if the output has no bar
SHOWN = 4  # maximum number of named cells if several run at once


@dataclass(frozen=True)
class Position:
    """The progress of a run: the finished `share` of its rounds, and the last round's values."""

    seed: int
    round: int
    rounds: int
    share: float
    seconds: float
    validation: float | None


class RunsWatcher(LiveProgress, StudyObserver, ABC):
    """One bar over all runs of a study."""

    unit = "cells"
    jobs = 1

    def parallel(self, jobs: int, threads: int) -> None:
        self.jobs = jobs
        self.say(f"{jobs} {self.unit} at once, in processes of {counted(threads, 'thread')} each")

    def run(self, run: StudyRun) -> Observer:
        return _RunWatcher(self, run)

    def note(self, text: str) -> None:
        """Handle a note about the data of a run."""

    @abstractmethod
    def advance(self, run: StudyRun, at: Position) -> None:
        """Show that a run finished one more round."""


class StudyWatcher(RunsWatcher):
    """Shows a study's progress and remaining time, and stops the study after `seconds`."""

    def __init__(self, console: Console, *, quiet: bool, seconds: float | None = None) -> None:
        columns = ("{task.description}", BarColumn(bar_width=20), "{task.fields[words]}")
        super().__init__(console, *columns, quiet=quiet)
        self.notes: set[str] = set()
        self.running: dict[str, float] = {}
        self.spoke = time.monotonic()
        self.end = math.inf if seconds is None else self.began + seconds

    def should_stop(self) -> bool:
        return super().should_stop() or time.monotonic() > self.end

    def begin(self, runs: Sequence[StudyRun], finished: int) -> None:
        self.runs, self.ended_runs = list(runs), 0
        self.left = TimeLeft(runs)
        self.task = self.progress.add_task("", total=len(runs), words="")
        if finished:
            self.say(f"{finished} of {counted(len(runs), 'cell')} were finished before")

    def run(self, run: StudyRun) -> Observer:
        self.running[run.name] = 0.0
        return super().run(run)

    def ended(self, outcome: RunOutcome) -> None:
        self.ended_runs += 1
        self.running.pop(outcome.run.name, None)
        self.left.end(outcome)
        self.draw("", "")
        place = f"[{self.ended_runs}/{len(self.runs)}]"
        if outcome.error is not None:
            self.say(f"{place} {outcome.run.name} failed: {outcome.error}", style="yellow")
        elif outcome.fresh:
            metric = outcome.run.config.metric or "accuracy"
            found = (outcome.summary or {}).get("metrics", {}).get(f"val_{metric}")
            named = f"{label_of(metric)} " if outcome.run.config.metric else ""
            score = f": validation {named}{found['mean']:.1%}" if found else ""
            self.say(f"{place} {outcome.run.name}{score}{self._time_left()}")
            for warning in (outcome.summary or {}).get("warnings", []):
                self.say(f"{outcome.run.name}: {warning}", style="yellow")

    def _time_left(self) -> str:
        seconds = self.left.seconds(self.jobs)
        if seconds is None or self.ended_runs == len(self.runs):
            return ""
        return f"; {duration(seconds)} left"

    def note(self, text: str) -> None:
        if text not in self.notes:  # other methods repeat the notes of the same data
            self.notes.add(text)
            self.say(text)

    def say(self, text: str, style: str = "dim") -> None:
        self.spoke = time.monotonic()
        super().say(text, style)

    def advance(self, run: StudyRun, at: Position) -> None:
        self.left.advance(run, at.share, at.seconds)
        known = at.validation is not None and np.isfinite(at.validation)
        score = f", validation {at.validation:.1%}" if known else ""
        self.draw(run.name, f"seed {at.seed}, round {at.round}/{at.rounds}{score}", at.share)

    def draw(self, name: str, words: str, share: float = 0.0) -> None:
        """Update the bar. If the output has no bar, print a line every `EVERY` seconds."""
        place = f"[{min(self.ended_runs + 1, len(self.runs))}/{len(self.runs)}]"
        who, due = name, name and time.monotonic() - self.spoke > EVERY
        if name:
            self.running[name] = share
        if len(self.running) > 1:  # `a 12%, b 40%`, at most SHOWN of them
            shares = [f"{one} {done:.0%}" for one, done in self.running.items()]
            more = f" and {len(shares) - SHOWN} more" if len(shares) > SHOWN else ""
            words = ", ".join(shares[:SHOWN]) + more
            place, who = f"[{self.ended_runs}/{len(self.runs)}]", ""
        words += self._time_left()
        done = self.ended_runs + sum(self.running.values())
        title = f"\\{place} {who}".rstrip()
        self.progress.update(self.task, description=title, completed=done, words=words)
        if self.progress.disable and due:
            self.say(f"{place} {f'{who}: ' if who else ''}{words}")


class TuneWatcher(RunsWatcher):
    """Shows the progress of a search. The bar moves with every round and counts trials."""

    unit = "trials"

    def __init__(self, console: Console, *, quiet: bool) -> None:
        numbers = ("{task.fields[done]}/{task.total}", "{task.fields[score]}")
        columns = ("{task.description}", BarColumn(), *numbers, TimeRemainingColumn())
        super().__init__(console, *columns, quiet=quiet)
        self.best: dict[str, float] = {}

    def begin(self, runs: Sequence[StudyRun], finished: int) -> None:
        self.runs, self.place = len(runs), finished
        self.task = self.progress.add_task("tune", total=len(runs), done=finished, score="")
        self.progress.update(self.task, completed=finished)

    def advance(self, run: StudyRun, at: Position) -> None:
        best = self.best.get(run.labels["method"])
        words = f"{run.name}, round {at.round}" + (f", best {best:.1%}" if best else "")
        self.progress.update(self.task, completed=self.place + at.share, score=words)

    def ended(self, outcome: RunOutcome) -> None:
        self.place += 1
        summary = outcome.summary or {}
        method, value = outcome.run.labels["method"], summary.get("validation")
        if value is not None:
            self.best[method] = max(value, self.best.get(method, 0.0))
        self.progress.update(self.task, completed=self.place, done=self.place)
        if self.progress.disable:
            how = outcome.error or (f"validation {value:.1%}" if value else "")
            words = how or ("finished" if summary else "pruned")
            spent = time.monotonic() - self.began
            self.say(f"{outcome.run.name} ({self.place}/{self.runs}): {words}, {spent:.1f} s", "")


class _RunWatcher(Observer):
    """Reports the rounds of one run to its study (`studies.study_run.ReadsFiles`)."""

    def __init__(self, study: RunsWatcher, run: StudyRun) -> None:
        self.study, self.run = study, run
        self.done: dict[int, int] = {}

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.config = config
        self.notes(notes)

    def notes(self, notes: Sequence[str]) -> None:
        for note in notes:
            self.study.note(note)

    def round(self, seed: int, history: History) -> None:
        played, rounds = history.rounds, self.config.rounds or 1
        # Rounds of an earlier process did not take time in this one.
        before = (min([seed, *self.done]) - self.config.seed) * rounds
        self.done[seed] = played
        share = (before + sum(self.done.values())) / (rounds * self.config.seeds)
        value = last_validation(history, self.config)
        at = Position(seed, played, rounds, share, history.seconds[-1], value)
        self.study.advance(self.run, at)

    def progress(self, progress: Mapping[str, Any]) -> None:
        now, rounds = progress["round"], progress["rounds"] or 1
        share = progress["done"] / max(progress["total"], 1)
        value = progress["validation"][-1] if progress["validation"] else None
        at = Position(progress["seed"], now, rounds, share, progress["per_round"], value)
        self.study.advance(self.run, at)

    def should_stop(self) -> bool:
        return self.study.should_stop()


class TimeLeft:
    """Estimates the remaining time from cells of the same method or data, else from all cells.

    It divides the time of rounds by the approximate cost of methods and data (`cost_of`), so that
    a slow first method does not increase the estimate for the others.
    """

    def __init__(self, runs: Sequence[StudyRun]) -> None:
        self.rounds, rough = dict[str, int](), dict[str, float]()
        self.kinds: dict[str, tuple[object, object]] = {}  # data and method of each cell
        for run in runs:
            config, rules = resolve(run.config, task_of_object(run.data))
            self.rounds[run.name] = rounds = (config.rounds or rules.rounds) * config.seeds
            rough[run.name], of = cost_of(run.config) / rounds, run.labels
            self.kinds[run.name] = (of.get("data"), of.get("clients")), of.get("method")
        self.waiting, self.rate = dict.fromkeys(self.rounds, 1.0), dict[str, float]()
        usual = float(np.mean([cost for cost in rough.values() if cost] or [1.0]))
        self.rough = {name: cost or usual for name, cost in rough.items()}

    def advance(self, run: StudyRun, share: float, seconds: float) -> None:
        """Record the finished share of a cell, and the seconds of its last round."""
        self.waiting[run.name] = 1.0 - share
        before = self.rate.get(run.name, seconds)
        self.rate[run.name] = 0.8 * before + 0.2 * seconds

    def end(self, outcome: RunOutcome) -> None:
        """Record that a cell ended. The result of a finished cell contains its training time."""
        name = outcome.run.name
        self.waiting.pop(name, None)
        if outcome.summary is not None:
            self.rate[name] = outcome.summary["seconds"]["train"] / self.rounds[name]

    def seconds(self, jobs: int = 1) -> float | None:
        """Estimate the remaining seconds with `jobs` parallel cells, or None before any round."""
        if not self.rate:
            return None
        alike: dict[object, list[float]] = defaultdict(list)
        slowness = {name: rate / self.rough[name] for name, rate in self.rate.items()}
        for name, slow in slowness.items():
            for kind in self.kinds[name]:
                alike[kind].append(slow)
        every = float(np.mean(list(slowness.values())))
        each = []
        for name, share in self.waiting.items():
            problem, method = (alike.get(kind, [every]) for kind in self.kinds[name])
            # The slowness of its data times the slowness of its method, relative to the mean.
            slow = float(np.mean(problem) * np.mean(method)) / max(every, 1e-9)
            rate = self.rate.get(name, slow * self.rough[name])
            each.append(share * self.rounds[name] * rate)
        return max([sum(each) / jobs, *each])
