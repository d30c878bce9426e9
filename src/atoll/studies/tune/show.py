"""`atoll tune` for people: progress, tables, the history as a picture, and files to go on with."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from atoll.core.files import write_atomically
from atoll.experiment.command import run_command
from atoll.experiment.config import RunConfig, config_text
from atoll.experiment.history import History
from atoll.experiment.run import Observer
from atoll.present.chart import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    Axis,
    Chart,
    Dots,
    Line,
    Mark,
    Panels,
    steps,
)
from atoll.present.chart_png import png
from atoll.present.plots import plain_json
from atoll.present.terminal import Watcher, counted, percent
from atoll.studies.study import Cell, Outcome
from atoll.studies.tune.tuning import Tuned, Tuning

SHOWN = 5
"""Best trials that the table lists; trials.csv has all."""


class TuneWatcher(Watcher):
    """One bar over all trials; the first Ctrl-C becomes a clean stop (`cells.StudyObserver`)."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        super().__init__(console, quiet=quiet, label="tune")
        # A bar moves with every round; its number counts whole cells.
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[done]}/{task.total}"),
            TextColumn("{task.fields[score]}"),
            TimeRemainingColumn(),
            console=console,
            disable=self.progress.disable,
            transient=True,
        )
        self.best: dict[str, float] = {}
        self.place, self.cells = 0, 0
        self.now: Cell | None = None

    def begin(self, cells: Any, *finished: Any) -> None:  # a study's or a run's, by its arguments
        if isinstance(cells, RunConfig):
            self.config = cells
            return
        self.cells, self.place = len(cells), finished[0]
        self.task = self.progress.add_task(
            "tune", total=len(cells), completed=self.place, done=self.place, score=""
        )

    def cell(self, cell: Cell) -> Observer:
        self.now = cell
        return self

    def round(self, seed: int, history: History) -> None:
        assert self.config is not None
        assert self.task is not None
        assert self.now is not None
        rounds = (self.config.rounds or 1) * self.config.seeds
        played = (seed - self.config.seed) * (self.config.rounds or 1) + history.rounds
        best = self.best.get(self.now.labels["method"])
        words = f"{self.now.name}, round {history.rounds}" + (f", best {best:.1%}" if best else "")
        self.progress.update(self.task, completed=self.place + played / rounds, score=words)

    def ended(self, outcome: Outcome) -> None:
        self.place += 1
        summary = outcome.summary or {}
        method, value = outcome.cell.labels["method"], summary.get("validation")
        if value is not None:
            self.best[method] = max(value, self.best.get(method, 0.0))
        if self.task is not None:
            self.progress.update(self.task, completed=self.place, done=self.place)
        if self.progress.disable and not self.quiet:
            how = outcome.error or (f"validation {value:.1%}" if value else "")
            spent = time.monotonic() - self.began
            words = how or ("finished" if summary else "pruned")
            line = f"{outcome.cell.name} ({self.place}/{self.cells}): {words}, {spent:.1f} s"
            self.console.print(Text(line), soft_wrap=True)


def tuning_text(found: Tuning) -> Group:
    """Tables of all methods; the commands to go on with belong below, unwrapped."""
    parts: list[Any] = []
    for tuned in found.methods.values():
        parts += [Text(_heading(tuned), style="bold"), Text(), _trials_table(tuned)]
        if tuned.importance:
            shares = [f"{key} {share:.0%}" for key, share in tuned.importance.items()]
            parts += [Text("What made the difference: " + ", ".join(shares))]
        parts += [Text()]
    parts += [_final_table(found), Text(), Text(_caption(found), style="dim")]
    parts += [Text(line, style="dim") for line in found.notes]
    return Group(*parts)


def _heading(tuned: Tuned) -> str:
    states = [trial.state for trial in tuned.trials]
    kinds = [f"{states.count(s)} {s}" for s in dict.fromkeys(states)]
    played = sum(len(trial.curve) for trial in tuned.trials)
    seconds = sum(trial.seconds for trial in tuned.trials)
    return (
        f"{tuned.method} on {tuned.config.data}: {counted(len(states), 'trial')} "
        f"({', '.join(kinds)}), {counted(played, 'round')}, {seconds:.0f} s"
    )


def _trials_table(tuned: Tuned) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("validation", justify="right", no_wrap=True)
    table.add_column("settings")
    best = tuned.ranking[:SHOWN]
    first = [t for t in tuned.ranking if t.number == 0 and t not in best and tuned.defaults]
    for trial in [*best, *first]:
        note = "  (its own defaults)" if trial.number == 0 and tuned.defaults else ""
        words = "  ".join(f"{key}={value}" for key, value in trial.settings.items())
        table.add_row(str(trial.number), f"{100 * (trial.value or 0):.2f}", Text(words + note))
    return table


def _final_table(found: Tuning) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method")
    columns = ["trials", "validation, defaults", "validation, tuned", "test, tuned"]
    for name in columns if found.asked.seeds else columns[:-1]:
        table.add_column(name, justify="right")
    for tuned in found.methods.values():
        first = tuned.trials[0].value
        row = [
            tuned.method,
            str(len(tuned.trials)),
            "–" if first is None or not tuned.defaults else f"{100 * first:.1f}",
            f"{100 * (tuned.best.value or 0):.1f}",
        ]
        if found.asked.seeds:
            metrics = {} if tuned.test is None else tuned.test["metrics"]
            row.append(percent(metrics, f"test_{tuned.metric}"))
        table.add_row(*row)
    return table


def _caption(found: Tuning) -> str:
    first = next(iter(found.methods.values()))
    words = f"In percent {first.metric}. Validation: the best of many, so it flatters. "
    if found.asked.seeds:
        fresh = counted(found.asked.seeds, "fresh seed")
        words += (
            f"Test: the best configuration, run once, with {fresh} from {first.config.seed}; the "
            "trials had no test data. "
        )
    if found.asked.seeds and first.redivided:
        words += (
            "Each seed divides the data anew, so some nodes that are tested were training or "
            "validation nodes of the trials; `atoll partition` makes a file that keeps them apart. "
        )
    return words + f"Budget of each method: {counted(found.asked.trials, 'trial')}."


def failed(found: Tuning) -> list[str]:
    """Methods without the number that was asked for: no trial, or the final test, came to its end.

    Why is among the notes.
    """
    wanted = bool(found.asked.seeds)
    return [
        name
        for name in found.asked.methods
        if name not in found.methods or (wanted and found.methods[name].test is None)
    ]


def commands(found: Tuning) -> list[str]:
    """For each method the command that runs it as it was chosen."""
    return [run_command(tuned.config) for tuned in found.methods.values()]


def write_tuning(found: Tuning, out: Path) -> list[Path]:
    """trials.csv, tune.json, history.png, and a configuration for each method."""
    files = {
        "trials.csv": _csv(found),
        "tune.json": json.dumps(summary(found), indent=2).encode(),
        "history.png": png(history_picture(list(found.methods.values()))),
    }
    for tuned in found.methods.values():
        safe = "".join(c if c.isalnum() or c in "-_.+" else "-" for c in tuned.method)
        files[f"best-{safe}.toml"] = config_text(tuned.config).encode()
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]


def summary(found: Tuning) -> dict[str, Any]:
    """The object that `--json` prints."""
    whole = {
        tuned.method: {
            "space": {key: str(wanted) for key, wanted in tuned.space.items()},
            "trials": len(tuned.trials),
            "best_trial": tuned.best.number,
            "settings": dict(tuned.best.settings),
            "metric": tuned.metric,
            "validation": tuned.best.value,
            "importance": dict(tuned.importance),
            "test": None
            if tuned.test is None
            else tuned.test["metrics"].get(f"test_{tuned.metric}"),
            "command": command,
        }
        for tuned, command in zip(found.methods.values(), commands(found), strict=True)
    }
    answer: dict[str, Any] = plain_json(
        {
            "methods": whole,
            "trials": found.asked.trials,
            "seeds": found.asked.seeds,
            "out": None if found.folder is None else str(found.folder),
            "notes": list(found.notes),
        }
    )
    return answer


def _csv(found: Tuning) -> bytes:
    keys = list(dict.fromkeys(key for t in found.methods.values() for key in t.space))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "trial", "state", "validation", "rounds", "seconds", *keys])
    for tuned in found.methods.values():
        for t in tuned.trials:
            value = "" if t.value is None else f"{t.value:.6g}"
            settings = [t.settings.get(key, "") for key in keys]
            row = [tuned.method, t.number, t.state, value, len(t.curve), f"{t.seconds:.3f}"]
            writer.writerow([*row, *settings])
    return text.getvalue().encode()


def history_picture(all_tuned: Sequence[Tuned]) -> Panels:
    """The score of each trial and the best so far, a panel for each method, one scale for all."""
    charts = [_history_chart(tuned, last=tuned is all_tuned[-1]) for tuned in all_tuned]
    return Panels("", (tuple(charts),), (max(5.0, 3.6 * len(charts)), 3.6), shared="y")


def _history_chart(tuned: Tuned, *, last: bool) -> Chart:
    numbers, values = np.array(
        [(t.number, 100 * t.value) for t in tuned.trials if t.value is not None]
    ).T
    course = steps(numbers, np.maximum.accumulate(values))
    marks: list[Mark] = [
        Dots(numbers, values, BLUE, "complete", size=4),
        Line(*course, ORANGE, "best so far", width=1.5),
    ]
    ended = [(t.number, 100 * max(t.curve)) for t in tuned.trials if t.value is None and t.curve]
    if ended:
        given_up, reached = np.array(ended).T
        marks.append(Dots(given_up, reached, GREY, "pruned, best round", "cross"))
    best = [tuned.best.number], [100 * (tuned.best.value or 0)]
    marks.append(Dots(*best, RED, "chosen", "star", size=11))
    x, y = Axis("trial", whole=True), Axis(f"validation {tuned.metric}, percent")
    return Chart(tuned.method, x, y, tuple(marks), legend="inside" if last else "")
