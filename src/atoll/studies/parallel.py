"""Runs of a study in several processes, which report through the files of the study.

The parent sends groups of runs over a one-way pipe. A worker runs a group as a single process
would: it writes the run's folder, `progress.json` and the study's `events.jsonl`. The parent reads
these files, as `atoll watch` does, and notifies its observers.

A worker is a new Python process that never runs the caller's script, so a script needs no
`__main__` guard. When its pipe closes, the parent has ended, and the worker ends at once. SIGTERM
asks it to stop after the round. If a worker dies, only the runs that it had begun fail.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from statistics import median_high
from typing import Self

import msgspec
import torch

from atoll.core.errors import AtollError, ConfigError
from atoll.experiment.config import RunConfig
from atoll.experiment.hardware import available_memory, cores, device_memory, release_memory
from atoll.experiment.loggers import share_logs
from atoll.experiment.observers import PROGRESS, Observer
from atoll.experiment.problem import SHARE, Divide, Division, FederationCache, Problem, group_of
from atoll.experiment.run import Stopped
from atoll.experiment.status import NewEvents, read_events
from atoll.studies import study_run
from atoll.studies.study_run import Json, RunOutcome, StudyObserver, StudyRun, StudySettings

logger = logging.getLogger(__name__)
AUTO = "auto"
WORTH = 20.0  # a study with fewer CPU seconds ends before other processes have started
DEAR = 4.0  # a group that takes more than this multiple of the median is scheduled separately,
FEW = 0.005  # if it also exceeds this fraction of the study, so that no long group is last
ON_GPU = 12 << 30  # assumed bytes of a GPU per process; `run_parallel` estimates each group
FULL = 0.9  # fraction of a GPU's memory that running groups may use by their estimates
EACH = 4  # minimum runs per process on a GPU, because a start takes as long as one run
TICK = 0.1  # seconds between two reads of the files
TRIES = 2  # workers that may die before a run begins; then the run fails
# The variables that torch, numpy and scipy read at import.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
BOOT = (
    "import json, sys; path, fd = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from atoll.studies.parallel import work; work(fd)"
)


def check_jobs(wish: int | str) -> None:
    """Raise an error unless the value is a number of processes or "auto"."""
    if wish != AUTO and not (str(wish).isdigit() and int(wish)):
        raise ConfigError(f"jobs is '{wish}'; give a number of processes, 1 or more, or auto")


def choose_jobs(wish: int | str, configs: Sequence[RunConfig]) -> int:
    """Return the number of processes for these configurations.

    "auto" is one process per core, limited by memory, and one process if all runs end before others
    have started. A GPU waits for Python most of the time, so processes share it: at most one for
    every `EACH` runs.
    """
    if wish != AUTO:
        return max(1, min(int(wish), len(configs)))
    if len(configs) < 2 or sum(map(study_run.cost_of, configs)) < WORTH:
        return 1
    room, most = available_memory() // max(map(study_run.memory_of, configs)), len(configs)
    if any(map(study_run.on_gpu, configs)):
        room, most = min(room, device_memory() // ON_GPU), most // EACH
    return max(1, min(cores(), most, room))


@dataclass(frozen=True)
class RunGroup:
    """Runs for one worker. Groups of equal `kin` share federations.

    `cost` is in seconds, and `memory` in bytes of the GPU.
    """

    runs: tuple[StudyRun, ...]
    kin: str = ""
    cost: float = 0.0
    memory: int = 0


class Schedule:
    """Orders tasks so that all processes stay busy until the end and share their caches.

    Tasks in `returned`, whose worker died before they began, come first. Expensive tasks are next,
    or last without `dearest_first`. Otherwise a process continues with tasks of its last kin, then
    takes a kin that no process has begun, then helps with a kin in progress. Running tasks use at
    most `room` bytes of a GPU, so a larger task waits and others go first. A task that needs more
    than `room` runs by itself.
    """

    def __init__(
        self, tasks: Sequence[RunGroup], *, dearest_first: bool = True, room: float = math.inf
    ) -> None:
        self.dearest_first, self.room, self.begun = dearest_first, room, set[str]()
        self.dear, self.returned = list[RunGroup](), list[RunGroup]()
        self.under_way: dict[int, RunGroup] = {}  # by identity
        self.kins: dict[str, list[RunGroup]] = {}
        costs = [task.cost for task in tasks] or [0.0]
        limit = max(DEAR * median_high(costs), FEW * sum(costs))
        for task in sorted(tasks, key=lambda task: -task.cost if dearest_first else task.cost):
            alike = self.dear if task.cost > limit else self.kins.setdefault(task.kin, [])
            alike.append(task)

    def take(self, last: RunGroup | None) -> RunGroup | None:
        """Return the next task for a process whose last task is `last`, or None if no task fits."""
        left = self.room - sum(task.memory for task in self.under_way.values())
        for tasks in self._in_order(last):
            for place, task in enumerate(tasks):
                if task.memory <= left or not self.under_way:
                    if tasks is self.kins.get(task.kin):
                        self.begun.add(task.kin)
                    self.under_way[id(task)] = task
                    return tasks.pop(place)
        return None

    def ended(self, task: RunGroup) -> None:
        """Release the memory of a task."""
        del self.under_way[id(task)]

    def _in_order(self, last: RunGroup | None) -> Iterator[list[RunGroup]]:
        """Yield the lists of tasks in the order in which a process searches them."""
        yield self.returned
        if self.dearest_first:
            yield self.dear
        self.kins = {kin: tasks for kin, tasks in self.kins.items() if tasks}
        known = None if last is None else last.kin

        def rank(kin: str) -> tuple[bool, bool, float]:
            cheapest = kin not in self.begun and not self.dearest_first
            whole = sum(task.cost for task in self.kins[kin])
            value = self.kins[kin][-1].cost if cheapest else -whole
            return kin != known, kin in self.begun, value

        yield from (self.kins[kin] for kin in sorted(self.kins, key=rank))
        if not self.dearest_first:
            yield self.dear


def run_parallel(
    groups: Sequence[Sequence[StudyRun]],
    observer: StudyObserver,
    settings: StudySettings,
    jobs: int,
    *,
    dearest_first: bool = True,
    crew: Crew | None = None,
) -> dict[str, RunOutcome]:
    """Run groups in `jobs` processes, or with the workers of a `crew` with the same settings.

    Return the outcomes by name, without runs whose objects no other process can load.
    """
    costs = [sum(study_run.cost_of(run.config) for run in group) for group in groups]
    kins = [group_of(group[0].config) for group in groups]
    memory = [sum(study_run.gpu_memory_of(run.config) for run in group) for group in groups]
    tasks = list(map(RunGroup, map(tuple, groups), kins, costs, memory))
    room = FULL * device_memory() if any(memory) else math.inf
    runs = {run.name: run for group in groups for run in group}
    schedule = Schedule(tasks, dearest_first=dearest_first, room=room)
    parent = _Parent(observer, settings, schedule, runs)
    try:
        with contextlib.ExitStack() as stack:
            parent.run(crew or stack.enter_context(Crew(settings, observer, jobs)))
    finally:
        last = dict.fromkeys(parent.running, "begin")
        last |= {event["cell"]: event["event"] for event in parent.events.read()}
        for name in (name for name in runs if last.get(name) in ("begin", "notes")):
            study_run.note_stop(settings.folder, runs[name])  # its process has ended
    if parent.refused:
        names, reason = ", ".join(parent.refused), next(iter(parent.refused.values()))
        words = "another process cannot load %s (%s); it runs in this process"
        logger.warning(words, names, reason)
    if parent.stopped:
        raise Stopped(settings.folder, 0, 0)
    return parent.outcomes


@dataclass
class _Parent:
    """Sends tasks to workers, and notifies observers of changes in the study's files."""

    observer: StudyObserver
    settings: StudySettings
    schedule: Schedule
    runs: dict[str, StudyRun]
    running: dict[str, Observer] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    lost: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, RunOutcome] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    stopped: bool = False

    def __post_init__(self) -> None:
        self.events, self.start = NewEvents(self.settings.folder), time.time()
        self.changed: dict[str, float] = {}

    def run(self, crew: Crew) -> None:
        """Work until no worker has a task."""
        while True:
            runs, stop = self.running.values(), self.observer.should_stop
            if not self.stopped and (stop() or True in [run.should_stop() for run in runs]):
                self.stopped = True
                for worker in crew.workers:
                    worker.process.terminate()
            for worker in crew.workers if not self.stopped else ():
                while worker.task is None and (task := self.schedule.take(worker.last)) is not None:
                    if not worker.give(task):
                        self.schedule.ended(task)
                        self.refused |= {run.name: "it cannot be pickled" for run in task.runs}
            if not any(worker.task for worker in crew.workers):
                return
            time.sleep(TICK)
            dead = [worker for worker in crew.workers if worker.process.poll() is not None]
            for event in self.events.read():  # after `dead`, so that it reads the last event
                self._take(event)
            self._read_progress()
            for worker in crew.workers:
                if worker.task and all(map(self._is_over, worker.task.runs)):
                    self.schedule.ended(worker.task)
                    worker.task = None
            for worker in dead:
                self._replace(worker, crew)

    def _is_over(self, run: StudyRun) -> bool:
        return run.name in self.outcomes or run.name in self.refused

    def _take(self, event: Json) -> None:
        name, kind = event["cell"], event["event"]
        if name not in self.runs or name in self.outcomes:  # or this process wrote it
            return
        run, folder = self.runs[name], self.settings.folder_of(self.runs[name])
        match kind:
            case "begin":
                self.begun.add(name)
                self.running[name] = self.observer.run(run)
            case "notes":
                if isinstance(observer := self.running[name], study_run.ReadsFiles):
                    observer.notes(event["notes"])
            case "end":
                found = study_run.read_outcome(self.settings.folder, run, fresh=True)
                assert found is not None
                self._end(found)
            case "pruned":
                self._end(RunOutcome(run, folder, pruned=True))
            case "failed":
                kind, curve = event["kind"], event.get("curve", ())
                self._end(RunOutcome(run, folder, error=event["error"], kind=kind, curve=curve))
            case "refused":
                self.refused[name] = event["error"]
            case "stopped":
                self.running.pop(name, None)

    def _end(self, outcome: RunOutcome) -> None:
        self.running.pop(outcome.run.name, None)
        self.outcomes[outcome.run.name] = outcome
        self.observer.ended(outcome)

    def _read_progress(self) -> None:
        for name, observer in self.running.items():
            path = self.settings.folder_of(self.runs[name]) / PROGRESS
            with contextlib.suppress(FileNotFoundError):
                changed = path.stat().st_mtime
                new = changed > self.changed.get(name, self.start)  # else an earlier call wrote it
                if new and isinstance(observer, study_run.ReadsFiles):
                    self.changed[name] = changed
                    observer.progress(json.loads(path.read_text(encoding="utf-8")))

    def _replace(self, worker: _Worker, crew: Crew) -> None:
        """Fail begun runs of a dead worker, move the others, and replace it if it began any run."""
        left = [run for run in worker.task.runs if not self._is_over(run)] if worker.task else []
        useful = worker.last is not worker.task or any(run.name in self.begun for run in left)
        crew.workers.remove(worker)
        if worker.task:
            self.schedule.ended(worker.task)
        reason = worker.end()
        if self.stopped:
            return
        for run in left:
            self.lost[run.name] += 1
            if run.name in self.running or self.lost[run.name] > TRIES:
                failed = RunOutcome(run, self.settings.folder_of(run), error=reason)
                self._end(study_run.note_failure(self.settings.folder, failed))
            else:
                memory = study_run.gpu_memory_of(run.config)
                self.schedule.returned.append(RunGroup((run,), memory=memory))
        if useful:
            crew.hire()
        elif not crew.workers:
            raise AtollError(f"no worker process could start: {reason}")


class _Worker:
    """One worker process, as its parent sees it."""

    def __init__(self, settings: bytes, threads: int) -> None:
        self.task: RunGroup | None = None
        self.last: RunGroup | None = None
        theirs, self.pipe = Pipe(duplex=False)
        # The worker ignores Ctrl-C, because its parent handles it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with theirs:
                self.process = subprocess.Popen(
                    # -P: search the caller's folder for modules only if the caller did.
                    [sys.executable, "-P", "-c", BOOT, json.dumps([sys.path, theirs.fileno()])],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **dict.fromkeys(THREADS, str(threads))},
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._send(settings)

    def give(self, task: RunGroup) -> bool:
        """Send a task. Return False if it cannot be pickled."""
        try:
            names = [run.name for run in task.runs]
            content = pickle.dumps((names, pickle.dumps(task.runs)))
        except Exception:  # any error of a user's object
            return False
        self.task = self.last = task
        self._send(content)
        return True

    def _send(self, content: bytes) -> None:
        with contextlib.suppress(OSError):  # it has died, and the parent will notice
            self.pipe.send_bytes(content)

    def end(self) -> str:
        """End the process. Return how it ended, which is meaningful only if it was already dead."""
        self.pipe.close()
        self.process.kill()
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "its process was killed, perhaps because memory was full; try fewer --jobs"
        if code < 0:
            return f"its process was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"its process ended with status {code}"


class Crew:
    """The worker processes. All of them end with the `with` block."""

    def __init__(self, settings: StudySettings, observer: StudyObserver, jobs: int) -> None:
        share_logs(settings.log)
        self.jobs, self.threads = jobs, max(1, cores() // jobs)
        observer.parallel(jobs, self.threads)
        if isinstance(settings.divide, FederationCache):  # each worker has its own, smaller cache
            limit = available_memory() // SHARE // jobs
            settings = replace(settings, divide=settings.divide.with_limit(limit))
        self.settings = pickle.dumps(settings)
        self.workers: list[_Worker] = []

    def __enter__(self) -> Self:
        for _ in range(self.jobs):
            self.hire()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()

    def hire(self) -> None:
        self.workers.append(_Worker(self.settings, self.threads))


@contextlib.contextmanager
def helped(
    config: RunConfig, out: Path, divide: Divide, watch: Callable[[Json], None]
) -> Iterator[Divide]:
    """Train the later seeds of a run on a CPU in a second process, and yield another `divide`.

    When the run needs the first of these seeds, the yielded function waits for the process, and
    passes its progress.json to `watch`. Then it moves the checkpoints into the run's folder `out`.
    The run itself trains the seeds that the process did not finish. On a GPU, or without a second
    core or seed, it yields the given `divide`.
    """
    count = config.seeds * 2 // 3 if cores() > 1 and not study_run.on_gpu(config) else 0
    if not count:
        yield divide
        return
    first, threads = config.seed + config.seeds - count, torch.get_num_threads()
    run = StudyRun(out.name, msgspec.structs.replace(config, seed=first, seeds=count))
    out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        work = tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.")
        settings = StudySettings(Path(stack.enter_context(work)))
        there = settings.folder_of(run)
        crew = Crew(settings, StudyObserver(), 2)
        stack.push(crew)
        crew.hire()
        crew.workers[0].give(RunGroup((run,)))
        torch.set_num_threads(crew.threads)
        stack.callback(torch.set_num_threads, threads)

        def divided(problem: Problem, seed: int) -> Division:
            if seed >= first and crew.workers:
                while not _is_over(settings.folder, crew.workers[0]):
                    with contextlib.suppress(FileNotFoundError):
                        watch(json.loads((there / PROGRESS).read_text(encoding="utf-8")))
                    time.sleep(TICK)
                crew.workers.pop().end()
                for made in sorted(there.glob("seed-*")):
                    made.rename(out / made.name)
                if study_run.read_outcome(settings.folder, run) is not None:
                    for number in run.config.all_seeds:
                        watch({"seed": number, "round": config.rounds, "validation": []})
            return divide(problem, seed)

        yield divided


def _is_over(folder: Path, worker: _Worker) -> bool:
    """Return whether a worker has ended its only run, or is dead."""
    ends = {"end", "failed", "refused", "stopped"}
    return worker.process.poll() is not None or any(e["event"] in ends for e in read_events(folder))


def work(fd: int) -> None:
    """Run a worker: process tasks until it is stopped or its parent ends."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(fd, waiting), daemon=True).start()
    settings: StudySettings = pickle.loads(waiting.get())
    kin = ""
    while True:
        names, content = pickle.loads(waiting.get())
        try:
            group = pickle.loads(content)
        except Exception as error:  # any error of a user's object
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            for name in names:
                study_run.note(settings.folder, "refused", name, error=reason)
            continue
        if stopping.is_set():
            return
        if study_run.on_gpu(group[0].config):
            # Processes share the GPU, so drop federations of another kin, and memory that is free.
            before, kin = kin, group_of(group[0].config)
            if kin != before and isinstance(cache := settings.divide, FederationCache):
                settings = replace(settings, divide=cache.with_limit(cache.limit))  # an empty cache
            release_memory()
        try:
            observe = partial(_RunInWorker, settings.folder, stopping)
            for outcome in study_run.run_group(group, observe, settings):
                study_run.stop_without_device(outcome)
        except Stopped:
            return
        except AtollError:  # the GPU is lost; another process replaces this one
            sys.exit(1)
        sys.stdout.flush()


def _listen(fd: int, waiting: queue.SimpleQueue[bytes]) -> None:
    pipe = Connection(fd, writable=False)
    while True:
        try:
            waiting.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)  # at once, even during a run, because the parent has ended


@dataclass
class _RunInWorker(Observer):
    """Follows a run in a worker. It writes notes to events.jsonl, and SIGTERM stops the run."""

    folder: Path
    stopping: threading.Event
    run: StudyRun

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        if notes:
            study_run.note(self.folder, "notes", self.run.name, notes=notes)

    def should_stop(self) -> bool:
        return self.stopping.is_set()
