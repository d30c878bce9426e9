"""An append-only log of events: one JSON object per line, each with the hash of the line before.

`check_audit` detects a line that was changed or removed later, except at the end of the log.
Several processes may write to one log. A file lock lets only one of them write at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError, DataError

RESTORE = "restore it from a backup"
UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, ConfigError)
Json = dict[str, Any]  # a JSON object, from a file or a packet; its readers check it


class Audit:
    """Append events to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.size, self.last, self.handle = -1, "", -1
        self.unseen = True  # whether another process has written since this was last set to False
        if path.exists():
            with self.alone():
                pass

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the log, and set `unseen` if another process has written since the last lock."""
        self.handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX)
            if os.fstat(self.handle).st_size != self.size:
                self.unseen = True
                data = self.path.read_bytes()
                whole = data[: data.rfind(b"\n") + 1]
                if whole != data:  # a crash cut off the last line
                    os.truncate(self.path, len(whole))
                self.last = _digest(whole.splitlines(keepends=True)[-1]) if whole else ""
            self.size = os.fstat(self.handle).st_size
            yield
        finally:
            os.close(self.handle)  # this releases the lock
            self.handle = -1

    def note(self, event: str, **values: object) -> None:
        """Append one event. On return, the operating system has received the line."""
        if self.handle < 0:
            with self.alone():
                return self.note(event, **values)
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z"
        text = json.dumps({"time": now, "event": event, **values, "before": self.last}, default=str)
        line = text.encode() + b"\n"
        if os.write(self.handle, line) != len(line):  # nothing may be sent without a log entry
            raise DataError(f"audit log {self.path} cannot be written; its disk is full")
        if "release" in values:
            os.fsync(self.handle)  # a power cut must not restore spent privacy budget
        self.size, self.last = self.size + len(line), _digest(line)
        return None

    def events(self, **values: object) -> list[Json]:
        """Return the events with the given values."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        try:
            events = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise DataError(f"audit log {self.path} cannot be read: {error}") from error
        for number, event in enumerate(events, start=1):
            if not (isinstance(event, dict) and isinstance(event.get("event"), str)):
                raise DataError(f"audit log {self.path}, line {number} is no event; {RESTORE}")
        return [event for event in events if values.items() <= event.items()]

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Name the log in the error if a reader finds a missing value or a wrong type."""
        try:
            yield
        except UNUSABLE as error:
            why = f"has a value that cannot be read ({type(error).__name__})"
            raise DataError(f"audit log {self.path} {why}; {RESTORE}") from error


def check_audit(path: Path) -> list[str]:
    """Return the hashes of all lines. Raise an error if a line lacks the hash of the one before."""
    chain: list[str] = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        before = chain[-1] if chain else ""
        try:
            linked = json.loads(line)["before"] == before and line.endswith(b"\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            linked = False
        if not linked:
            raise DataError(f"audit log {path}, line {number} was changed or follows a missing one")
        chain.append(_digest(line))
    return chain


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:32]
