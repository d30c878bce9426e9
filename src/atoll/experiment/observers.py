"""Observers of a run: their base class, several of them as one, and `progress.json`.

Other processes (`atoll watch`) read that file. It is small, replaced in one step, and written at
most once a second, so that a run pays nothing for it. A full disk does not stop the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atoll.experiment.history import validation_curve

if TYPE_CHECKING:
    from atoll.experiment.config import RunConfig
    from atoll.experiment.history import History
    from atoll.experiment.result import Result

PROGRESS = "progress.json"
EVERY = 1.0  # least seconds between two writes of the file
POINTS = 120  # most points of the validation curve in the file


class Observer:
    """Is notified of a run's progress; this one ignores it all, and a subclass overrides some."""

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        """Before the first seed."""

    def round(self, seed: int, history: History) -> None:
        """After every round, or after several that were replayed together."""

    def should_stop(self) -> bool:
        """Whether to stop after this round."""
        return False

    def end(self, result: Result) -> None:
        """After the last round, when everything is saved."""


class Observers(Observer):
    """Passes the events of a run on to several observers; the user's own (`first`) may stop it."""

    def __init__(self, first: Observer | None, out: Path | None, logs: Sequence[Observer]) -> None:
        self.first = first or Observer()
        self.progress = None if out is None else Progress(out)
        self.all = [self.first, *([self.progress] if self.progress else []), *logs]

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        for one in self.all:
            one.begin(config, engine, why, notes)

    def round(self, seed: int, history: History) -> None:
        for one in self.all:
            one.round(seed, history)

    def should_stop(self) -> bool:
        stop = self.first.should_stop()
        if stop and self.progress:
            self.progress.write("stopped")
        return stop

    def end(self, result: Result) -> None:
        for one in self.all:
            if isinstance(one, Observer):  # an object of the user's may have the other methods only
                one.end(result)


class Progress(Observer):
    """Writes `progress.json` while a run trains."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / PROGRESS
        self.began, self.written = time.time(), -np.inf
        self.done: dict[int, int] = {}
        self.curves: dict[int, list[float]] = {}
        self.now: tuple[int, History] | None = None

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.config = config  # nothing to tell yet: a run that is refused now leaves no file

    def round(self, seed: int, history: History) -> None:
        self.done[seed], self.now = history.rounds, (seed, history)
        if time.monotonic() - self.written >= EVERY:
            self.write("running")

    def end(self, result: Result) -> None:
        self.path.unlink(missing_ok=True)  # result.json says the rest

    def write(self, state: str) -> None:
        """Replace the file; the state is "running" or "stopped"."""
        if self.now is None:
            return
        (seed, history), config = self.now, self.config
        curve = self.curves.setdefault(seed, [])  # validation scores of the rounds so far
        curve += validation_curve(history, config, len(curve)).tolist()
        known = [value for value in curve if not np.isnan(value)]
        # From the end, so that the newest point is always there.
        thin = curve[::-1][:: -(-len(curve) // POINTS)][::-1]
        rounds = config.rounds or 0
        # An earlier run finished the seeds before the first one here.
        before = (min(self.done) - config.seed) * rounds
        content = {
            "state": state,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "began": round(self.began, 1),
            "updated": round(time.time(), 1),
            "method": config.method,
            "data": config.data,
            "first_seed": config.seed,
            "seeds": config.seeds,
            "rounds": rounds,
            "done": before + sum(self.done.values()),
            "total": rounds * config.seeds,
            "seed": seed,
            "round": history.rounds,
            "per_round": round(float(np.median(history.seconds[-20:])), 4),
            "metric": config.metric or "accuracy",
            "validation": [None if np.isnan(value) else round(value, 4) for value in thin],
            "best": round(max(known), 4) if known else None,
            "best_round": curve.index(max(known)) + 1 if known else None,
        }
        new = self.path.with_name(f".{PROGRESS}.{os.getpid()}")
        # Without the flush to the disk of `write_atomically`, which takes longer than a round.
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(content), encoding="utf-8")
            new.replace(self.path)
        self.written = time.monotonic()
