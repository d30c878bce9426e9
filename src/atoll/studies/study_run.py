"""One run of a study, or several in one program: costs, folders, events and outcomes.

`STUDY/cells/NAME/` is the ordinary folder of a run, which every command for runs can read. A run is
finished when its result.json exists; the study then only reads it. A stopped run continues at its
last checkpoint, if it has one. A run with fewer seeds than requested runs the missing seeds.
`STUDY/events.jsonl` gets one line whenever a run begins, ends, fails, is pruned or is stopped.
"""

from __future__ import annotations

import logging
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from atoll.core.errors import AtollError, ConfigError, described, own_line
from atoll.core.files import write_atomically
from atoll.core.method import Method
from atoll.core.task import GRAPHS, NODES
from atoll.core.vmap.varied import Undecided, points
from atoll.data.archive import memory_needed
from atoll.data.public.registry import DatasetInfo, dataset_info, plain_name, sets_of_group
from atoll.experiment.baseline import AnyBaseline, Baseline, run_baseline
from atoll.experiment.build import build_method
from atoll.experiment.config import RECIPES, RunConfig, config_text, data_header, resolve
from atoll.experiment.folder import read_json
from atoll.experiment.hardware import choose_device, device_answers, tuned_process
from atoll.experiment.observers import Observer
from atoll.experiment.problem import Data, Divide, FederationCache, Problem, name_configuration
from atoll.experiment.result import Result
from atoll.experiment.run import SAVE_EVERY, RunPlan, Stopped
from atoll.experiment.status import append_event
from atoll.experiment.sweep import Parted, SeedFailed, run_together, why_one_by_one

logger = logging.getLogger(__name__)
Json = dict[str, Any]  # an object of a JSON file
PROCESS = 1 << 30  # bytes of a process with a small graph; we measured 0.6 GiB with Cora
COPIES = 6  # maximum copies of a graph's features in memory during training
CONTEXT = 1 << 30  # bytes of a GPU per process: libraries, a model, intermediate results
GPU_COPIES = 3  # copies of a graph's features on a GPU: the views, and their stack with its padding
SKEW = 1.5  # the largest client's fraction of the nodes, times the number of clients


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: all seeds of one configuration."""

    name: str  # name of its folder
    config: RunConfig
    labels: Json = field(default_factory=dict)  # its place, such as {"method": "fedavg"}
    method: Method | AnyBaseline | None = None  # instead of the method's name
    data: Data | None = None  # instead of the data's name
    watch: Callable[[Observer], Observer] | None = None  # wraps the observer
    light: bool = False  # whether to save the result without tables, models and checkpoints


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run of a study."""

    run: StudyRun
    folder: Path
    summary: Json | None = None  # the content of its result.json, or None without a result
    error: str | None = None  # one sentence if it failed
    fresh: bool = True  # whether it ended in this call, not in an earlier call
    kind: str = ""  # name of the exception's class; empty if its process died
    cause: Exception | None = None  # the exception, if it was raised in this process
    curve: Sequence[float] = ()  # validation scores before it failed, if recorded
    pruned: bool = False  # whether its observer stopped it early


class StudyObserver:
    """Follows the progress of a study. A subclass overrides the methods that it needs."""

    def begin(self, runs: Sequence[StudyRun], finished: int) -> None:
        """Handle the start of the study. An earlier call finished `finished` runs."""

    def parallel(self, jobs: int, threads: int) -> None:
        """Handle the start of `jobs` processes with `threads` threads each."""

    def run(self, run: StudyRun) -> Observer:
        """Return the observer of the rounds of a run that begins."""
        return Observer()

    def ended(self, outcome: RunOutcome) -> None:
        """Handle the end of a run, also of a run that was only read."""

    def should_stop(self) -> bool:
        """Return whether to stop. Only a study in several processes asks, also before any run."""
        return False


@runtime_checkable
class ReadsFiles(Protocol):
    """A run's observer that also follows a run in another process, through its files."""

    def notes(self, notes: Sequence[str]) -> None:
        """Handle the notes about the run's data."""

    def progress(self, progress: Json) -> None:
        """Handle new content of progress.json."""


@runtime_checkable
class Judges(Protocol):
    """A run's observer that may stop the run early because of its validation scores."""

    pruned: bool
    curve: list[float]


Observe = Callable[[StudyRun], Observer]  # makes the observer of a run (`StudyObserver.run`)


@dataclass(frozen=True)
class StudySettings:
    """Options that all runs of a study share."""

    folder: Path  # the study's folder, locked by `study.lock_folder` in this or the parent process
    divide: Divide | None = None  # makes the clients of a seed, such as a cache
    log: str | Sequence[str] = ()  # further loggers (`experiment.loggers.LOGS`)

    def folder_of(self, run: StudyRun) -> Path:
        return self.folder / "cells" / run.name


def read_outcome(folder: Path, run: StudyRun, *, fresh: bool = False) -> RunOutcome | None:
    """Read a finished run of a study. Return None if it is not finished."""
    to = folder / "cells" / run.name
    if not (to / "result.json").exists():
        return None
    summary = read_json(to / "result.json")
    finished = summary["seeds"] >= run.config.seeds
    return RunOutcome(run, to, summary, fresh=fresh) if finished else None


def run_group(
    group: Sequence[StudyRun], observe: Observe, settings: StudySettings
) -> Iterator[RunOutcome]:
    """Run these runs and yield their outcomes in order. Several share one program if they can."""
    if len(group) == 1:
        yield read_outcome(settings.folder, group[0]) or run_one(group[0], observe, settings)
        return
    try:
        _run_at_once(group, observe, settings)
    except SeedFailed as failed:
        # The failed run fails again by itself, with its own error. The others continue.
        which = failed.place // group[0].config.seeds
        logger.info("%s continues by itself, because of %s", group[which].name, failed)
        others = [*group[:which], *group[which + 1 :]]
        rest = iter(list(run_group(others, observe, settings)))
        for place, run in enumerate(group):
            yield run_one(run, observe, settings) if place == which else next(rest)
    except (Parted, AtollError) as reason:
        logger.info("%d cells run one by one, because %s", len(group), reason)
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
        run_program(group, observe, settings)
    except (Stopped, KeyboardInterrupt):
        for run in group:
            note_stop(settings.folder, run)
        raise


def run_one(run: StudyRun, observe: Observe, settings: StudySettings) -> RunOutcome:
    """Complete a run, from its last checkpoint if any. Return its outcome, also if it fails."""
    folder, to = settings.folder, settings.folder_of(run)
    note(folder, "begin", run.name)
    observer = observe(run) if run.watch is None else run.watch(observe(run))
    judge = observer if isinstance(observer, Judges) else None
    try:
        write_atomically(to / "asked.toml", asked_text(run).encode())
        shared: Json = {"divide": settings.divide, "log": settings.log}
        if isinstance(run.method, Baseline):
            run_baseline(run.config, run.method, out=to, observer=observer, data=run.data, **shared)
        else:
            what = run.config, None if run.light else to, observer, run.method, run.data
            result = RunPlan(*what, resuming=True, **shared).run()
            if run.light:
                result.save(to, tables=False)
    except (Stopped, KeyboardInterrupt) as stop:
        if isinstance(stop, KeyboardInterrupt) or judge is None or not judge.pruned:
            note_stop(folder, run)
            raise
    except Exception as error:  # an error of one method must not stop the other runs
        sentence = str(error)
        if not isinstance(error, AtollError):
            write_atomically(to / "error.txt", traceback.format_exc().encode())
            internal = "" if own_line(error) else "internal error: "
            sentence = f"{internal}{described(error)}".splitlines()[0]
            sentence += f"; see the traceback in {to / 'error.txt'}"
        curve, kind = judge.curve if judge else (), type(error).__name__
        failed = RunOutcome(run, to, error=sentence, kind=kind, cause=error, curve=curve)
        return note_failure(folder, failed)
    if judge is not None and judge.pruned:
        note(folder, "pruned", run.name)
        return RunOutcome(run, to, pruned=True)
    return _ended(run, settings)


def _ended(run: StudyRun, settings: StudySettings) -> RunOutcome:
    note(settings.folder, "end", run.name)
    outcome = read_outcome(settings.folder, run, fresh=True)
    assert outcome is not None
    return outcome


def note_failure(folder: Path, outcome: RunOutcome) -> RunOutcome:
    """Write the line of a failed run to events.jsonl, and return its outcome."""
    curve: Json = {"curve": list(outcome.curve)} if outcome.curve else {}
    about = {"error": outcome.error, "kind": outcome.kind, **curve}
    note(folder, "failed", outcome.run.name, **about)
    return outcome


def note_stop(folder: Path, run: StudyRun) -> None:
    """Write the line of an interrupted run: "end" if its result exists, otherwise "stopped"."""
    ended = read_outcome(folder, run) is not None
    note(folder, "end" if ended else "stopped", run.name)


def note(folder: Path, event: str, name: str, **more: object) -> None:
    """Append a line to events.jsonl."""
    append_event(folder, {"at": round(time.time(), 3), "event": event, "cell": name, **more})


def asked_text(run: StudyRun) -> str:
    """Return a run's configuration as text, with a fingerprint of its Python objects if any."""
    text = config_text(run.config)
    if run.method is None and run.data is None:
        return text
    return f"{text}# objects {name_configuration(run.config, run.method, run.data)}\n"


def stop_without_device(outcome: RunOutcome) -> None:
    """Raise an error if the GPU was lost in a failed run, because all other runs would fail."""
    if outcome.error and not device_answers():
        raise AtollError(
            f"the GPU does not respond to this process any more after {outcome.run.name} failed; "
            "finished runs are saved; run the same command again to continue"
        )


def on_gpu(config: RunConfig) -> bool:
    """Return whether a configuration runs on a GPU, where more runs cost little extra time."""
    try:
        return choose_device(config.device).type == "cuda"
    except ConfigError:
        return False  # running it raises the error


def why_apart(one: RunConfig, other: RunConfig) -> str:
    """Return why two configurations cannot share one program, or "" if no reason is known yet."""
    if one.objects:
        return "they are made of Python objects"
    try:
        one, other = resolve(one)[0], resolve(other)[0]
        if msgspec.structs.replace(other, set=one.set) != one:
            return "they differ in more than hyper-parameters"
        task = (NODES if one.batch_size is None else GRAPHS).name
        points([build_method(config, task=task) for config in (one, other)])
    except (ConfigError, Undecided) as reason:
        return str(reason)
    return ""


@tuned_process()
def run_program(
    group: Sequence[StudyRun], observe: Observe, settings: StudySettings
) -> list[Result]:
    """Run all seeds of runs that differ only in numeric hyper-parameters, in one program.

    Each run gets the same results, files and checkpoints as with `RunPlan.run` in its folder, which
    may contain a stopped run. `Parted` means that the runs cannot share a program, and that
    `RunPlan.run` continues from the saved state. `SeedFailed` contains the `place` of the failed
    run, where each run has one place per seed.
    """
    # The runs are in memory together, so their federations need no limit.
    shared = FederationCache(sys.maxsize, make=settings.divide or Problem.divide)
    how: Json = {"resuming": True, "log": settings.log, "divide": shared}
    plans = [
        RunPlan(run.config, None if run.light else settings.folder_of(run), observe(run), **how)
        for run in group
    ]
    rows = [(plan, experiment) for plan in plans for experiment in plan.experiments()]
    experiments = [experiment for _, experiment in rows]
    if reason := why_one_by_one(experiments):
        raise Parted(reason)
    runs = run_together(
        experiments,
        checkpoints=[plan.checkpoint(experiment) for plan, experiment in rows],
        every_seconds=SAVE_EVERY,
        on_round=lambda at, history: rows[at][0].observers.round(experiments[at].seed, history),
        should_stop=lambda: True in [plan.observers.should_stop() for plan in plans],  # asks all
        or_not_at_all=True,
    )
    results = []
    for plan, one in zip(plans, group, strict=True):
        own = [run for run, (owner, _) in zip(runs, rows, strict=False) if owner is plan]
        if len(own) < plan.config.seeds:  # a stop came before its seeds
            raise Stopped(plan.out, plan.config.seed, 0)
        results.append(plan.result(plan.seed_results(own)))
        if one.light:
            results[-1].save(settings.folder_of(one), tables=False)
    return results


@cache
def _costs() -> dict[str, dict[str, float]]:
    return tomllib.loads((RECIPES / "costs.toml").read_text(encoding="utf-8"))


def method_costs() -> Mapping[str, float]:
    """Return each method's CPU seconds for 100 rounds of three epochs on Cora with 10 clients."""
    costs: Mapping[str, float] = _costs()["methods"]
    return costs


def cost_of(config: RunConfig) -> float:
    """Estimate the seconds of a run on one CPU core or GPU process, or 0.0 if it cannot run."""
    try:
        costs, (full, _) = _costs(), resolve(config)
    except AtollError:
        return 0.0  # running it raises the error
    base, name = str(full.set.get("base", "")), plain_name(full.data).lower()
    if on_gpu(full):  # on a GPU, seeds, epochs and clients add little time
        gpu = costs["gpu"]
        most = max(gpu.get(full.method, 5.0), gpu.get(base, 0.0))
        turns = 1 if full.batch_size is None else full.seeds
        return (full.rounds or 1) / 100 * most * costs["gpu_data"].get(name, 1.0) * turns
    work = (full.rounds or 1) * (full.epochs or 1) * full.seeds / 300
    method = costs["methods"].get(full.method, 2.0) + costs["methods"].get(base, 0.0)
    sets = (name,) if name in costs["data"] else sets_of_group(name) or (name,)
    return work * method * sum(costs["data"].get(one.lower(), 5.0) for one in sets)


def memory_of(config: RunConfig) -> int:
    """Estimate the bytes of memory of a process with this run."""
    return PROCESS + COPIES * _data_bytes(config)


def has_batches(config: RunConfig) -> bool:
    """Whether a run has mini-batches, whose seeds a GPU trains one after another."""
    try:
        return resolve(config)[0].batch_size is not None
    except AtollError:
        return False  # running it raises the error


def gpu_memory_of(config: RunConfig) -> int:
    """Estimate the bytes of GPU memory of a run with all seeds at once. The result is 0 on a CPU.

    Methods in `gpu_pairs` of costs.toml compare all pairs of a client's nodes, a block of rows at a
    time. The number in costs.toml is the number of such blocks in memory at once, per client.
    """
    if not on_gpu(config):
        return 0
    try:
        costs, (full, rules) = _costs(), resolve(config)
    except AtollError:
        return CONTEXT  # running it raises the error
    pairs, clients = costs["gpu_pairs"], full.clients or rules.clients
    many = max(pairs.get(full.method, 0.0), pairs.get(str(full.set.get("base", "")), 0.0))
    largest = min(1.0, SKEW / clients) * sum(one.nodes or 0 for one in _public_sets(full))
    numbers = many * clients * min(largest, pairs["rows"]) * largest
    return CONTEXT + full.seeds * (GPU_COPIES * _data_bytes(full) + 4 * int(numbers))


def _public_sets(config: RunConfig) -> list[DatasetInfo]:
    """Return the public data sets of a run. The list is empty for all other data."""
    name = plain_name(config.data).lower()
    try:
        return [dataset_info(one) for one in sets_of_group(name) or (name,)]
    except AtollError:
        return []


def _data_bytes(config: RunConfig) -> int:
    """Return the bytes of one copy of the features and edges of a run's data, or 0 if unknown."""
    path = Path(config.data).expanduser()
    try:
        if data_header(config) is not None:
            return memory_needed(path) // COPIES
    except AtollError:
        return 0
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*"))
    if path.is_file():
        return path.stat().st_size
    sets = _public_sets(config)
    # Features have four bytes, and each edge has two ends of eight bytes.
    return sum(4 * (one.nodes or 0) * (one.features or 0) + 16 * (one.edges or 0) for one in sets)
