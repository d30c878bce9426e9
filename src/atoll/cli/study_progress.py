"""A study's progress for people: one bar over all cells, and how long they will still take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from atoll.experiment.config import RunConfig, resolve
from atoll.experiment.history import History
from atoll.experiment.metrics import mean_over_clients
from atoll.experiment.problem import task_of_object
from atoll.experiment.run import Observer
from atoll.present.terminal import Drawn, counted, duration
from atoll.studies.schedule import cost_of
from atoll.studies.study import Cell, Outcome

EVERY = 30.0
"""Least seconds between two lines inside a cell, where no bar can be drawn."""
SHOWN = 4
"""Most cells that are named where several run at once."""


class StudyWatcher(Drawn):
    """Draws a study's progress; the first Ctrl-C becomes a clean stop (`StudyObserver`)."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[words]}"),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        super().__init__(console, bar, quiet=quiet)
        self.notes: set[str] = set()
        self.running: dict[str, float] = {}
        self.jobs = 1
        self.spoke = time.monotonic()

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        self.cells, self.ended_cells = list(cells), 0
        self.left = TimeLeft(cells)
        self.task: TaskID = self.progress.add_task("", total=len(cells), words="")
        if finished:
            self.say(f"{finished} of {counted(len(cells), 'cell')} were finished before")

    def side_by_side(self, jobs: int, threads: int) -> None:
        self.jobs = jobs
        self.say(f"{jobs} cells at once, in processes of {counted(threads, 'thread')} each")

    def should_stop(self) -> bool:
        return self.ctrl_c.stopping

    def cell(self, cell: Cell) -> Observer:
        self.running[cell.name] = 0.0
        return _CellWatcher(self, cell)

    def ended(self, outcome: Outcome) -> None:
        self.ended_cells += 1
        self.running.pop(outcome.cell.name, None)
        self.left.end(outcome)
        self.draw("", "")
        if outcome.error is not None:
            self.say(f"{self._place} {outcome.cell.name} failed: {outcome.error}", style="yellow")
        elif outcome.fresh:
            found = (outcome.summary or {}).get("metrics", {}).get("val_accuracy")
            score = f": validation {found['mean']:.1%}" if found else ""
            self.say(f"{self._place} {outcome.cell.name}{score}{self._time_left()}", style="dim")

    @property
    def _place(self) -> str:
        return f"[{self.ended_cells}/{len(self.cells)}]"

    def _time_left(self) -> str:
        seconds = self.left.seconds(self.jobs)
        if seconds is None or self.ended_cells == len(self.cells):
            return ""
        return f"; {duration(seconds)} left"

    def say(self, text: str, style: str = "dim") -> None:
        """A line that stays."""
        self.spoke = time.monotonic()
        if not self.quiet:
            self.console.print(Text(text, style=style), soft_wrap=True)

    def draw(self, name: str, words: str, share: float = 0.0) -> None:
        """The bar; a line now and then where there is none."""
        place = f"[{min(self.ended_cells + 1, len(self.cells))}/{len(self.cells)}]"
        who, due = name, name and time.monotonic() - self.spoke > EVERY
        if name:
            self.running[name] = share
        if len(self.running) > 1:
            place, who, words = f"[{self.ended_cells}/{len(self.cells)}]", "", _shares(self.running)
        self.progress.update(
            self.task,
            description=f"\\{place} {who}".rstrip(),
            completed=self.ended_cells + sum(self.running.values()),
            words=f"{words}{self._time_left()}",
        )
        if self.progress.disable and due:
            self.say(f"{place} {f'{who}: ' if who else ''}{words}{self._time_left()}")


def _shares(running: Mapping[str, float]) -> str:
    """`a 12%, b 40%`; some of them where there are many."""
    words = [f"{name} {share:.0%}" for name, share in list(running.items())[:SHOWN]]
    more = len(running) - SHOWN
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")


class _CellWatcher:
    """One cell's rounds, for the whole study's bar."""

    def __init__(self, study: StudyWatcher, cell: Cell) -> None:
        self.study, self.cell = study, cell
        self.done: dict[int, int] = {}

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.config = config
        self.began = time.monotonic()
        for note in notes:
            if note not in self.study.notes:  # the other methods' data have the same to say
                self.study.notes.add(note)
                self.study.say(note)

    def round(self, seed: int, history: History) -> None:
        rounds = self.config.rounds or 1
        # Rounds of an earlier process took none of this one's time.
        before = (min([seed, *self.done]) - self.config.seed) * rounds
        self.done[seed] = history.rounds
        done = before + sum(self.done.values())
        self.study.left.advance(self.cell, done / (rounds * self.config.seeds), history.seconds[-1])
        scored = self.config.evaluate or "deployed"
        value = float(mean_over_clients(history.scores[scored][-1][:, 1, 0], history.counts[:, 1]))
        score = f", validation {value:.1%}" if np.isfinite(value) else ""
        words = f"seed {seed}, round {history.rounds}/{rounds}{score}"
        self.study.draw(self.cell.name, words, done / (rounds * self.config.seeds))

    def should_stop(self) -> bool:
        return self.study.ctrl_c.stopping


class TimeLeft:
    """How long the rest takes: by the cells that are alike, else by all that are known.

    Cells are alike if they have the same method, then if they have the same data and clients. What
    is compared is how many times the rough costs of their methods and data
    (`studies.reproduce.recipes`) rounds really take, so that a slow method that comes first does
    not make the others seem slow.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.rounds = {cell.name: _rounds(cell) for cell in cells}
        self.labels = {cell.name: cell.labels for cell in cells}
        self.waiting = dict.fromkeys(self.rounds, 1.0)
        self.rate: dict[str, float] = {}
        rough = {cell.name: cost_of(cell.config) / self.rounds[cell.name] for cell in cells}
        known = [cost for cost in rough.values() if cost]
        usual = float(np.mean(known)) if known else 1.0
        self.rough = {name: cost or usual for name, cost in rough.items()}

    def advance(self, cell: Cell, share: float, seconds: float) -> None:
        """So much of a cell is done, and its last round took so long."""
        self.waiting[cell.name] = 1.0 - share
        before = self.rate.get(cell.name, seconds)
        self.rate[cell.name] = 0.8 * before + 0.2 * seconds

    def end(self, outcome: Outcome) -> None:
        """A cell is over; a finished one says how long its rounds took."""
        name = outcome.cell.name
        self.waiting.pop(name, None)
        if outcome.summary is not None:
            self.rate[name] = outcome.summary["seconds"]["train"] / self.rounds[name]

    def seconds(self, jobs: int = 1) -> float | None:
        """With so many cells at once; None as long as nothing is known."""
        if not self.rate:
            return None
        problems, methods = defaultdict(list), defaultdict(list)
        slowness = {name: rate / self.rough[name] for name, rate in self.rate.items()}
        for name, slow in slowness.items():
            problems[self._problem(name)].append(slow)
            methods[self.labels[name].get("method")].append(slow)
        every = float(np.mean(list(slowness.values())))
        each = []
        for name, share in self.waiting.items():
            problem = problems.get(self._problem(name), [every])
            method = methods.get(self.labels[name].get("method"), [every])
            # As slow as its data and as slow as its method are, compared with all.
            slow = float(np.mean(problem) * np.mean(method)) / max(every, 1e-9)
            rate = self.rate.get(name, slow * self.rough[name])
            each.append(share * self.rounds[name] * rate)
        return max([sum(each) / jobs, *each])

    def _problem(self, name: str) -> tuple[object, object]:
        return self.labels[name].get("data"), self.labels[name].get("clients")


def _rounds(cell: Cell) -> int:
    config, rules = resolve(cell.config, task_of_object(cell.data))
    return (config.rounds or rules.rounds) * config.seeds
