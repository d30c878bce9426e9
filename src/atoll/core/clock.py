"""Timing of a run by stage, for `atoll run --profile`.

Code wraps its work in `with clock.stage("loading")`. `OFF`, the default clock, measures nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

STAGES = (
    *("import", "device", "loading", "partition", "transfer", "views", "recording", "training"),
    *("scoring", "saving", "other"),
)
_NOTHING = nullcontext()


class Clock:
    """Measures wall-clock and processor seconds by stage, unless it is off.

    The time of a nested stage does not count towards the outer stage. The work of other threads
    counts towards the stage of the main thread. The clock calls its attribute `wait` at the
    beginning and end of a stage, because a GPU still works after Python has continued.
    """

    def __init__(self, *, on: bool = False, before: tuple[float, float] = (0.0, 0.0)) -> None:
        self.on = on
        self.wait: Callable[[], object] = lambda: None
        self._seconds = {"import": before} if on else {}
        self._open, self._last = ["other"], _now()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Measure the body of a `with` block as one of `STAGES`."""
        here = self.on and threading.current_thread() is threading.main_thread()
        return self._stage(name) if here else _NOTHING

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        self.wait()
        now, name = _now(), self._open[-1]
        wall, processor = self._seconds.get(name, (0.0, 0.0))
        self._seconds[name] = wall + now[0] - self._last[0], processor + now[1] - self._last[1]
        self._last = now

    def read(self) -> Mapping[str, tuple[float, float]]:
        """Return (wall-clock, processor) seconds of every stage so far, or {} if off."""
        if self.on:
            self._turn()
        return {name: self._seconds[name] for name in STAGES if name in self._seconds}


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


OFF = Clock()
