"""One run of a study: its folder, its events, and how it ends.

`STUDY/cells/NAME/` is the ordinary folder of a run, so every command that reads a run also reads a
run of a study. A run is finished when its result.json is there; it is then only read. A stopped run
continues at its last checkpoint, and one with fewer seeds than requested runs the missing seeds.
`STUDY/events.jsonl` gets one line whenever a run begins, ends, fails, is pruned or is stopped.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from atoll.core.errors import AtollError
from atoll.core.files import write_atomically
from atoll.core.method import Method
from atoll.experiment.baseline import AnyBaseline, Baseline, run_baseline
from atoll.experiment.config import RunConfig, config_text
from atoll.experiment.events import append_event
from atoll.experiment.folder import read_json
from atoll.experiment.hardware import device_answers
from atoll.experiment.observers import Observer
from atoll.experiment.problem import Data, Divide
from atoll.experiment.run import RunPlan, Stopped, name_configuration
from atoll.experiment.sweep import Parted, SeedFailed
from atoll.studies.batch_runs import run_configs

logger = logging.getLogger(__name__)
Json = dict[str, Any]  # an object of a JSON file


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: all seeds of one configuration."""

    name: str  # name of its folder
    config: RunConfig
    labels: Json = field(default_factory=dict)  # its place, such as {"method": "fedavg"}
    method: Method | AnyBaseline | None = None  # in place of the method's name
    data: Data | None = None  # in place of the data's name
    watch: Callable[[Observer], Observer] | None = None  # wraps the observer


@dataclass(frozen=True)
class RunOutcome:
    """How a run of a study ended."""

    run: StudyRun
    folder: Path
    summary: Json | None = None  # the content of its result.json; None if it has none
    error: str | None = None  # one sentence if it failed
    fresh: bool = True  # whether it ended in this call, not in an earlier one
    kind: str = ""  # name of the exception's class; empty if its process died
    cause: Exception | None = None  # the exception, if it was raised in this process
    curve: Sequence[float] = ()  # validation scores before it failed, if recorded
    pruned: bool = False  # whether its observer gave it up


class StudyObserver:
    """Follows the progress of a study; a subclass overrides what it needs."""

    def begin(self, runs: Sequence[StudyRun], finished: int) -> None:
        """Before the first run; an earlier call finished so many."""

    def parallel(self, jobs: int, threads: int) -> None:
        """Before the first run: so many processes, each with so many threads."""

    def run(self, run: StudyRun) -> Observer:
        """Before a run begins: the observer of its rounds."""
        return Observer()

    def ended(self, outcome: RunOutcome) -> None:
        """After a run, also one that was only read."""

    def should_stop(self) -> bool:
        """Whether to stop several processes, also while no run has begun."""
        return False


@runtime_checkable
class ReadsFiles(Protocol):
    """A run's observer that also follows a run in another process, by the files it writes."""

    def notes(self, notes: Sequence[str]) -> None:
        """The remarks on the run's data."""

    def progress(self, progress: Json) -> None:
        """The content of progress.json, whenever it changes."""


@runtime_checkable
class Judges(Protocol):
    """A run's observer that may give the run up because of its validation scores so far."""

    pruned: bool
    curve: list[float]


Observe = Callable[[StudyRun], Observer]  # makes the observer of a run (`StudyObserver.run`)


@dataclass(frozen=True)
class StudySettings:
    """Options that all runs of a study share."""

    folder: Path  # the study's folder, locked by `study.lock_folder` in this or the parent process
    divide: Divide | None = None  # makes the clients of a seed; a cache
    log: str | Sequence[str] = ()  # further loggers (`experiment.loggers.LOGS`)

    def folder_of(self, run: StudyRun) -> Path:
        return self.folder / "cells" / run.name


def read_outcome(folder: Path, run: StudyRun, *, fresh: bool = False) -> RunOutcome | None:
    """A finished run of a study; None if it is not finished."""
    to = folder / "cells" / run.name
    if not (to / "result.json").exists():
        return None
    summary = read_json(to / "result.json")
    finished = summary["seeds"] >= run.config.seeds
    return RunOutcome(run, to, summary, fresh=fresh) if finished else None


def run_group(
    group: Sequence[StudyRun], observe: Observe, settings: StudySettings
) -> Iterator[RunOutcome]:
    """Run some runs and yield their outcomes in order; several share one program if they can."""
    if len(group) == 1:
        yield read_outcome(settings.folder, group[0]) or run_one(group[0], observe, settings)
        return
    try:
        _run_at_once(group, observe, settings)
    except SeedFailed as failed:
        # It fails alone as well, with its own words; the others continue where they are.
        which = failed.place // group[0].config.seeds
        logger.info("%s goes on by itself, because of %s", group[which].name, failed)
        others = [*group[:which], *group[which + 1 :]]
        rest = iter(list(run_group(others, observe, settings)))
        for place, run in enumerate(group):
            yield run_one(run, observe, settings) if place == which else next(rest)
    except (Parted, AtollError) as reason:
        logger.info("%d cells are run one by one, because %s", len(group), reason)
        for run in group:
            yield run_one(run, observe, settings)
    else:
        for run in group:
            yield _ended(run, settings)


def _run_at_once(group: Sequence[StudyRun], observe: Observe, settings: StudySettings) -> None:
    for run in group:
        note(settings.folder, "begin", run.name, together=len(group))
        write_atomically(settings.folder_of(run) / "asked.toml", asked_text(run).encode())
    try:
        run_configs(
            [run.config for run in group],
            outs=[settings.folder_of(run) for run in group],
            observers=[observe(run) for run in group],
            divide=settings.divide,
            log=settings.log,
        )
    except (Stopped, KeyboardInterrupt):
        for run in group:
            ended = read_outcome(settings.folder, run) is not None
            note(settings.folder, "end" if ended else "stopped", run.name)
        raise


def run_one(run: StudyRun, observe: Observe, settings: StudySettings) -> RunOutcome:
    """Run a run to its end, from its last checkpoint if it has one."""
    folder, to = settings.folder, settings.folder_of(run)
    note(folder, "begin", run.name)
    observer = observe(run) if run.watch is None else run.watch(observe(run))
    judge = observer if isinstance(observer, Judges) else None
    try:
        write_atomically(to / "asked.toml", asked_text(run).encode())
        _run(run, observer, settings)
    except (Stopped, KeyboardInterrupt) as stop:
        if isinstance(stop, KeyboardInterrupt) or judge is None or not judge.pruned:
            note(folder, "stopped", run.name)
            raise
    except Exception as error:  # a fault of one method must not cost hours of the others
        sentence = str(error)
        if not isinstance(error, AtollError):
            write_atomically(to / "error.txt", traceback.format_exc().encode())
            sentence = f"internal error: {type(error).__name__}: {error}".splitlines()[0]
            sentence += f"; {to / 'error.txt'} says where"
        return fail(folder, run, sentence, error, judge.curve if judge else ())
    if judge is not None and judge.pruned:
        note(folder, "pruned", run.name)
        return RunOutcome(run, to, pruned=True)
    return _ended(run, settings)


def _run(run: StudyRun, observer: Observer, settings: StudySettings) -> None:
    to, divide, log = settings.folder_of(run), settings.divide, settings.log
    config, method, data = run.config, run.method, run.data
    if isinstance(method, Baseline):
        run_baseline(config, method, out=to, observer=observer, data=data, divide=divide, log=log)
    else:
        RunPlan(config, to, observer, method, data, resuming=True, divide=divide, log=log).run()


def _ended(run: StudyRun, settings: StudySettings) -> RunOutcome:
    note(settings.folder, "end", run.name)
    outcome = read_outcome(settings.folder, run, fresh=True)
    assert outcome is not None
    return outcome


def fail(
    folder: Path,
    run: StudyRun,
    error: str,
    cause: Exception | None = None,
    curve: Sequence[float] = (),
) -> RunOutcome:
    """The outcome of a failed run, with its line in events.jsonl."""
    kind = "" if cause is None else type(cause).__name__
    more = {"kind": kind, "curve": list(curve)} if curve else {"kind": kind}
    note(folder, "failed", run.name, error=error, **more)
    to = folder / "cells" / run.name
    return RunOutcome(run, to, error=error, kind=kind, cause=cause, curve=curve)


def note(folder: Path, event: str, name: str, **more: object) -> None:
    """Append a line to events.jsonl."""
    append_event(folder, {"at": round(time.time(), 3), "event": event, "cell": name, **more})


def asked_text(run: StudyRun) -> str:
    """A run's configuration, and a fingerprint of the Python objects that no file can hold."""
    text = config_text(run.config)
    if run.method is None and run.data is None:
        return text
    return f"{text}# objects {name_configuration(run.config, run.method, run.data)}\n"


def stop_without_device(outcome: RunOutcome) -> None:
    """Stop a process whose GPU was lost with a failed run: every other run would fail too."""
    if outcome.error and not device_answers():
        raise AtollError(
            f"the GPU no longer answers this process after {outcome.run.name} failed; everything "
            "that is finished is kept: call the same command again to go on with the others"
        )
