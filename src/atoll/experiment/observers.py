"""A sign of life for other processes: what a run leaves in `progress.json` for `atoll watch`.

The file is small, replaced in one step, and written at most once a second, so that a run pays
nothing for it; a disk that is full does not stop the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from atoll.experiment.metrics import mean_over_clients

if TYPE_CHECKING:
    from atoll.experiment.config import RunConfig
    from atoll.experiment.history import History
    from atoll.experiment.result import Result
    from atoll.experiment.run import Observer

PROGRESS = "progress.json"
EVERY = 1.0
"""Least seconds between two signs of life."""
POINTS = 120
"""Most points of the validation curve in the file."""


@runtime_checkable
class HearsTheEnd(Protocol):
    """An observer that also wants the result."""

    def end(self, result: Result) -> None:
        """After the last round, when everything is saved."""


class Heard:
    """Passes the events of a run to several observers (`experiment.run.Observer`)."""

    def __init__(
        self, observer: Observer, progress: Progress | None, logs: Sequence[Observer]
    ) -> None:
        self.observer, self.progress = observer, progress
        self.all: list[Any] = [observer, *([progress] if progress else []), *logs]

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        for one in self.all:
            one.begin(config, engine, why, notes)

    def round(self, seed: int, history: History) -> None:
        for one in self.all:
            one.round(seed, history)

    def should_stop(self) -> bool:
        stop = self.observer.should_stop()
        if stop and self.progress:
            self.progress.write("stopped")
        return stop

    def end(self, result: Result) -> None:
        """Pass the result on to those who want it."""
        for one in self.all:
            if isinstance(one, HearsTheEnd):
                one.end(result)


class Progress:
    """Writes `progress.json` while a run goes on."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / PROGRESS
        self.config: RunConfig | None = None
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

    def should_stop(self) -> bool:
        return False

    def end(self, result: Result) -> None:
        self.path.unlink(missing_ok=True)  # result.json says the rest

    def write(self, state: str) -> None:
        """Replace the file; the state is "running" or "stopped"."""
        if self.now is None:
            return
        text = json.dumps({"state": state, **self._content()})
        beside = self.path.with_name(f".{PROGRESS}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(text, encoding="utf-8")
            beside.replace(self.path)
        self.written = time.monotonic()

    def _content(self) -> dict[str, Any]:
        config = self.config
        assert config is not None
        rounds = config.rounds or 0
        # Seeds before the first that is heard of were finished in an earlier run.
        before = (min(self.done) - config.seed) * rounds
        content = {
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
        }
        assert self.now is not None
        return {**content, **self._latest(*self.now)}

    def _latest(self, seed: int, history: History) -> dict[str, Any]:
        curve = self._curve(seed, history)
        known = [value for value in curve if not np.isnan(value)]
        every = -(-len(curve) // POINTS)
        # From the end, so that the newest point is always there.
        thin = curve[::-1][::every][::-1]
        return {
            "seed": seed,
            "round": history.rounds,
            "per_round": round(float(np.median(history.seconds[-20:])), 4),
            "validation": [None if np.isnan(value) else round(value, 4) for value in thin],
            "best": round(max(known), 4) if known else None,
            "best_round": curve.index(max(known)) + 1 if known else None,
        }

    def _curve(self, seed: int, history: History) -> list[float]:
        """Mean validation accuracy of all rounds so far; what is known already is kept."""
        assert self.config is not None
        curve = self.curves.setdefault(seed, [])
        for table in history.scores[self.config.evaluate or "deployed"][len(curve) :]:
            curve.append(float(mean_over_clients(table[:, 1, 0], history.counts[:, 1])))
        return curve
