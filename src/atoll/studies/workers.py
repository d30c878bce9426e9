"""Processes side by side: each does one task at a time and says how it goes.

A worker is a fresh Python that never runs the caller's own script, so a script needs no guard. It
has one connection to its parent. When that ends, for whatever reason the parent has, the worker
ends as well, in the middle of a task if need be. A worker that dies costs the task that it had.

Nothing here knows what a task is: `work` does it, a callable that can be pickled, and `Lead` gives
out the next one and hears about it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Protocol, Self

from atoll.core.errors import AtollError

TICK = 0.2
"""Seconds after which the parent looks whether it should stop, if nobody says anything."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""What torch, numpy and scipy read when they are loaded."""
BOOT = (
    "import json, sys; path, fd = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from atoll.studies.workers import serve; serve(fd)"
)


@dataclass(frozen=True)
class Task:
    """Something to do.

    Attributes:
        name: For people.
        load: What the worker gets; it has to survive pickling.
        kin: Tasks of equal kin share what a worker keeps between them.
        cost: Seconds, roughly.
    """

    name: str
    load: Any
    kin: str = ""
    cost: float = 0.0


class Talk:
    """A worker's line to its parent."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._stopped = connection, threading.Event()
        self._waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, what: Any) -> None:
        """Tell the parent something."""
        self.send("said", what)

    def should_stop(self) -> bool:
        """Whether the parent wants an early end."""
        return self._stopped.is_set()

    def send(self, kind: str, what: Any = None) -> None:
        try:
            self._connection.send((kind, what))
        except OSError:
            os._exit(1)  # not an error of the task: nobody is there to hear of it

    def get(self) -> bytes:
        """What the parent gives next."""
        return self._waiting.get()

    def _listen(self) -> None:
        while True:
            try:
                kind, what = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # at once, whatever is under way
            if kind == "stop":
                self._stopped.set()
            else:
                self._waiting.put(what)


Work = Callable[[Any, Talk], None]
"""Does a task's load. What it raises ends the worker."""


class Lead(Protocol):
    """Who gives out tasks, and hears what becomes of them."""

    def next(self, last: Task | None) -> Task | None:
        """A task for a worker whose last one was this; None if there is none for anybody."""

    def said(self, task: Task, what: Any) -> None:
        """What the worker said about it."""

    def refused(self, task: Task, why: str) -> None:
        """It cannot be given to another process."""

    def died(self, task: Task, how: str) -> None:
        """The worker's process ended in the middle of it."""

    def should_stop(self) -> bool:
        """Whether what runs should come to an early end, and nothing more begin."""


def run_tasks(lead: Lead, work: Work, *, jobs: int, threads: int) -> None:
    """Do all tasks in so many processes of so many threads each; back when none runs any more.

    Raises:
        AtollError: No process could be started.
    """
    stopping, all_given = False, False
    with _Crew(work, threads) as crew:
        crew.hire(jobs)
        while True:
            if not stopping and lead.should_stop():
                stopping = True
                crew.stop()
            for worker in crew.idle():
                task = None if stopping or all_given else lead.next(worker.last)
                all_given = all_given or task is None
                if task is not None and not worker.give(task):
                    lead.refused(task, "it cannot be pickled")
            if (stopping or all_given) and not crew.busy():
                return
            for worker, kind, what in crew.hear():
                task = worker.last
                if kind == "died":
                    crew.lose(worker, what, replaced=not (stopping or all_given))
                if task is None:
                    continue
                if kind == "said":
                    lead.said(task, what)
                elif kind == "refused":
                    lead.refused(task, what)
                elif kind == "died" and worker.has_task:
                    lead.died(task, what)


class _Worker:
    """One process, as its parent sees it."""

    def __init__(self, work: bytes, threads: int) -> None:
        self.last: Task | None = None
        self.has_task, self.ready = False, False
        self.connection, theirs = Pipe()
        with theirs, _without_ctrl_c():
            self.process = subprocess.Popen(
                # -P: the folder of the caller is searched for modules only if the caller did.
                [sys.executable, "-P", "-c", BOOT, json.dumps([sys.path, theirs.fileno()])],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **dict.fromkeys(THREADS, str(threads))},
            )
        self.send("work", work)

    def send(self, kind: str, what: Any = None) -> None:
        with contextlib.suppress(OSError):  # it has died, and `hear` will find that out
            self.connection.send((kind, what))

    def give(self, task: Task) -> bool:
        """Whether it could be sent."""
        try:
            load = pickle.dumps(task.load)
        except Exception:  # whatever an object of the user's raises
            return False
        self.last, self.has_task = task, True
        self.send("task", load)
        return True

    def hear(self) -> tuple[str, Any]:
        try:
            kind, what = self.connection.recv()
        except (EOFError, OSError):
            return "died", self._how()
        self.ready = True
        self.has_task = self.has_task and kind == "said"
        return kind, what

    def _how(self) -> str:
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "its process was killed, perhaps for want of memory; try fewer --jobs"
        if code < 0:
            return f"its process was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"its process ended with status {code}"

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class _Crew:
    """The processes; none outlives the `with`."""

    def __init__(self, work: Work, threads: int) -> None:
        self.work, self.threads = pickle.dumps(work), threads
        self.workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()

    def hire(self, count: int) -> None:
        for _ in range(count):
            self.workers.append(_Worker(self.work, self.threads))

    def stop(self) -> None:
        for worker in self.workers:
            worker.send("stop")

    def idle(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.ready and not worker.has_task]

    def busy(self) -> bool:
        return any(worker.has_task for worker in self.workers)

    def hear(self) -> Iterator[tuple[_Worker, str, Any]]:
        """What the workers have said by now."""
        talking = wait([worker.connection for worker in self.workers], TICK)
        for worker in [worker for worker in self.workers if worker.connection in talking]:
            yield worker, *worker.hear()

    def lose(self, worker: _Worker, how: str, *, replaced: bool) -> None:
        """One has died; if it could not even begin, the others go on without."""
        self.workers.remove(worker)
        worker.end()
        if worker.ready:
            self.hire(int(replaced))
        elif not self.workers:
            raise AtollError(f"no process could begin to work beside this one: {how}")


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """What is started here does not hear Ctrl-C, which is its parent's to answer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(fd: int) -> None:
    """A worker's life: tasks, one after the other, until its parent is gone."""
    talk = Talk(Connection(fd))
    work: Work = pickle.loads(talk.get())
    talk.send("ready")
    while True:
        load = talk.get()
        try:
            task = pickle.loads(load)
        except Exception as error:  # whatever an object of the user's raises
            talk.send("refused", f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        work(task, talk)
        sys.stdout.flush()
        talk.send("done")
