"""The events of a study, and the status of a run or a study while another process works on it.

A cell is one run of a study. `events.jsonl` gets a line whenever a cell begins, ends, fails, or is
pruned or stopped. Several processes may write. A killed process may leave half a line: readers skip
it, and the next writer begins a new line.

A status is read from files only, without locks and without torch, so it costs little. A killed
process cannot report its own death, so the status has the seconds since the last sign of life.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError, DataError

EVENTS = "events.jsonl"
SILENT = 60.0  # seconds without a sign after which a user should look
STATES = {"begin": "running", "end": "finished"} | {s: s for s in ("pruned", "failed", "stopped")}
"""The state of a cell after its last event."""
Json = Mapping[str, Any]  # an object of a JSON file


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return all complete lines of a study's events, or [] before its first cell."""
    path = folder / EVENTS
    return _parse(path.read_bytes()) if path.exists() else []


def _parse(lines: bytes) -> list[dict[str, Any]]:
    found = []
    for line in lines.decode(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def failures(folder: Path) -> dict[str, str]:
    """Return the last error of every cell that failed and was not begun again."""
    failed: dict[str, str] = {}
    for event in read_events(folder):
        if event.get("event") == "failed":
            failed[event["cell"]] = str(event.get("error", "failed"))
        elif event.get("event") != "notes":
            failed.pop(event.get("cell", ""), None)
    return failed


def append_event(folder: Path, event: Mapping[str, Any]) -> None:
    """Append an event to events.jsonl, as one line."""
    with (folder / EVENTS).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        line = json.dumps(event).encode() + b"\n"
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


class NewEvents:
    """Read the lines that are added to events.jsonl from now on."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS
        self.place = self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """Return the complete lines since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.place)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self.place += len(text)
        return _parse(text)


@dataclass(frozen=True)
class Status:
    """A run or a study at one moment."""

    folder: Path
    kind: str  # "run", or the kind of study: "compare", "tune", ...
    title: str
    cells: Mapping[str, int]  # numbers of finished, failed, pruned, stopped, running, left cells
    now: Json | None = None  # the progress.json of the current run, with the name of its "cell"
    others: Sequence[Json] = ()  # the same for other cells that run at the same time
    silent: float | None = None  # seconds since the last sign of life, if that is too long
    gone: bool = False  # whether its process is known to have ended
    left: float | None = None  # estimated remaining seconds
    best: Sequence[tuple[str, str, float]] = ()  # so far: group, cell, validation score
    failures: Sequence[tuple[str, str]] = ()  # the latest ones, each a cell and its reason
    result: Json = field(default_factory=dict)  # final metrics of a finished run
    metric: str = "accuracy"  # of the scores

    @property
    def finished(self) -> bool:
        """Whether nothing is left to wait for."""
        return not any(self.cells.get(state) for state in ("running", "stopped", "left"))


class StatusReader:
    """Read a folder's status repeatedly. Files that cannot change any more are read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summaries: dict[str, Json] = {}
        self.read()  # refuses a folder without a run or a study

    def read(self) -> Status:
        """Return the current status."""
        if (self.folder / "study.json").exists():
            return self._study()
        if (self.folder / "config.toml").exists():
            return self._run()
        lacking = "neither a run nor a study (no config.toml, no study.json)"
        raise ConfigError(f"'{self.folder}' holds {lacking}")

    def _run(self) -> Status:
        try:
            config = tomllib.loads((self.folder / "config.toml").read_text(encoding="utf-8"))
            title = f"{config['method']} on {config['data']}"
        except (OSError, LookupError, ValueError, RecursionError) as error:
            raise DataError(f"config.toml of '{self.folder}' cannot be read: {error}") from error
        if (done := _json(self.folder / "result.json")) is not None:
            found = {"result": done["metrics"], "metric": config.get("metric", "accuracy")}
            return Status(self.folder, "run", title, {"finished": 1}, **found)
        now = _json(self.folder / "progress.json") or {"cell": ""}
        sign = _age(self.folder / ("progress.json" if "pid" in now else "config.toml"))
        state, (silent, gone) = now.get("state", "running"), _silence(now, sign)
        silent = silent if state == "running" else None
        left = _remaining(now) if state == "running" and not silent else None
        return Status(self.folder, "run", title, {state: 1}, now, (), silent, gone, left)

    def _study(self) -> Status:
        study = _json(self.folder / "study.json") or {"cells": []}
        cells, events = study["cells"], read_events(self.folder)
        states = self._states(cells, events)
        counts = Counter(states.values())
        running = [self._now(name, events) for name, state in states.items() if state == "running"]
        # One sign of life is enough, because the cells share one process.
        signs = [(silent is None, now.get("updated", 0.0)) for now, silent, _ in running]
        now, silent, gone = running[signs.index(max(signs))] if signs else (None, None, False)
        others = [one for one, *_ in running if one is not now]
        failed = [event for event in events if event["event"] == "failed"]
        reasons = {event["cell"]: event.get("error", "") for event in failed}
        failures = [(k, why) for k, why in reasons.items() if states.get(k) == "failed"]
        kind = str(study.get("kind", "study"))
        current = [] if now is None or silent else [now, *others]
        left = _time_left(events, counts["left"], current)
        asked = study.get("request", {}).get("options") or study.get("asked", {}).get("config", {})
        metric = str(asked.get("metric") or "accuracy")
        best = self._best(kind, cells, states, metric)
        title = f"{kind} of {len(cells)} cells"
        seen = now, others, silent, gone, left, best, failures[-3:]
        return Status(self.folder, kind, title, dict(counts), *seen, metric=metric)

    def _states(self, cells: Sequence[Json], events: Sequence[Json]) -> dict[str, str]:
        last = {event["cell"]: event["event"] for event in events if event["event"] != "notes"}
        states = {}
        for cell in cells:
            name = cell["name"]
            state = STATES.get(last.get(name, ""), "left")
            # A result decides, even if the event about it was lost. It does not count if it has
            # fewer seeds than are now requested, or if the user has deleted it.
            if state != "pruned" and self._summary(name, cell.get("seeds", 1)):
                state = "finished"
            elif state == "finished":
                state = "left"
            states[name] = state
        return states

    def _now(self, running: str, events: Sequence[Json]) -> tuple[Json, float | None, bool]:
        """Return a cell's progress, its silent seconds if too many, and whether it has died."""
        path = self.folder / "cells" / running / "progress.json"
        begun = next(e["at"] for e in reversed(events) if e["cell"] == running)
        sign, progress = max(time.time() - begun, 0.0), _json(path) or {}
        if progress and progress["updated"] < begun - 1:
            progress = {}  # from an earlier call, before the cell was begun again
        elif progress:
            sign = min(sign, _age(path))
        return {"cell": running, **progress}, *_silence(progress, sign)

    def _best(
        self, kind: str, cells: Sequence[Json], states: Mapping[str, str], metric: str
    ) -> list[tuple[str, str, float]]:
        """Return the best finished cell of each method (tuning) or data set (other studies)."""
        best: dict[str, tuple[str, str, float]] = {}
        for cell in cells:
            name, labels = cell["name"], cell.get("labels", {})
            if states[name] != "finished" or labels.get("role") == "test":
                continue
            summary = self._summary(name)
            value = summary.get("metrics", {}).get(f"val_{metric}", {}).get("mean")
            whose = str(labels.get("method") if kind == "tune" else summary.get("data", ""))
            if value is not None and value > best.get(whose, ("", "", -1.0))[2]:
                best[whose] = (whose, name, value)
        return list(best.values())

    def _summary(self, name: str, seeds: int = 1) -> Json:
        """Return a cell's result.json, or {} if it is missing or has fewer seeds."""
        if self.summaries.get(name, {}).get("seeds", 0) < seeds:
            found = _json(self.folder / "cells" / name / "result.json")
            if found is None or found["seeds"] < seeds:
                return {}
            self.summaries[name] = found
        return self.summaries[name]


def _json(path: Path) -> Json | None:
    """Return a file's content, or None if it is missing. Writers replace files as a whole."""
    try:
        found: Json = json.loads(path.read_text(encoding="utf-8"))
        return found
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"'{path}' cannot be read: {error}") from error


def _age(path: Path) -> float:
    """Return the seconds since a file was written."""
    return max(time.time() - path.stat().st_mtime, 0.0) if path.exists() else 0.0


def _silence(progress: Json, sign: float) -> tuple[float | None, bool]:
    """Return the silent seconds, if too many, and whether the process is known to have ended."""
    gone, patience = False, SILENT
    if "pid" in progress:
        gone = progress["host"] == socket.gethostname() and not _alive(progress["pid"])
        # A round may take long. A dead process sends no more signs.
        patience = 0.0 if gone else max(SILENT, 5 * progress["per_round"])
    return (sign if sign > patience else None), gone


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # the process belongs to another user
    # An ended process stays in the list until its parent waits for it. Linux marks it.
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def _remaining(progress: Json) -> float | None:
    """Estimate the seconds that a run still needs, or return None before its first round ends."""
    if "per_round" not in progress:
        return None
    return float((progress["total"] - progress["done"]) * progress["per_round"])


def _time_left(events: Sequence[Json], left: int, current: Sequence[Json]) -> float | None:
    """Estimate the remaining seconds, from a cell's mean time and the current parallelism."""
    began, took = {}, []
    for event in events:
        if event["event"] == "begin":
            began[event["cell"]] = event["at"]
        elif event["event"] in ("end", "pruned") and event["cell"] in began:
            took.append(event["at"] - began.pop(event["cell"]))
    took = took or [now["total"] * now["per_round"] for now in current if "per_round" in now]
    if not took or not current:
        return None
    each = sum(took) / len(took)
    need = [each / 2 if now is None else now for now in map(_remaining, current)]
    return float(max([(sum(need) + left * each) / len(current), *need]))
