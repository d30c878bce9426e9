"""Processes side by side: what they say, how they stop, and that none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import AtollError
from atoll.studies.workers import Talk, Task, run_tasks


def work(load: Any, talk: Talk) -> None:
    """What the tests' workers do; a name of this module, so that they find it."""
    if load == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if load == "fails":
        raise SystemExit(3)
    if load == "waits":
        talk.say("waiting")
        while not talk.should_stop():
            time.sleep(0.01)
        talk.say("stopped")
        return
    if load == "sleeps":
        talk.say(os.getpid())
        time.sleep(60)
    threads = os.environ["OMP_NUM_THREADS"]
    talk.say((load, os.getpid(), threads))


def cannot(load: Any, talk: Talk) -> None:
    """Never called: its process cannot even load it."""


class Unloadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not here")


class Lead:
    """Gives out loads in order and notes everything."""

    def __init__(self, loads: list[Any], stop: Callable[[list[Any]], bool] | None = None) -> None:
        self.left = [Task(f"task {place}", load) for place, load in enumerate(loads)]
        self.heard: list[Any] = []
        self.bad: dict[str, str] = {}
        self.stop = stop or (lambda heard: False)

    def next(self, last: Task | None) -> Task | None:
        return self.left.pop(0) if self.left else None

    def said(self, task: Task, what: Any) -> None:
        self.heard.append(what)

    def refused(self, task: Task, why: str) -> None:
        self.bad[task.name] = why

    died = refused

    def should_stop(self) -> bool:
        return self.stop(self.heard)


def test_tasks_are_shared_and_what_goes_wrong_costs_one_task_alone() -> None:
    lead = Lead([1, "dies", Unloadable(), lambda: None, "fails", 2, 3])
    run_tasks(lead, work, jobs=2, threads=3)
    assert sorted(load for load, _, _ in lead.heard) == [1, 2, 3]
    assert os.getpid() not in {pid for _, pid, _ in lead.heard}
    assert {threads for _, _, threads in lead.heard} == {"3"}
    assert lead.bad == {
        "task 1": "its process was killed, perhaps for want of memory; try fewer --jobs",
        "task 2": "ValueError: not here",
        "task 3": "it cannot be pickled",
        "task 4": "its process ended with status 3",
    }


def test_a_stop_reaches_what_runs_and_nothing_more_begins() -> None:
    lead = Lead(["waits", "waits", 1], lambda heard: heard.count("waiting") == 2)
    run_tasks(lead, work, jobs=2, threads=1)
    assert sorted(lead.heard) == ["stopped", "stopped", "waiting", "waiting"]
    assert len(lead.left) == 1


def test_where_no_process_can_begin_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cannot, "__module__", "no_such_module")
    monkeypatch.setitem(sys.modules, "no_such_module", sys.modules[__name__])
    with pytest.raises(AtollError, match=r"no process could begin .*: its process ended with"):
        run_tasks(Lead([1]), cannot, jobs=1, threads=1)


PARENT = """
import signal
import sys
# A job in the background of a shell ignores it, and so do the tests that run there.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from tests.studies.test_workers import Lead, work
from atoll.studies.workers import run_tasks

class Loud(Lead):
    def said(self, task, what):
        print(what, flush=True)

run_tasks(Loud(["sleeps", "sleeps"]), work, jobs=2, threads=1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_parent(number: int) -> None:
    # A script without a guard around its calls, as people write them.
    command = [sys.executable, "-c", PARENT, str(Path(__file__).parent)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        began = time.monotonic()
        parent.send_signal(number)
        parent.wait(30)
    limit = time.monotonic() + 30
    while any(map(_alive, pids)):
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert time.monotonic() - began < 20  # they would have slept for a minute


def _alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
