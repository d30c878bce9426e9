"""Observers of a run: their base class, a combination of several, and `progress.json`.

Other processes (`atoll watch`) read that file. It is small, replaced atomically, and written at
most once a second, so it costs a run almost nothing. A full disk does not stop the run.
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
    """The base class of observers. It ignores all events, and subclasses override methods."""

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        """Handle the start, before the first seed."""

    def round(self, seed: int, history: History) -> None:
        """Handle a round, or several rounds that were replayed together."""

    def should_stop(self) -> bool:
        """Return whether to stop after this round."""
        return False

    def end(self, result: Result) -> None:
        """Handle the end, after everything is saved."""


class Observers(Observer):
    """Pass the events of a run to several observers. Only the user's (`first`) may stop it."""

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
            if isinstance(one, Observer):  # a user's object may lack this method
                one.end(result)


class Progress(Observer):
    """Write `progress.json` while a run trains."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / PROGRESS
        self.began, self.written = time.time(), -np.inf
        self.done: dict[int, int] = {}
        self.curves: dict[int, list[float]] = {}
        self.now: tuple[int, History] | None = None

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.config = config  # no file yet, because a refused run must not leave one

    def round(self, seed: int, history: History) -> None:
        self.done[seed], self.now = history.rounds, (seed, history)
        if time.monotonic() - self.written >= EVERY:
            self.write("running")

    def end(self, result: Result) -> None:
        self.path.unlink(missing_ok=True)  # result.json replaces it

    def write(self, state: str) -> None:
        """Replace the file. The state is "running" or "stopped"."""
        if self.now is None:
            return
        (seed, history), config = self.now, self.config
        curve = self.curves.setdefault(seed, [])  # validation scores of the rounds so far
        curve += validation_curve(history, config, len(curve)).tolist()
        known = [value for value in curve if not np.isnan(value)]
        # From the end, so that the newest point is always included.
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
        # Without the `fsync` of `write_atomically`, which takes longer than a round.
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(content), encoding="utf-8")
            new.replace(self.path)
        self.written = time.monotonic()
