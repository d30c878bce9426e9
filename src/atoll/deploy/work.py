"""The work of a run at a site: questions and seconds per round, which no restart resets.

The seconds of packets that are not steps (`OTHERS`) count for the round before the first one.

The audit log has an entry for every answer. A file names the round of a running step, or `BEFORE`
for a running packet of `OTHERS`. Without this file, a server could stop the job during each of
them, and no log entry would count it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from atoll.deploy.audit import Audit
from atoll.engines.fleet import BAD

SENT = "sent"
UNDER_WAY = "step_under_way"
BEFORE = -1  # the round before the first one
LEAST = 1.0  # seconds that an interrupted step counts at least
OTHERS = ("hello", "begin", "deliver", "delivered", "kept")
"""Packets that are not steps, and their events in the audit log."""


def new_mark() -> str:
    """Return a name of a file for a running packet of `OTHERS`: several jobs may run at a site."""
    return f"{UNDER_WAY}-{secrets.token_hex(8)}"


class Work:
    """Counts from the audit log. An interrupted step counts for at most `longest` seconds."""

    def __init__(
        self, audit: Audit, run: str, folder: Path, longest: float, mark: str = UNDER_WAY
    ) -> None:
        self.questions, self.seconds = Counter[int](), defaultdict[int, float](float)
        self.run, self.mark, self.file = run, folder / mark, -1
        note_interrupted(audit, self.mark, longest)
        with audit.readable():
            for event in audit.events(run=run):
                # Any failure has a reason. A private step that diverged is logged as sent.
                asked = event["event"] == SENT or "reason" in event
                if type(event.get("round")) is int and (asked or event["event"] in OTHERS):
                    self.questions[event["round"]] += asked
                    self.seconds[event["round"]] += event.get("seconds", 0.0)

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        """Count a question and its time, even if the process ends within the block."""
        began = time.monotonic()
        try:
            self.begin(number)
            yield
        finally:
            self.end(number, time.monotonic() - began)

    def begin(self, number: int) -> None:
        """Count a question of a round, and write and lock the file of the running step."""
        self.questions[number] += 1
        # Under another name until it is locked, so that no starting job takes it for a left-over.
        new = self.mark.with_name(f".{self.mark.name}")
        self.file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        fcntl.flock(self.file, fcntl.LOCK_SH)
        os.write(self.file, json.dumps([self.run, number, time.time()]).encode())
        os.replace(new, self.mark)

    def touch(self) -> None:
        """Note that the step still runs."""
        with suppress(OSError):
            os.utime(self.mark)

    def end(self, number: int, seconds: float) -> None:
        """Count the time of an answer, and delete the file of the running step."""
        self.seconds[number] += seconds
        self.mark.unlink(missing_ok=True)
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def note_interrupted(audit: Audit, mark: Path, longest: float) -> None:
    """Log a step whose process ended during it, and delete its file. A running step is locked."""
    with suppress(FileNotFoundError, BlockingIOError), mark.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        about = os.fstat(file.fileno())
        if not about.st_nlink:  # the step has just ended
            return
        with suppress(ValueError, RecursionError):  # a crash may leave an empty file
            run, number, start = msgspec.json.decode(file.read(), type=tuple[str, int, float])
            seconds = round(min(max(about.st_mtime - start, LEAST), longest), 3)
            reason = "its process ended in a step"
            audit.note(BAD, reason=reason, seconds=seconds, run=run, round=number)
        mark.unlink(missing_ok=True)
