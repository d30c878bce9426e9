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
from typing import Any, Protocol, TypedDict, runtime_checkable

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
Json = dict[str, Any]
"""An object of a JSON file."""


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: all seeds of one configuration.

    Attributes:
        name: Name of its folder.
        config: The configuration.
        labels: Its place in the study, such as {"method": "fedavg", "data": "cora"}.
        method: A Python object in place of a method's name, or a baseline.
        data: A Python object in place of a data set's name.
        watch: Wraps the run's observer, in whichever process the run happens; it may prune the run.
    """

    name: str
    config: RunConfig
    labels: Json = field(default_factory=dict)
    method: Method | AnyBaseline | None = None
    data: Data | None = None
    watch: Callable[[Observer], Observer] | None = None


@dataclass(frozen=True)
class RunOutcome:
    """How a run of a study ended.

    Attributes:
        run: The run.
        folder: Its folder.
        summary: The content of its result.json; None if it has none.
        error: One sentence if it failed.
        fresh: Whether it ended in this call, not in an earlier one.
        cause: The exception behind the error, where it was raised in this process.
        pruned: Whether its observer gave it up.
    """

    run: StudyRun
    folder: Path
    summary: Json | None = None
    error: str | None = None
    fresh: bool = True
    cause: Exception | None = None
    pruned: bool = False


class StudyObserver(Protocol):
    """Follows the progress of a study."""

    def begin(self, runs: Sequence[StudyRun], finished: int) -> None:
        """Before the first run; an earlier call finished so many."""

    def run(self, run: StudyRun) -> Observer:
        """Before a run begins: the observer of its rounds."""

    def ended(self, outcome: RunOutcome) -> None:
        """After a run, also one that was only read."""


@runtime_checkable
class SeesProcesses(Protocol):
    """A study's observer that also follows runs in other processes."""

    def parallel(self, jobs: int, threads: int) -> None:
        """Before the first run: so many processes, each with so many threads."""

    def should_stop(self) -> bool:
        """Whether to stop, also while no run has begun."""


@runtime_checkable
class ReadsFiles(Protocol):
    """A run's observer that also follows a run in another process, by the files it writes."""

    def notes(self, notes: Sequence[str]) -> None:
        """The remarks on the run's data."""

    def progress(self, progress: Json) -> None:
        """The content of progress.json, whenever it changes."""


@runtime_checkable
class Prunes(Protocol):
    """A run's observer that may give the run up."""

    pruned: bool


class SilentStudy:
    """Ignores all progress."""

    def begin(self, runs: Sequence[StudyRun], finished: int) -> None:
        pass

    def run(self, run: StudyRun) -> Observer:
        return Observer()

    def ended(self, outcome: RunOutcome) -> None:
        pass


@dataclass(frozen=True)
class StudySettings:
    """Options that all runs of a study share.

    Attributes:
        folder: The study's folder, locked by `study.lock_folder` in this or the parent process.
        divide: Makes the clients of a seed; a cache.
        log: Further loggers (`experiment.loggers.LOGS`).
    """

    folder: Path
    divide: Divide | None = None
    log: str | Sequence[str] = ()

    def folder_of(self, run: StudyRun) -> Path:
        return self.folder / "cells" / run.name


def read_outcome(folder: Path, run: StudyRun) -> RunOutcome | None:
    """A finished run of a study; None if it is not finished."""
    to = folder / "cells" / run.name
    if not (to / "result.json").exists():
        return None
    summary = read_json(to / "result.json")
    if summary["seeds"] < run.config.seeds:
        return None
    return RunOutcome(run, to, summary, fresh=False)


def run_group(
    group: Sequence[StudyRun], observer: StudyObserver, settings: StudySettings
) -> Iterator[RunOutcome]:
    """Run some runs and yield their outcomes in order; several share one program if they can."""
    if len(group) == 1:
        yield read_outcome(settings.folder, group[0]) or run_one(group[0], observer, settings)
        return
    try:
        _run_at_once(group, observer, settings)
    except SeedFailed as failed:
        # It fails alone as well, with its own words; the others continue where they are.
        which = failed.place // group[0].config.seeds
        logger.info("%s goes on by itself, because of %s", group[which].name, failed)
        others = [*group[:which], *group[which + 1 :]]
        rest = iter(list(run_group(others, observer, settings)))
        for place, run in enumerate(group):
            yield run_one(run, observer, settings) if place == which else next(rest)
    except (Parted, AtollError) as reason:
        logger.info("%d cells are run one by one, because %s", len(group), reason)
        for run in group:
            yield run_one(run, observer, settings)
    else:
        for run in group:
            yield _ended(run, settings)


def _run_at_once(
    group: Sequence[StudyRun], observer: StudyObserver, settings: StudySettings
) -> None:
    for run in group:
        note(settings.folder, "begin", run.name, together=len(group))
        write_atomically(settings.folder_of(run) / "asked.toml", asked_text(run).encode())
    try:
        run_configs(
            [run.config for run in group],
            outs=[settings.folder_of(run) for run in group],
            resuming=True,
            observers=[observer.run(run) for run in group],
            divide=settings.divide,
            log=settings.log,
        )
    except (Stopped, KeyboardInterrupt):
        for run in group:
            ended = read_outcome(settings.folder, run) is not None
            note(settings.folder, "end" if ended else "stopped", run.name)
        raise


def run_one(run: StudyRun, observer: StudyObserver, settings: StudySettings) -> RunOutcome:
    """Run a run to its end, from its last checkpoint if it has one."""
    folder, to = settings.folder, settings.folder_of(run)
    note(folder, "begin", run.name)
    heard = observer.run(run) if run.watch is None else run.watch(observer.run(run))
    try:
        write_atomically(to / "asked.toml", asked_text(run).encode())
        _run(run, to, heard, settings)
    except Stopped:
        if not _is_pruned(heard):
            note(folder, "stopped", run.name)
            raise
    except KeyboardInterrupt:
        note(folder, "stopped", run.name)
        raise
    except AtollError as error:
        return fail(folder, run, str(error), error)
    except Exception as error:  # a fault of one method must not cost hours of the others
        write_atomically(to / "error.txt", traceback.format_exc().encode())
        sentence = f"internal error: {type(error).__name__}: {error}".splitlines()[0]
        return fail(folder, run, f"{sentence}; {to / 'error.txt'} says where", error)
    if _is_pruned(heard):
        note(folder, "pruned", run.name)
        return RunOutcome(run, to, pruned=True)
    return _ended(run, settings)


def _run(run: StudyRun, to: Path, heard: Observer, settings: StudySettings) -> None:
    how: _How = {
        "out": to,
        "observer": heard,
        "data": run.data,
        "divide": settings.divide,
        "log": settings.log,
    }
    if isinstance(run.method, Baseline):
        run_baseline(run.config, run.method, **how)
    else:
        RunPlan(run.config, given_method=run.method, resuming=True, **how).run()


class _How(TypedDict):
    out: Path
    observer: Observer
    data: Data | None
    divide: Divide | None
    log: str | Sequence[str]


def _is_pruned(heard: Observer) -> bool:
    return isinstance(heard, Prunes) and heard.pruned


def _ended(run: StudyRun, settings: StudySettings) -> RunOutcome:
    note(settings.folder, "end", run.name)
    outcome = read_outcome(settings.folder, run)
    assert outcome is not None
    return RunOutcome(run, outcome.folder, outcome.summary)


def fail(folder: Path, run: StudyRun, error: str, cause: Exception | None = None) -> RunOutcome:
    """The outcome of a failed run, with its line in events.jsonl."""
    note(folder, "failed", run.name, error=error)
    return RunOutcome(run, folder / "cells" / run.name, error=error, cause=cause)


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
