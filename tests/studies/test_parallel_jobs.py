"""How many processes a study gets, and in which order they take its tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import ConfigError
from atoll.experiment import hardware as machine
from atoll.experiment.config import RunConfig, make_config
from atoll.studies import parallel
from atoll.studies.costs import PROCESS
from atoll.studies.parallel import RunGroup, Schedule, check_jobs, choose_jobs
from atoll.studies.study_run import StudyRun

LONG = [make_config(method=name, data="cora", rounds=1000) for name in ("fedavg", "fedath", "moon")]


@pytest.fixture
def _a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 4)
    monkeypatch.setattr(parallel, "available_memory", lambda: 100 * PROCESS)
    monkeypatch.setattr(parallel, "on_gpu", lambda config: config.device == "cuda")


@pytest.mark.usefixtures("_a_machine")
def test_auto_takes_what_gains_time_and_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_jobs("auto", LONG) == 3  # no more than there is to do
    assert choose_jobs("auto", LONG * 2) == 4
    assert choose_jobs("auto", LONG[:1]) == 1
    assert choose_jobs("auto", []) == 1
    assert choose_jobs("auto", [make_config(rounds=2)] * 5) == 1  # over before others begin
    assert choose_jobs("auto", [*LONG, make_config(device="cuda")]) == 1
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


def test_a_group_s_share_of_processors_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(machine, "Path", lambda path: limit)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for text, expected in (("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1)):
        limit.write_text(text + "\n")
        assert machine.cores() == expected


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
