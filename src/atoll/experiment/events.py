"""`events.jsonl` of a study: a line whenever a cell begins, ends, fails or is stopped.

Several processes may write. A killed process may leave half a line: readers skip it, and the next
writer begins another line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of a study; none if nothing was begun."""
    path = folder / EVENTS
    return _parse(path.read_bytes()) if path.exists() else []


def _parse(lines: bytes) -> list[dict[str, Any]]:
    found = []
    for line in lines.decode(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def failures(folder: Path) -> dict[str, str]:
    """The last error of every cell that failed and was not begun again."""
    failed: dict[str, str] = {}
    for event in read_events(folder):
        if event.get("event") == "failed":
            failed[event["cell"]] = str(event.get("error", "failed"))
        else:
            failed.pop(event.get("cell", ""), None)
    return failed


def append_event(folder: Path, event: Mapping[str, Any]) -> None:
    """Write one more line."""
    with (folder / EVENTS).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, and all is written
        line = json.dumps(event).encode() + b"\n"
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


class NewEvents:
    """Reads the lines that appear in events.jsonl from now on."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS
        self.place = self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """The whole lines since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.place)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self.place += len(text)
        return _parse(text)
