"""Cells in several processes: the same numbers, files, events and errors as in one."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest

import atoll
from atoll.core.errors import ConfigError
from atoll.experiment.config import RunConfig, make_config
from atoll.experiment.events import read_events
from atoll.experiment.history import History
from atoll.experiment.run import Observer
from atoll.methods import FedAvg
from atoll.nn import GCN
from atoll.studies.study import Cell, Outcome, run_cells

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
    """Notes everything (`StudyObserver`, `SeesProcesses`)."""

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.ends: list[str] = []
        self.rounds: Counter[str] = Counter()
        self.jobs = (0, 0)

    def begin(self, cells: list[Cell], finished: int) -> None:
        self.finished = finished

    def side_by_side(self, jobs: int, threads: int) -> None:
        self.jobs = jobs, threads

    def should_stop(self) -> bool:
        return False

    def cell(self, cell: Cell) -> Observer:
        self.cells.append(cell.name)
        return HeardCell(self, cell.name)

    def ended(self, outcome: Outcome) -> None:
        self.ends.append(outcome.cell.name)


class HeardCell:
    def __init__(self, study: Heard, name: str) -> None:
        self.study, self.name = study, name

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        assert config.rounds == SMALL["rounds"]

    def round(self, seed: int, history: History) -> None:
        self.study.rounds[self.name] = history.rounds
        assert len(history.scores["deployed"]) == len(history.scores["local"]) == history.rounds
        assert history.scores["deployed"][-1].shape == (2, 3, 5)

    def should_stop(self) -> bool:
        return False


def plain() -> list[Cell]:
    return [
        Cell(name, make_config(method=name, **SMALL), {"method": name})
        for name in ("local", "fedavg", "fedprox")
    ]


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run_cells(folder, plain(), about=ABOUT)
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

    def made(name: str, method: FedAvg) -> Cell:
        config = make_config(method=name, data=federation.name, rounds=6,
                             objects=["method", "data"])  # fmt: skip
        return Cell(name, config, method=method, data=federation)

    dying = make_config(method=f"{tmp_path / 'dying.py'}:Dying", **SMALL)
    odd = [
        Cell("dying", dying), Cell("broken", make_config(data="no-such-set", rounds=6)),
        made("here", Here(net=net)), made("object", FedAvg(net=net)),
    ]  # fmt: skip
    heard, folder = Heard(), tmp_path / "study"
    cells = [*odd, *plain()]
    with caplog.at_level(logging.WARNING):
        outcomes = run_cells(folder, cells, about=ABOUT, observer=heard, jobs=2, log="tensorboard")
    assert [outcome.cell.name for outcome in outcomes] == [cell.name for cell in cells]
    errors = {o.cell.name: o.error for o in outcomes if o.error}
    assert list(errors) == ["dying", "broken"]
    assert "killed, perhaps for want of memory; try fewer --jobs" in (errors["dying"] or "")
    assert "no-such-set" in (errors["broken"] or "")
    assert all(outcome.fresh for outcome in outcomes)
    for name, events in states(folder).items():
        assert events == ["begin", "failed" if name in errors else "end"]
    assert "another process cannot have what here is made of" in caplog.text
    assert "object" not in caplog.text
    assert outcomes[2].summary is not None
    assert outcomes[3].summary is not None
    assert outcomes[2].summary["metrics"] == outcomes[3].summary["metrics"]
    assert sorted(heard.ends) == sorted(cell.name for cell in cells)
    assert heard.jobs[0] == 2
    assert len(list(folder.glob("cells/*/tensorboard/seed-0/events*"))) >= len(cells) - len(errors)
    assert {heard.rounds[cell.name] for cell in plain()} == {SMALL["rounds"]}
    same_numbers(folder, one_by_one)


def test_an_interrupt_leaves_no_cell_as_running_and_all_go_on(
    tmp_path: Path, one_by_one: Path
) -> None:
    class Interrupted(Heard):
        def should_stop(self) -> bool:
            if self.rounds:
                raise KeyboardInterrupt  # the second Ctrl-C
            return False

    with pytest.raises(KeyboardInterrupt):
        run_cells(tmp_path, plain(), about=ABOUT, observer=Interrupted(), jobs=2)
    ends = {name: events[-1] for name, events in states(tmp_path).items()}
    assert set(ends.values()) <= {"stopped", "end"}
    heard = Heard()
    outcomes = run_cells(tmp_path, plain(), about=ABOUT, observer=heard)
    assert not any(outcome.error for outcome in outcomes)
    assert heard.finished == len(list(ends.values())) - list(ends.values()).count("stopped")
    assert all(events.count("end") == 1 for events in states(tmp_path).values())
    same_numbers(tmp_path, one_by_one)
    before = (tmp_path / "events.jsonl").read_bytes()
    again = Heard()
    outcomes = run_cells(tmp_path, plain(), about=ABOUT, observer=again, jobs=2)
    assert not any(outcome.fresh for outcome in outcomes)
    assert again.jobs == (0, 0)  # there was nothing to start a process for
    assert (tmp_path / "events.jsonl").read_bytes() == before


def test_a_number_of_processes_that_is_none_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="jobs is '0'"):
        run_cells(tmp_path / "study", plain(), about=ABOUT, jobs=0)
    assert not (tmp_path / "study").exists()
