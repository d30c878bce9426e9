"""A study: many runs in one folder, each to its end once, whatever happens in between.

`STUDY/study.json` says what the study is; `STUDY/cells/NAME/` is an ordinary folder of a run, so
every command that reads a run reads a cell. A cell is finished when its result.json is there, and
is then only read; one that was stopped goes on at its last checkpoint, and one that is asked for
with more seeds than it has goes on with those that it lacks. `STUDY/events.jsonl` grows by one line
whenever a cell begins, ends, fails or is stopped.

Cells that differ in numbers alone, as points of a grid do, are one program where that gains time
(`studies.batch_runs`). Each still has the folder, the events and the errors that it would have by
itself. So it is where several processes share the work (`studies.parallel`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import time
import traceback
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from atoll.core.errors import AtollError, ConfigError
from atoll.core.files import write_atomically
from atoll.core.method import Method
from atoll.experiment.command import what_differs
from atoll.experiment.config import RunConfig, config_text, make_config, parse_config
from atoll.experiment.events import append_event, read_events
from atoll.experiment.folder import read_json
from atoll.experiment.hardware import device_answers
from atoll.experiment.loggers.base import check_logs
from atoll.experiment.problem import Data
from atoll.experiment.run import Observer, Silent, Stopped, name_configuration, run_config
from atoll.experiment.sweep import Parted, SeedFailed
from atoll.studies.batch_runs import on_gpu, run_configs, why_apart
from atoll.studies.federations import Federations
from atoll.studies.schedule import check_jobs, choose_jobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """One run of a study: all seeds of one configuration.

    Attributes:
        name: Its folder's name.
        config: What is run.
        labels: Its place in the study, such as {"method": "fedavg", "data": "cora"}.
        method: What Python gave in place of a name.
        data: What Python gave in place of a name.
    """

    name: str
    config: RunConfig
    labels: Mapping[str, Any] = field(default_factory=dict)
    method: Method | None = None
    data: Data | None = None


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


@runtime_checkable
class SeesProcesses(Protocol):
    """An observer who also wants to know about cells in several processes."""

    def side_by_side(self, jobs: int, threads: int) -> None:
        """Before the first cell: so many at once, each with so many threads."""

    def should_stop(self) -> bool:
        """Whether to stop, also while no cell is there to ask."""


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
    federations: Federations | None = None,
    log: str | Sequence[str] = (),
    at_once: bool | None = None,
    adds: bool = False,
    jobs: int | str = 1,
) -> list[Outcome]:
    """Run what is not finished yet; a cell that fails is noted, and the rest goes on.

    Args:
        folder: The study's; it may hold an earlier call's cells.
        cells: In the order of the tables; names are unique.
        about: What the study is, for its readers: "kind", "command" and whatever the kind needs.
        observer: Hears about progress.
        federations: Those that cells share and that were made already, to check them, say.
        log: Where else the cells' numbers go (`experiment.loggers.base.LOGS`).
        at_once: Whether neighbours that differ in numbers alone are trained in one program; None
            does on a GPU. On a CPU it gains nothing.
        adds: Whether cells of earlier calls stay part of the study, as one table's beside another.
        jobs: Processes that cells are run in, side by side; "auto" chooses. With 1 all are run
            here, in the order of `cells`; with more the dearest come first.

    Raises:
        Stopped: The user stopped it; all that was done is saved.
    """
    check_logs(log)
    check_jobs(jobs)
    observer = observer or SilentStudy()
    federations = federations or Federations()
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two cells of the study are called '{twice}'; give each its own name")
    with held(folder):
        check_kind(folder, about)
        for cell in cells:
            check_same(cell, folder / "cells" / cell.name)
        described = [
            {"name": cell.name, "labels": dict(cell.labels), "seeds": cell.config.seeds}
            for cell in cells
        ]
        if adds and (folder / "study.json").exists():
            before = read_json(folder / "study.json")["cells"]
            described = [*(one for one in before if one["name"] not in names), *described]
        text = json.dumps({**about, "cells": described}, indent=2)
        write_atomically(folder / "study.json", text.encode())
        finished = [cell for cell in cells if read_cell(folder, cell) is not None]
        done = {cell.name for cell in finished}
        _note_ends(folder, cells, done)
        observer.begin(cells, len(finished))
        groups = _groups(folder, cells, at_once)
        outcomes: dict[str, Outcome] = {}
        waiting = [cell.config for cell in cells if cell.name not in done]
        count = min(choose_jobs(jobs, waiting), len(groups) - len(done))
        if count > 1:
            todo = [group for group in groups if group[0].name not in done]
            from atoll.studies.parallel import run_side_by_side  # which builds on this module

            outcomes = run_side_by_side(folder, todo, observer, jobs=count, log=log)
        for group in groups:
            if group[0].name in outcomes:
                continue
            for outcome in run_group(folder, group, observer, divide=federations, log=log):
                observer.ended(outcome)
                outcomes[outcome.cell.name] = outcome
                stop_without_device(outcome)
    return [outcomes[name] for name in names]


def read_cell(folder: Path, cell: Cell) -> Outcome | None:
    """A finished cell of a study; None if it is not finished."""
    to = folder / "cells" / cell.name
    if not (to / "result.json").exists():
        return None
    summary = read_json(to / "result.json")
    if summary["seeds"] < cell.config.seeds:
        return None
    return Outcome(cell, to, summary, fresh=False)


def _groups(folder: Path, cells: Sequence[Cell], at_once: bool | None) -> list[list[Cell]]:
    """Neighbours that are not finished and may be one program; everybody else alone."""
    groups: list[list[Cell]] = []
    alone = True
    for cell in cells:
        wished = on_gpu(cell.config) if at_once is None else at_once
        given = cell.method is not None or cell.data is not None
        before, alone = alone, not wished or given or read_cell(folder, cell) is not None
        if before or alone or why_apart(groups[-1][0].config, cell.config):
            groups.append([cell])
        else:
            groups[-1].append(cell)
    return groups


def run_group(
    folder: Path, group: Sequence[Cell], observer: StudyObserver, **how: Any
) -> Iterator[Outcome]:
    """The outcomes of some cells, in order; several are one program if they can be.

    `how` is for `run_config`. The folder must be `held`, if not by this process, then for it.
    """
    if len(group) == 1:
        yield read_cell(folder, group[0]) or run_cell(folder, group[0], observer, **how)
        return
    try:
        _run_at_once(folder, group, observer, **how)
    except SeedFailed as failed:
        # It fails alone as well, with its own words; the others go on where they are.
        which = failed.place // group[0].config.seeds
        logger.info("%s goes on by itself, because of %s", group[which].name, failed)
        others = [*group[:which], *group[which + 1 :]]
        rest = iter(list(run_group(folder, others, observer, **how)))
        for place, cell in enumerate(group):
            yield run_cell(folder, cell, observer, **how) if place == which else next(rest)
    except (Parted, AtollError) as reason:
        logger.info("%d cells are run one by one, because %s", len(group), reason)
        for cell in group:
            yield run_cell(folder, cell, observer, **how)
    else:
        for cell in group:
            yield _ended(folder, cell)


def stop_without_device(outcome: Outcome) -> None:
    """Stop a process whose GPU went with a cell that failed: every other cell would fail too."""
    if outcome.error and not device_answers():
        raise AtollError(
            f"the GPU no longer answers this process after {outcome.cell.name} failed; everything "
            "that is finished is kept: call the same command again to go on with the others"
        )


def _run_at_once(folder: Path, group: Sequence[Cell], observer: StudyObserver, **how: Any) -> None:
    folders = [folder / "cells" / cell.name for cell in group]
    for cell, to in zip(group, folders, strict=True):
        note(folder, "begin", cell, together=len(group))
        write_atomically(to / "asked.toml", _asked(cell).encode())
    try:
        run_configs(
            [cell.config for cell in group],
            outs=folders,
            resuming=True,
            observers=[observer.cell(cell) for cell in group],
            **how,
        )
    except (Stopped, KeyboardInterrupt):
        for cell in group:
            note(folder, "stopped" if read_cell(folder, cell) is None else "end", cell)
        raise


def run_cell(folder: Path, cell: Cell, observer: StudyObserver, **how: Any) -> Outcome:
    """Run a cell, or go on with it; `how` is for `run_config`. The folder must be `held`."""
    to = folder / "cells" / cell.name
    note(folder, "begin", cell)
    try:
        write_atomically(to / "asked.toml", _asked(cell).encode())
        heard = observer.cell(cell)
        objects = {"method": cell.method, "data": cell.data}
        run_config(cell.config, out=to, observer=heard, resuming=True, **(objects | how))
    except (Stopped, KeyboardInterrupt):
        note(folder, "stopped", cell)
        raise
    except AtollError as error:
        return fail(folder, cell, str(error))
    except Exception as error:  # a fault of one method must not cost hours of the others
        write_atomically(to / "error.txt", traceback.format_exc().encode())
        sentence = f"internal error: {type(error).__name__}: {error}".splitlines()[0]
        return fail(folder, cell, f"{sentence}; {to / 'error.txt'} says where")
    return _ended(folder, cell)


def _ended(folder: Path, cell: Cell) -> Outcome:
    note(folder, "end", cell)
    outcome = read_cell(folder, cell)
    assert outcome is not None
    return Outcome(cell, outcome.folder, outcome.summary)


def fail(folder: Path, cell: Cell, error: str) -> Outcome:
    """A cell that went wrong, with a line of events.jsonl."""
    note(folder, "failed", cell, error=error)
    return Outcome(cell, folder / "cells" / cell.name, error=error)


def _asked(cell: Cell) -> str:
    """A cell's configuration, and a name for the Python objects that no file can hold."""
    text = config_text(cell.config)
    if cell.method is None and cell.data is None:
        return text
    return f"{text}# objects {name_configuration(cell.config, cell.method, cell.data)}\n"


def check_kind(folder: Path, about: Mapping[str, Any]) -> None:
    """Refuse a folder whose run or other study would be overwritten."""
    if (folder / "config.toml").exists():
        raise ConfigError(f"'{folder}' holds a run; give the study a folder of its own")
    if not (folder / "study.json").exists():
        return
    before = read_json(folder / "study.json")
    for key in ("kind", "paper"):
        if before.get(key) != about.get(key):
            raise ConfigError(
                f"'{folder}' holds another study, of the {key} '{before.get(key)}'; give this one "
                "a folder of its own"
            )


def check_same(cell: Cell, to: Path) -> None:
    """Refuse to mix what was asked differently under one name; more seeds are welcome."""
    path = to / "asked.toml"
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    before = make_config(**parse_config(text, f"'{path}'"))
    # The same data may lie elsewhere by now; and what is accepted changes no number.
    now = msgspec.structs.replace(cell.config, data_root=before.data_root, allow=before.allow)
    as_before = msgspec.structs.replace(now, seeds=before.seeds)
    if text != _asked(replace(cell, config=as_before)) or before.seeds > cell.config.seeds:
        raise ConfigError(
            f"'{to}' was begun with other options "
            f"({what_differs(before, now) or 'Python objects, now others'}); give the study a "
            "folder of its own, or the options that it was begun with (more seeds may be asked for)"
        )


def _note_ends(folder: Path, cells: Sequence[Cell], finished: Container[str]) -> None:
    """Complete the events of a process that was killed: nothing runs while the folder is held."""
    last = {event["cell"]: event["event"] for event in read_events(folder)}
    for cell in cells:
        if last.get(cell.name) == "begin":
            note(folder, "end" if cell.name in finished else "stopped", cell)


def note(folder: Path, event: str, cell: Cell, **more: Any) -> None:
    """One more line of events.jsonl."""
    append_event(folder, {"at": round(time.time(), 3), "event": event, "cell": cell.name, **more})


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
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
