"""A study's progress: how long the rest takes, and a line now and then without a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from atoll.study import cells_show
from atoll.study.cells import Cell, Outcome, run_cells
from atoll.study.cells_show import StudyWatcher, TimeLeft, duration
from atoll.study.config import make_config


def cell(method: str, data: str, rounds: int = 10) -> Cell:
    config = make_config(method="fedavg", rounds=rounds, seeds=2)
    labels = {"method": method, "data": data, "clients": 5}
    return Cell(f"{data}-{method}", config, labels)


def ended(one: Cell, train: float) -> Outcome:
    return Outcome(one, Path(), {"seconds": {"train": train}})


def test_the_time_left_knows_slow_methods_and_slow_data() -> None:
    fast, slow = cell("fast", "small"), cell("slow", "small")
    later = [cell("fast", "large"), cell("slow", "large")]
    left = TimeLeft([fast, slow, *later])
    assert left.seconds() is None
    left.advance(fast, 0.5, 1.0)  # a second a round, and ten of its twenty rounds are left
    assert left.seconds() == pytest.approx(10 + 3 * 20)
    left.end(ended(fast, 20.0))
    left.end(ended(slow, 60.0))  # three seconds a round
    assert left.seconds() == pytest.approx(20 * 1 + 20 * 3)
    left.end(ended(later[0], 40.0))  # two seconds a round: the large data take twice as long
    assert left.seconds() == pytest.approx(20 * 2 * 3 / 2)
    left.end(Outcome(later[1], Path(), error="failed"))
    assert left.seconds() == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "about 1 s"), (89, "about 89 s"), (600, "about 10 min"), (9000, "about 2.5 h")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def watched(tmp_path: Path, *, quiet: bool = False) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    methods = ("local", "fedavg")
    cells = [Cell(name, make_config(method=name, rounds=2, clients=2)) for name in methods]
    with StudyWatcher(console, quiet=quiet) as watcher:
        run_cells(tmp_path, cells, about={}, observer=watcher)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_show, "EVERY", 0.0)
    lines = watched(tmp_path / "a").splitlines()
    assert len(lines) == 2 * 3  # each round and each end
    assert lines[0].startswith("[1/2] local: seed 0, round 1/2, validation ")
    assert lines[2].startswith("[1/2] local: validation ")
    assert " left" in lines[2]
    assert " left" not in lines[-1]
    assert watched(tmp_path / "a") == "2 of 2 cells were finished before\n"
    monkeypatch.setattr(cells_show, "EVERY", 30.0)
    assert len(watched(tmp_path / "b").splitlines()) == 2
    assert watched(tmp_path / "c", quiet=True) == ""
