"""A study's progress: the time left, and occasional lines without a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from atoll.cli import study_progress as cells_show
from atoll.cli.study_progress import StudyWatcher, TimeLeft, duration
from atoll.experiment.config import make_config
from atoll.experiment.run import Stopped
from atoll.studies.study import run_study
from atoll.studies.study_run import RunOutcome, StudyRun, method_costs


def cell(method: str, data: str, rounds: int = 10) -> StudyRun:
    config = make_config(method="fedavg", rounds=rounds, seeds=2)
    labels = {"method": method, "data": data, "clients": 5}
    return StudyRun(f"{data}-{method}", config, labels)


def ended(one: StudyRun, train: float) -> RunOutcome:
    return RunOutcome(one, Path(), {"seconds": {"train": train}})


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
    left.end(RunOutcome(later[1], Path(), error="failed"))
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
    cells = [StudyRun(name, make_config(method=name, rounds=2, clients=2)) for name in methods]
    with StudyWatcher(console, quiet=quiet) as watcher:
        run_study(tmp_path, cells, about={}, observer=watcher)
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


def test_a_study_stops_when_its_time_is_up(tmp_path: Path) -> None:
    cells = [StudyRun("local", make_config(method="local", rounds=2, clients=2))]
    with StudyWatcher(Console(quiet=True), quiet=True, seconds=0.0) as watcher:
        assert watcher.should_stop()
        with pytest.raises(Stopped):
            run_study(tmp_path, cells, about={}, observer=watcher)
    assert not watcher.stopping  # the user did not
    assert not StudyWatcher(Console(quiet=True), quiet=True).should_stop()


def test_a_slow_method_that_comes_first_does_not_make_the_others_seem_slow() -> None:
    def of(method: str, data: str) -> StudyRun:
        config = make_config(method=method, data=data, rounds=100)
        return StudyRun(f"{data}-{method}", config, {"method": method, "data": data})

    slow, fast, large = of("fedath", "cora"), of("fedavg", "cora"), of("fedavg", "pubmed")
    left, costs = TimeLeft([slow, fast, large]), method_costs()
    left.end(ended(slow, 10 * costs["fedath"]))  # ten times the cost in recipes/costs.toml
    expected = 10 * costs["fedavg"]
    assert left.seconds() == pytest.approx(expected + 9.5 * expected, rel=0.01)
    assert left.seconds(jobs=2) == pytest.approx(9.5 * expected, rel=0.01)  # what one cell takes
    left.end(ended(large, 9.5 * expected / 2))
    assert left.seconds(jobs=2) == left.seconds() == pytest.approx(expected, rel=0.5)


def test_several_cells_at_once_have_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_show, "EVERY", 0.0)
    console = Console(file=io.StringIO(), width=200, highlight=False)
    cells = [cell(f"m{number}", "small") for number in range(7)]
    with StudyWatcher(console, quiet=False) as watcher:
        watcher.begin(cells, 0)
        watcher.parallel(6, 2)
        for one in cells[:6]:
            watcher.run(one)
        watcher.draw(cells[1].name, "seed 0, round 5/10", 0.25)
        task = watcher.progress.tasks[0]
        assert task.completed == 0.25
        watcher.ended(ended(cells[0], 20.0))
        watcher.draw(cells[2].name, "seed 0, round 10/10", 0.5)
        assert task.completed == 1.75
        for one in cells[1:4]:
            watcher.ended(ended(one, 20.0))
        watcher.draw(cells[5].name, "seed 1, round 1/10", 0.55)
        watcher.ended(ended(cells[4], 20.0))
        watcher.draw(cells[5].name, "seed 1, round 1/10", 0.55)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "6 cells at once, in processes of 2 threads each"
    assert lines[1] == "[0/7] small-m0 0%, small-m1 25%, small-m2 0%, small-m3 0% and 2 more"
    assert (
        "[1/7] small-m1 25%, small-m2 50%, small-m3 0%, small-m4 0% and 1 more; about" in lines[3]
    )
    assert any(line.startswith("[4/7] small-m4 0%, small-m5 55%; about") for line in lines)
    assert lines[-1].startswith("[6/7] small-m5: seed 1, round 1/10; about")
