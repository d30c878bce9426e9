"""Cells of a study in several processes: what a worker does, and what its parent makes of it.

A worker runs a cell as one process alone would, and writes its files and events itself. It tells
the parent what an observer is told, at most a few times a second, and only what is new.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.experiment.config import RunConfig
from atoll.experiment.hardware import available_memory, cores
from atoll.experiment.history import History
from atoll.experiment.loggers.base import share_logs
from atoll.experiment.result import Result
from atoll.experiment.run import Observer, Stopped
from atoll.studies.federations import SHARE, Federations, group_of
from atoll.studies.schedule import Schedule, cost_of
from atoll.studies.study import (
    Cell,
    Outcome,
    SeesProcesses,
    StudyObserver,
    fail,
    note,
    read_cell,
    run_group,
    stop_without_device,
)
from atoll.studies.workers import Talk, Task, run_tasks

logger = logging.getLogger(__name__)
EVERY = 0.25
"""Least seconds between two reports of a cell."""


def run_side_by_side(
    folder: Path,
    groups: Sequence[Sequence[Cell]],
    observer: StudyObserver,
    *,
    jobs: int,
    log: str | Sequence[str] = (),
) -> dict[str, Outcome]:
    """Run groups of cells (`studies.study.run_group`) in so many processes; the folder is `held`.

    Returns:
        What became of each, by name; without those whose objects no other process can have.

    Raises:
        Stopped: An observer stopped it; all that was done is saved.
    """
    share_logs(log)
    threads = max(1, cores() // jobs)
    if isinstance(observer, SeesProcesses):
        observer.side_by_side(jobs, threads)
    study = _Study(folder, groups, observer)
    try:
        run_tasks(
            study,
            _RunCells(folder, log, available_memory() // SHARE // jobs),
            jobs=jobs,
            threads=threads,
        )
    finally:
        for name in study.running:  # their processes are gone
            note(folder, "stopped", study.cells[name])
    if study.refused_cells:
        logger.warning(
            "another process cannot have what %s is made of (%s); it is run in this one",
            ", ".join(study.refused_cells),
            next(iter(study.refused_cells.values())),
        )
    if study.stopped is not None:
        raise study.stopped
    return study.outcomes


class _Study:
    """The parent's side: gives out cells, and passes on what workers say (`workers.Lead`)."""

    def __init__(
        self, folder: Path, groups: Sequence[Sequence[Cell]], observer: StudyObserver
    ) -> None:
        self.folder, self.observer = folder, observer
        self.cells = {cell.name: cell for group in groups for cell in group}
        self.schedule = Schedule(
            [
                Task(
                    group[0].name,
                    list(group),
                    group_of(group[0].config),
                    sum(cost_of(cell.config) for cell in group),
                )
                for group in groups
            ]
        )
        self.running: dict[str, Observer] = {}
        self.histories: dict[tuple[str, int], History] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.refused_cells: dict[str, str] = {}
        self.stopped: Stopped | None = None

    def next(self, last: Task | None) -> Task | None:
        return self.schedule.take(last)

    def should_stop(self) -> bool:
        study = isinstance(self.observer, SeesProcesses) and self.observer.should_stop()
        stop = study or True in [heard.should_stop() for heard in self.running.values()]
        if stop and self.stopped is None:
            self.stopped = Stopped(None, 0, 0)  # a worker will say where
        return stop

    def said(self, task: Task, what: Any) -> None:
        kind, name, *more = what
        if kind == "cell":
            self.running[name] = self.observer.cell(self.cells[name])
        elif kind == "begin":
            self.running[name].begin(*more)
        elif kind == "rounds":
            self._rounds(name, *more)
        elif kind == "stopped":
            self.stopped = Stopped(*more)
            for cell in task.load:
                self.running.pop(cell.name, None)
        else:
            self._ended(Outcome(self.cells[name], self.folder / "cells" / name, *more))

    def _rounds(self, name: str, seed: int, news: _News) -> None:
        if (name, seed) not in self.histories:
            self.histories[name, seed] = History(news.counts, news.nodes)
        history = self.histories[name, seed]
        for scored, tables in news.scores.items():
            history.scores[scored] += tables
        history.seconds += news.seconds
        self.running[name].round(seed, history)

    def _ended(self, outcome: Outcome) -> None:
        name = outcome.cell.name
        self.running.pop(name, None)
        for key in [key for key in self.histories if key[0] == name]:
            del self.histories[key]
        self.outcomes[name] = outcome
        self.observer.ended(outcome)

    def refused(self, task: Task, why: str) -> None:
        self.refused_cells |= {cell.name: why for cell in task.load}

    def died(self, task: Task, how: str) -> None:
        for cell in task.load:
            if cell.name not in self.outcomes:
                found = read_cell(self.folder, cell)  # it may have died after the last line
                self._ended(replace(found, fresh=True) if found else fail(self.folder, cell, how))


@dataclass
class _RunCells:
    """The worker's side: runs a group of cells, and keeps what the next ones share.

    Attributes:
        folder: The study's.
        log: As for `run_cells`.
        memory: Bytes of federations to keep.
    """

    folder: Path
    log: str | Sequence[str]
    memory: int
    federations: Federations | None = None

    def __call__(self, group: Sequence[Cell], talk: Talk) -> None:
        self.federations = self.federations or Federations(limit=self.memory)
        heard = _Reporting(talk)
        how = {"divide": self.federations, "log": self.log}
        try:
            for outcome in run_group(self.folder, group, heard, **how):
                talk.say(("ended", outcome.cell.name, outcome.summary, outcome.error))
                stop_without_device(outcome)  # another process takes the place of this one
        except Stopped as stop:
            talk.say(("stopped", group[0].name, stop.out, stop.seed, stop.rounds))


@dataclass(frozen=True)
class _News:
    """Rounds of a seed that the parent does not know yet."""

    counts: np.ndarray
    nodes: np.ndarray
    scores: dict[str, list[np.ndarray]]
    seconds: list[float]


@dataclass
class _Reporting:
    """Hears how cells go in a worker, and tells the parent (`StudyObserver`)."""

    talk: Talk

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        pass

    def cell(self, cell: Cell) -> Observer:
        self.talk.say(("cell", cell.name))
        return _CellReport(self.talk, cell.name)

    def ended(self, outcome: Outcome) -> None:
        pass


@dataclass
class _CellReport:
    """One cell's rounds (`experiment.run.Observer`)."""

    talk: Talk
    name: str
    told: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, History] = field(default_factory=dict)
    spoke: float = -np.inf

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.talk.say(("begin", self.name, config, engine, why, notes))

    def round(self, seed: int, history: History) -> None:
        self.waiting[seed] = history
        if time.monotonic() - self.spoke >= EVERY:
            self._tell()

    def should_stop(self) -> bool:
        return self.talk.should_stop()

    def end(self, result: Result) -> None:
        """The last rounds (`experiment.observers.HearsTheEnd`)."""
        self._tell()

    def _tell(self) -> None:
        for seed, history in self.waiting.items():
            first = self.told.get(seed, 0)
            scores = {scored: tables[first:] for scored, tables in history.scores.items()}
            news = _News(history.counts, history.nodes, scores, history.seconds[first:])
            if news.seconds:
                self.talk.say(("rounds", self.name, seed, news))
            self.told[seed] = history.rounds
        self.waiting.clear()
        self.spoke = time.monotonic()
