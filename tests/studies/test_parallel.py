"""Cells in several processes: the same numbers, files, events and errors as in one."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.core.errors import AtollError, ConfigError
from atoll.experiment.config import RunConfig, make_config
from atoll.experiment.hardware import cores
from atoll.experiment.observers import Observer
from atoll.experiment.status import read_events
from atoll.methods import FedAvg
from atoll.nn import GCN
from atoll.studies import parallel, study_run
from atoll.studies.parallel import RunGroup, Schedule, check_jobs, choose_jobs
from atoll.studies.study import run_study
from atoll.studies.study_run import PROCESS, RunOutcome, StudyRun

ABOUT = {"kind": "compare"}
SMALL = {"data": "lagoon:nodes=150", "clients": 2, "rounds": 6}
DYING = '''
import os, signal
from dataclasses import dataclass
from atoll.methods import FedAvg

@dataclass(frozen=True)
class Dying(FedAvg):
    """Dies in its first round, as a process does that is out of memory."""

    def round(self, server, clients):
        os.kill(os.getpid(), signal.SIGKILL)
'''


class Heard:
    """Notes everything (`StudyObserver`)."""

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.ends: list[str] = []
        self.rounds: Counter[str] = Counter()
        self.notes: dict[str, list[str]] = {}
        self.jobs = (0, 0)

    def begin(self, cells: list[StudyRun], finished: int) -> None:
        self.finished = finished

    def parallel(self, jobs: int, threads: int) -> None:
        self.jobs = jobs, threads

    def should_stop(self) -> bool:
        return False

    def run(self, run: StudyRun) -> Observer:
        self.cells.append(run.name)
        return HeardRun(self, run.name)

    def ended(self, outcome: RunOutcome) -> None:
        self.ends.append(outcome.run.name)


class HeardRun(Observer):
    """Notes the rounds that progress.json tells (`ReadsFiles`)."""

    def __init__(self, study: Heard, name: str) -> None:
        self.study, self.name = study, name

    def begin(self, config: object, engine: str, why: str, notes: list[str]) -> None:
        self.notes(notes)

    def notes(self, notes: Sequence[str]) -> None:
        self.study.notes[self.name] = list(notes)

    def progress(self, progress: Mapping[str, Any]) -> None:
        assert progress["rounds"] == SMALL["rounds"]
        assert progress["done"] == progress["round"] <= SMALL["rounds"]
        self.study.rounds[self.name] = progress["round"]


def plain() -> list[StudyRun]:
    return [
        StudyRun(name, make_config(method=name, **SMALL), {"method": name})
        for name in ("local", "fedavg", "fedprox")
    ]


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run_study(folder, plain(), about=ABOUT)
    return folder


def same_numbers(folder: Path, other: Path) -> None:
    for cell in plain():
        for name in ("metrics.csv", "ledger.csv", "config.toml", "asked.toml"):
            ours, theirs = (f / "cells" / cell.name / name for f in (folder, other))
            assert ours.read_bytes() == theirs.read_bytes()


def states(folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for event in read_events(folder):
        found.setdefault(event["cell"], []).append(event["event"])
    return found


def test_what_goes_wrong_in_a_process_costs_one_cell_alone(
    tmp_path: Path, one_by_one: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    federation = atoll.partition(atoll.load(SMALL["data"]), "louvain", clients=2)
    net = GCN(federation.features, federation.classes, hidden=8)

    class Here(FedAvg):
        """Of a function, so that no other process can find it."""

    def made(name: str, method: FedAvg) -> StudyRun:
        config = make_config(method=name, data=federation.name, rounds=6,
                             objects=["method", "data"])  # fmt: skip
        return StudyRun(name, config, method=method, data=federation)

    dying = make_config(method=f"{tmp_path / 'dying.py'}:Dying", **SMALL)
    odd = [
        StudyRun("dying", dying), StudyRun("broken", make_config(data="no-such-set", rounds=6)),
        made("here", Here(net=net)), made("object", FedAvg(net=net)),
    ]  # fmt: skip
    heard, folder = Heard(), tmp_path / "study"
    cells = [*odd, *plain()]
    with caplog.at_level(logging.WARNING):
        outcomes = run_study(folder, cells, about=ABOUT, observer=heard, jobs=2, log="tensorboard")
    assert [outcome.run.name for outcome in outcomes] == [cell.name for cell in cells]
    errors = {o.run.name: o.error for o in outcomes if o.error}
    assert list(errors) == ["dying", "broken"]
    assert "killed, perhaps because memory was full; try fewer --jobs" in (errors["dying"] or "")
    assert "no-such-set" in (errors["broken"] or "")
    assert all(outcome.fresh for outcome in outcomes)
    for name, events in states(folder).items():
        assert events == ["begin", "failed" if name in errors else "end"]
    assert "another process cannot load here" in caplog.text
    assert "object" not in caplog.text
    assert outcomes[2].summary is not None
    assert outcomes[3].summary is not None
    assert outcomes[2].summary["metrics"] == outcomes[3].summary["metrics"]
    assert sorted(heard.ends) == sorted(cell.name for cell in cells)
    assert heard.jobs[0] == 2
    assert len(list(folder.glob("cells/*/tensorboard/seed-0/events*"))) >= len(cells) - len(errors)
    assert sorted(heard.cells) == sorted(cell.name for cell in cells)
    same_numbers(folder, one_by_one)


@pytest.mark.parametrize("unread", [False, True])
def test_an_interrupt_leaves_no_cell_as_running_and_all_go_on(
    tmp_path: Path, one_by_one: Path, unread: bool
) -> None:
    class Interrupted(Heard):
        def should_stop(self) -> bool:
            # The second Ctrl-C, maybe before the parent has read that a run began. A quick run may
            # end before the parent reads a round; two of three begin at once, so one is left.
            if self.rounds or self.ends or (unread and states(tmp_path)):
                raise KeyboardInterrupt
            return False

    with pytest.raises(KeyboardInterrupt):
        run_study(tmp_path, plain(), about=ABOUT, observer=Interrupted(), jobs=2)
    ends = {name: events[-1] for name, events in states(tmp_path).items()}
    assert set(ends.values()) <= {"stopped", "end"}
    heard = Heard()
    outcomes = run_study(tmp_path, plain(), about=ABOUT, observer=heard)
    assert not any(outcome.error for outcome in outcomes)
    assert heard.finished == len(list(ends.values())) - list(ends.values()).count("stopped")
    assert all(events.count("end") == 1 for events in states(tmp_path).values())
    same_numbers(tmp_path, one_by_one)
    before = (tmp_path / "events.jsonl").read_bytes()
    again = Heard()
    outcomes = run_study(tmp_path, plain(), about=ABOUT, observer=again, jobs=2)
    assert not any(outcome.fresh for outcome in outcomes)
    assert again.jobs == (0, 0)  # there was nothing to start a process for
    assert (tmp_path / "events.jsonl").read_bytes() == before


def test_an_interrupt_just_after_the_end_of_a_run_does_not_call_it_stopped(
    tmp_path: Path, one_by_one: Path
) -> None:
    shutil.copytree(one_by_one / "cells", tmp_path / "cells")
    done, other, _ = plain()
    (tmp_path / "cells" / other.name / "result.json").unlink()
    for run in (done, other):
        study_run.note_stop(tmp_path, run)
    assert states(tmp_path) == {done.name: ["end"], other.name: ["stopped"]}


def test_a_number_of_processes_that_is_none_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="jobs is '0'"):
        run_study(tmp_path / "study", plain(), about=ABOUT, jobs=0)
    assert not (tmp_path / "study").exists()


ODD = """
import os
from dataclasses import dataclass
from atoll.methods import FedAvg

def refuse():
    raise ValueError("not here")

@dataclass(frozen=True)
class Unloadable(FedAvg):
    def __reduce__(self):
        return refuse, ()

@dataclass(frozen=True)
class Leaving(FedAvg):
    def round(self, server, clients):
        os._exit(3)
"""


def test_a_worker_that_cannot_load_a_run_leaves_it_to_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "odd_methods.py").write_text(ODD)
    monkeypatch.syspath_prepend(str(tmp_path))
    import odd_methods  # type: ignore[import-not-found]  # written above

    federation = atoll.partition(atoll.load(SMALL["data"], clients=2))
    net = GCN(federation.features, federation.classes, hidden=8)
    config = make_config(method="m", data=federation.name, rounds=2, objects=["method", "data"])
    runs = [
        StudyRun("unloadable", config, method=odd_methods.Unloadable(net=net), data=federation),
        StudyRun("leaving", config, method=odd_methods.Leaving(net=net), data=federation),
    ]
    heard = Heard()
    with caplog.at_level(logging.WARNING):
        outcomes = run_study(tmp_path / "s", [*runs, *plain()], about=ABOUT, jobs=2, observer=heard)
    errors = {o.run.name: o.error for o in outcomes if o.error}
    assert errors == {"leaving": "its process ended with status 3"}
    assert "cannot load unloadable (ValueError: not here)" in caplog.text
    assert states(tmp_path / "s")["unloadable"] == ["refused", "begin", "end"]
    assert heard.jobs[1] == max(1, cores() // 2)


def test_notes_on_the_data_reach_the_parent(tmp_path: Path) -> None:
    noted = [replace(run, config=make_config(method=run.name, data="lagoon:nodes=150", clients=2,
                                             rounds=1, split="0.01/0.5/0.49"))
             for run in plain()[:2]]  # fmt: skip
    heard, alone = Heard(), Heard()
    run_study(tmp_path / "two", noted, about=ABOUT, jobs=2, observer=heard)
    run_study(tmp_path / "one", noted, about=ABOUT, jobs=1, observer=alone)
    assert heard.notes == alone.notes
    assert all(heard.notes.values())


def test_where_no_process_can_begin_the_study_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "BOOT", "raise SystemExit(7)")
    sentence = "no worker process could start: its process ended with status 7"
    with pytest.raises(AtollError, match=sentence):
        run_study(tmp_path, plain(), about=ABOUT, jobs=2)


PARENT = """
import signal
import sys
from pathlib import Path
# A job in the background of a shell ignores it, and so do the tests that run there.
signal.signal(signal.SIGINT, signal.default_int_handler)
from atoll.experiment.config import make_config
from atoll.studies.study import run_study
from atoll.studies.study_run import StudyRun

options = {"data": "lagoon:nodes=150", "clients": 2, "rounds": 100_000}
runs = [StudyRun(name, make_config(method=name, **options)) for name in ("local", "fedavg")]
run_study(Path(sys.argv[1]), runs, about={"kind": "compare"}, jobs=2)
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)],
)
def test_no_worker_outlives_its_parent(tmp_path: Path, number: int) -> None:
    # A script without a guard around its calls, as people write them.
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    files = [tmp_path / "cells" / name / "progress.json" for name in ("local", "fedavg")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as parent:
        limit = time.monotonic() + 100
        while not all(path.exists() for path in files):
            assert parent.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.05)
        pids = [json.loads(path.read_text())["pid"] for path in files]
        assert parent.pid not in pids
        parent.send_signal(number)
        parent.wait(60)
    limit = time.monotonic() + 60
    while any(map(_alive, pids)):
        assert time.monotonic() < limit
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


LONG = [make_config(method=name, data="cora", rounds=1000) for name in ("fedavg", "fedath", "moon")]


@pytest.fixture
def _a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 4)
    monkeypatch.setattr(parallel, "available_memory", lambda: 100 * PROCESS)
    monkeypatch.setattr(study_run, "on_gpu", lambda config: config.device == "cuda")


@pytest.mark.usefixtures("_a_machine")
def test_auto_takes_what_gains_time_and_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_jobs("auto", LONG) == 3  # no more than there is to do
    assert choose_jobs("auto", LONG * 2) == 4
    assert choose_jobs("auto", LONG[:1]) == 1
    assert choose_jobs("auto", []) == 1
    assert choose_jobs("auto", [make_config(rounds=2)] * 5) == 1  # over before others begin
    monkeypatch.setattr(parallel, "device_memory", lambda: 3 * parallel.ON_GPU)
    gpu = [make_config(method="fedath", data="cora", rounds=1000, device="cuda")]
    assert [choose_jobs("auto", gpu * many) for many in (3, 8, 12, 99)] == [1, 2, 3, 3]
    monkeypatch.setattr(parallel, "available_memory", lambda: int(2.5 * PROCESS))
    assert choose_jobs("auto", LONG) == 2
    large = make_config(method="fedavg", data="physics", rounds=100)
    assert choose_jobs("auto", [*LONG, large]) == 1


@pytest.mark.usefixtures("_a_machine")
def test_what_the_user_says_is_done() -> None:
    assert choose_jobs(7, LONG * 9) == choose_jobs("7", LONG * 9) == 7
    assert choose_jobs(7, LONG) == 3
    assert choose_jobs(2, [make_config(device="cuda")] * 2) == 2
    for wish in (0, -1, "0", "-2", "many", "", 1.5, True):
        with pytest.raises(ConfigError, match="give a number of processes, 1 or more, or auto"):
            check_jobs(wish)  # type: ignore[arg-type]  # what a user may try


def taken(order: Schedule, *lasts: str) -> list[str]:
    """Names in the order in which processes with these last tasks' kins get them."""
    found = []
    for kin in lasts:
        task = order.take(RunGroup((), kin) if kin else None)
        found.append("" if task is None else task.runs[0].name)
    return found


def tasks(*rows: tuple[str, str, float]) -> list[RunGroup]:
    return [RunGroup((StudyRun(name, RunConfig()),), kin, cost) for name, kin, cost in rows]


STUDY = tasks(("a1", "a", 2), ("a2", "a", 3), ("b1", "b", 1), ("b2", "b", 2), ("b3", "b", 1.5),
              ("dear", "a", 50))  # fmt: skip


def test_the_dearest_come_first_and_kin_stay_together() -> None:
    # The dear one; then a kin for each process; then help with what is left of the other's.
    order = Schedule(STUDY)
    assert taken(order, "", "", "a", "b", "b", "b", "") == [
        "dear",
        "a2",
        "a1",
        "b2",
        "b3",
        "b1",
        "",
    ]
    order = Schedule(tasks(("a1", "a", 2), ("b1", "b", 1), ("b2", "b", 2), ("b3", "b", 1)))
    assert taken(order, "", "", "a", "") == ["b2", "a1", "b1", "b3"]


def test_a_dear_one_of_very_many_stays_with_its_kin() -> None:
    many = tasks(*((f"{kin}{i}", kin, 1) for kin in "ab" for i in range(500)), ("dear", "a", 5))
    assert taken(Schedule(many), "", "", "a")[:2] == ["dear", "b0"]  # a's dearest; then b begins
    alone = tasks(*((f"{kin}{i}", kin, 1) for kin in "ab" for i in range(50)), ("dear", "b", 5))
    assert taken(Schedule(alone), "", "")[0] == "dear"


def test_the_cheapest_come_first_where_time_is_limited() -> None:
    order = Schedule(STUDY, dearest_first=False)
    assert taken(order, "", "b", "b", "b", "a", "a", "a") == [
        "b1",
        "b3",
        "b2",
        "a1",
        "a2",
        "dear",
        "",
    ]
    assert taken(Schedule([]), "") == [""]


def test_a_task_that_no_process_has_begun_comes_next() -> None:
    order = Schedule(STUDY, dearest_first=False)
    first = order.take(None)
    assert first is not None
    order.returned.append(first)
    assert taken(order, "a", "b") == ["b1", "b3"]


GB = 1 << 30


def test_runs_under_way_never_take_more_than_the_gpu_has() -> None:
    """Eleven processes and 140 GB: the dear ones that fit, and cheap ones beside them."""
    big = [RunGroup((StudyRun(f"big{i}", RunConfig()),), "a", 50, 30 * GB) for i in range(12)]
    small = [RunGroup((StudyRun(f"small{i}", RunConfig()),), "b", 3, 2 * GB) for i in range(40)]
    order, idle, names = Schedule([*big, *small], room=134 * GB), 11, list[str]()
    last: RunGroup | None = None
    while idle or order.under_way:
        while idle and (task := order.take(last)) is not None:
            idle, last = idle - 1, task
            names.append(task.runs[0].name)
            assert sum(one.memory for one in order.under_way.values()) <= order.room
        if len(names) == 11:  # no process waits at first
            assert [name.rstrip("0123456789") for name in names] == ["big"] * 4 + ["small"] * 7
        if not order.under_way:
            break
        order.ended(next(iter(order.under_way.values())))
        idle += 1
    assert len(names) == len(set(names)) == 52


def test_a_run_that_needs_more_than_the_gpu_has_runs_by_itself() -> None:
    rows = [("large", 200 * GB), ("one", GB), ("two", GB)]
    groups = [RunGroup((StudyRun(name, RunConfig()),), name, 1, memory) for name, memory in rows]
    order = Schedule(groups, room=100 * GB)
    first = order.take(None)
    assert first is not None
    assert first.runs[0].name == "large"
    assert order.take(None) is None  # it waits, although there is work
    order.ended(first)
    assert taken(order, "", "", "") == ["one", "two", ""]
