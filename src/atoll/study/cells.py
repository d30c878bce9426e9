"""A study: many runs in one folder, each to its end once, whatever happens in between.

`STUDY/study.json` says what the study is; `STUDY/cells/NAME/` is an ordinary folder of a run, so
every command that reads a run reads a cell. A cell is finished when its result.json is there, and
is then only read; one that was stopped goes on at its last checkpoint. `STUDY/events.jsonl` grows
by one line whenever a cell begins, ends or fails.

Cells that differ in numbers alone, as points of a grid do, are one program where that gains time
(`study.grid`). Each still has the folder, the events and the errors that it would have by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from atoll.core.errors import AtollError, ConfigError
from atoll.engines.checkpoint import write_atomically
from atoll.study.config import RunConfig, config_text
from atoll.study.grid import on_gpu, run_configs, why_apart
from atoll.study.run import Observer, Silent, Stopped, run_config
from atoll.study.sweep import Parted, SeedFailed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """One run of a study: all seeds of one configuration.

    Attributes:
        name: Its folder's name.
        config: What is run.
        labels: Its place in the study, such as {"method": "fedavg", "data": "cora"}.
    """

    name: str
    config: RunConfig
    labels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        cell: Which.
        folder: Where its files are.
        summary: What its result.json holds; None if it failed.
        error: One sentence if it failed.
        fresh: Whether it was run now, not in an earlier call.
    """

    cell: Cell
    folder: Path
    summary: dict[str, Any] | None = None
    error: str | None = None
    fresh: bool = True


class StudyObserver(Protocol):
    """Hears how a study goes."""

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        """Before the first cell; so many were finished in an earlier call."""

    def cell(self, cell: Cell) -> Observer:
        """Before a cell is run: who hears about its rounds."""

    def ended(self, outcome: Outcome) -> None:
        """After a cell, also one that was only read."""


class SilentStudy:
    """Hears everything, says nothing."""

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        pass

    def cell(self, cell: Cell) -> Observer:
        return Silent()

    def ended(self, outcome: Outcome) -> None:
        pass


def run_cells(
    folder: Path,
    cells: Sequence[Cell],
    *,
    about: Mapping[str, Any],
    observer: StudyObserver | None = None,
    at_once: bool | None = None,
) -> list[Outcome]:
    """Run what is not finished yet; a cell that fails is noted, and the rest goes on.

    Args:
        folder: The study's; it may hold an earlier call's cells.
        cells: In the order of the tables; names are unique.
        about: What the study is, for its readers: "kind", "command" and whatever the kind needs.
        observer: Hears about progress.
        at_once: Whether neighbours that differ in numbers alone are trained in one program; None
            does on a GPU. On a CPU it gains nothing.

    Raises:
        Stopped: The user stopped it; all that was done is saved.
    """
    observer = observer or SilentStudy()
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two cells of the study are called '{twice}'; give each its own name")
    with _held(folder):
        for cell in cells:
            _check_same(cell, folder / "cells" / cell.name)
        described = [{"name": cell.name, "labels": dict(cell.labels)} for cell in cells]
        text = json.dumps({**about, "cells": described}, indent=2)
        write_atomically(folder / "study.json", text.encode())
        finished = sum(read_cell(folder, cell) is not None for cell in cells)
        observer.begin(cells, finished)
        outcomes = []
        for group in _groups(folder, cells, at_once):
            for outcome in _run_group(folder, group, observer):
                observer.ended(outcome)
                outcomes.append(outcome)
    return outcomes


def read_cell(folder: Path, cell: Cell) -> Outcome | None:
    """A finished cell of a study; None if it is not finished."""
    to = folder / "cells" / cell.name
    if not (to / "result.json").exists():
        return None
    summary = json.loads((to / "result.json").read_text(encoding="utf-8"))
    return Outcome(cell, to, summary, fresh=False)


def _groups(folder: Path, cells: Sequence[Cell], at_once: bool | None) -> list[list[Cell]]:
    """Neighbours that are not finished and may be one program; everybody else alone."""
    groups: list[list[Cell]] = []
    alone = True
    for cell in cells:
        wished = on_gpu(cell.config) if at_once is None else at_once
        before, alone = alone, not wished or read_cell(folder, cell) is not None
        if before or alone or why_apart(groups[-1][0].config, cell.config):
            groups.append([cell])
        else:
            groups[-1].append(cell)
    return groups


def _run_group(folder: Path, group: Sequence[Cell], observer: StudyObserver) -> Iterator[Outcome]:
    """The outcomes of some cells, in order; several are one program if they can be."""
    if len(group) == 1:
        yield read_cell(folder, group[0]) or _run_cell(folder, group[0], observer)
        return
    try:
        _run_at_once(folder, group, observer)
    except SeedFailed as failed:
        # It fails alone as well, with its own words; the others go on where they are.
        which = failed.place // group[0].config.seeds
        log.info("%s goes on by itself, because of %s", group[which].name, failed)
        rest = iter(list(_run_group(folder, [*group[:which], *group[which + 1 :]], observer)))
        for place, cell in enumerate(group):
            yield _run_cell(folder, cell, observer) if place == which else next(rest)
    except (Parted, AtollError) as reason:
        log.info("%d cells are run one by one, because %s", len(group), reason)
        for cell in group:
            yield _run_cell(folder, cell, observer)
    else:
        for cell in group:
            yield _ended(folder, cell)


def _run_at_once(folder: Path, group: Sequence[Cell], observer: StudyObserver) -> None:
    folders = [folder / "cells" / cell.name for cell in group]
    for cell, to in zip(group, folders, strict=True):
        _note(folder, "begin", cell, together=len(group))
        write_atomically(to / "asked.toml", config_text(cell.config).encode())
    try:
        run_configs(
            [cell.config for cell in group], outs=folders, resuming=True,
            observers=[observer.cell(cell) for cell in group],
        )  # fmt: skip
    except (Stopped, KeyboardInterrupt):
        for cell in group:
            _note(folder, "stopped" if read_cell(folder, cell) is None else "end", cell)
        raise


def _run_cell(folder: Path, cell: Cell, observer: StudyObserver) -> Outcome:
    to = folder / "cells" / cell.name
    _note(folder, "begin", cell)
    try:
        write_atomically(to / "asked.toml", config_text(cell.config).encode())
        heard = observer.cell(cell)
        run_config(cell.config, out=to, observer=heard, resuming=True)
    except (Stopped, KeyboardInterrupt):
        _note(folder, "stopped", cell)
        raise
    except AtollError as error:
        _note(folder, "failed", cell, error=str(error))
        return Outcome(cell, to, error=str(error))
    return _ended(folder, cell)


def _ended(folder: Path, cell: Cell) -> Outcome:
    _note(folder, "end", cell)
    outcome = read_cell(folder, cell)
    assert outcome is not None
    return Outcome(cell, outcome.folder, outcome.summary)


def _check_same(cell: Cell, to: Path) -> None:
    """Refuse to mix what was asked differently under one name."""
    path = to / "asked.toml"
    if path.exists() and path.read_text(encoding="utf-8") != config_text(cell.config):
        raise ConfigError(
            f"'{to}' was begun with other options; give the study a folder of its own, or the "
            "options that it was begun with"
        )


def _note(folder: Path, event: str, cell: Cell, **more: Any) -> None:
    line = json.dumps({"at": round(time.time(), 3), "event": event, "cell": cell.name, **more})
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder, for this process alone; a killed process lets it go."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"'{folder}' is not a folder; give another --out") from None
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process works on the study in '{folder}'") from None
        yield
