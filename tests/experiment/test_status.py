"""The events of a study, and the status of runs and studies from their files."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import atoll
from atoll.core.errors import ConfigError
from atoll.experiment.config import make_config
from atoll.experiment.folder import NotFinished, open_run
from atoll.experiment.observers import PROGRESS
from atoll.experiment.run import Stopped
from atoll.experiment.status import (
    EVENTS,
    NewEvents,
    StatusReader,
    append_event,
    failures,
    read_events,
)
from atoll.present.watch import follow, plain, status_text
from atoll.studies.study import run_study
from atoll.studies.study_run import StudyObserver, StudyRun
from tests.experiment.conftest import SMALL, StopAt


def text(watch: StatusReader) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(status_text(watch.read()))
    return console.export_text()


def says(folder: Path, **changes: object) -> None:
    """Change what a run says of itself."""
    path = folder / PROGRESS
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_stopped_run_says_so_and_a_finished_one_leaves_no_sign_of_life(stopped: Path) -> None:
    shown = text(StatusReader(stopped))
    assert "fedavg on lagoon:nodes=150" in shown
    assert "stopped" in shown
    assert "seed 0, round 3/4" in shown
    atoll.resume(stopped)
    assert not (stopped / PROGRESS).exists()
    assert StatusReader(stopped).read().finished
    assert "test accuracy" in text(StatusReader(stopped))


def test_a_running_run_shows_round_curve_and_time_left(stopped: Path) -> None:
    says(stopped, state="running", per_round=30.0)
    seen = StatusReader(stopped).read()
    assert (seen.silent, seen.left, seen.finished) == (None, 30.0, False)
    shown = text(StatusReader(stopped))
    assert "running, about 30 s left" in shown
    line = next(line for line in shown.splitlines() if line.startswith("validation"))
    assert len(set(line.split()[1])) > 1
    assert "best" in line
    assert plain(seen)["now"]["round"] == 3
    says(stopped, state="running", validation=[0.5, 1.0] * 60, best=1.0, best_round=1000)
    lines = text(StatusReader(stopped)).splitlines()
    assert any(line.startswith("validation") and line.endswith("round 1000") for line in lines)


def test_a_killed_run_is_not_called_running(stopped: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    says(stopped, state="running", pid=int(dead.stdout))
    assert StatusReader(stopped).read().gone
    # On another host the process cannot be checked; only the last sign of life is known.
    says(stopped, host="elsewhere")
    assert StatusReader(stopped).read().silent is None
    old = time.time() - 180
    os.utime(stopped / PROGRESS, (old, old))
    shown = text(StatusReader(stopped))
    assert "silent for 3 min" in shown
    assert "running" not in shown
    says(stopped, per_round=100.0)  # a round that takes so long may take longer
    os.utime(stopped / PROGRESS, (old, old))
    assert StatusReader(stopped).read().silent is None


def test_a_process_that_waits_for_its_parent_is_dead(stopped: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet asked about
    says(stopped, state="running", pid=child.pid)
    assert StatusReader(stopped).read().gone
    child.wait()


def test_a_study_counts_its_cells(tmp_path: Path) -> None:
    cells = [StudyRun(name, make_config(method=name, **SMALL), {"method": name})
             for name in ("local", "fedavg")]  # fmt: skip
    broken = StudyRun("broken", make_config(data="no-such-set"), {})
    run_study(tmp_path, [cells[0], broken], about={"kind": "compare"})
    study = json.loads((tmp_path / "study.json").read_text())
    study["cells"] += [{"name": "fedavg"}, {"name": "later"}]
    (tmp_path / "study.json").write_text(json.dumps(study))
    began = {"at": time.time() - 5, "event": "begin", "cell": "fedavg"}
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(began) + "\n" + '{"at": 17')  # cut in the middle of a line
    watch = StatusReader(tmp_path)
    seen = watch.read()
    assert dict(seen.cells) == {"finished": 1, "failed": 1, "running": 1, "left": 1}
    assert seen.best[0][:2] == ("lagoon:nodes=150", "local")
    assert seen.left is not None
    shown = text(watch)
    assert "1 finished, 1 failed, 1 running, 1 left" in shown
    assert "fedavg: no round yet" in shown
    assert "failed: broken: unknown data set 'no-such-set'" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


def test_cells_that_run_at_once_are_all_seen(tmp_path: Path, stopped: Path) -> None:
    names = ["a", "b", "c", "d"]
    cells = [{"name": name, "labels": {}} for name in names]
    (tmp_path / "study.json").write_text(json.dumps({"kind": "compare", "cells": cells}))
    begun = [{"at": time.time() - 5, "event": "begin", "cell": name} for name in names[:3]]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in begun))
    for name, per_round in (("a", 10.0), ("b", 30.0)):  # three of four rounds are played
        shutil.copytree(stopped, tmp_path / "cells" / name)
        says(tmp_path / "cells" / name, state="running", per_round=per_round, updated=time.time())
    watch = StatusReader(tmp_path)
    seen = watch.read()
    assert dict(seen.cells) == {"running": 3, "left": 1}
    assert seen.now is not None
    assert {seen.now["cell"], *(one["cell"] for one in seen.others)} == {"a", "b", "c"}
    # A cell takes 80 s, the mean of two: one such is left, the third has half of it to go.
    assert seen.left == pytest.approx((10 + 30 + 40 + 80) / 3)
    shown = text(watch)
    for line in ("a: seed 0, round 3/4, 10 s a round", "b: seed 0, round 3/4, 30 s a round",
                 "c: no round yet", "running, about 53 s left"):  # fmt: skip
        assert line in shown
    assert shown.count("validation ") == 1  # of one, so that many fit
    # One process that has died is none that all have in common.
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    says(tmp_path / "cells" / "b", pid=int(dead.stdout))
    assert not watch.read().gone
    says(tmp_path / "cells" / "a", pid=int(dead.stdout))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in begun[:2]))
    assert watch.read().gone


def test_a_study_that_goes_on_with_more_seeds_is_not_finished(tmp_path: Path) -> None:
    def run(seeds: int, observer: StudyObserver | None = None) -> None:
        cells = [StudyRun(name, make_config(method=name, seeds=seeds, **SMALL), {"method": name})
                 for name in ("local", "fedavg")]  # fmt: skip
        run_study(tmp_path, cells, about={"kind": "compare"}, observer=observer)

    class Stops(StudyObserver):
        def run(self, run: StudyRun) -> StopAt:
            return StopAt(2)

    run(1)
    watch = StatusReader(tmp_path)
    assert watch.read().finished
    with pytest.raises(Stopped):
        run(2, Stops())
    for look in (watch, StatusReader(tmp_path)):
        assert dict(look.read().cells) == {"stopped": 1, "left": 1}
    with pytest.raises(NotFinished, match="has 1 of its 2 seeds"):
        open_run(tmp_path / "cells" / "local")
    run(2)
    assert watch.read().finished


def test_a_cell_that_was_deleted_is_left_to_run(tmp_path: Path) -> None:
    cells = [StudyRun(name, make_config(method=name, **SMALL), {"method": name})
             for name in ("local", "fedavg")]  # fmt: skip
    run_study(tmp_path, cells, about={"kind": "compare"})
    shutil.rmtree(tmp_path / "cells" / "fedavg")
    watch = StatusReader(tmp_path)
    assert dict(watch.read().cells) == {"finished": 1, "left": 1}
    assert "between two cells, or stopped" in text(watch)


def test_watching_ends_with_the_study(stopped: Path) -> None:
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            atoll.resume(stopped)
        assert len(looks) < 9

    for terminal in (True, False):
        console = Console(width=80, force_terminal=terminal, file=io.StringIO())
        follow(StatusReader(stopped), console, 0.5, sleep)
    assert looks == [0.5, 0.5]


def test_what_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a run nor a study"):
        StatusReader(tmp_path)


def test_half_a_line_costs_one_event_only(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    append_event(tmp_path, {"event": "begin", "cell": "a"})
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"event": "end", "ce')  # the process was killed here
    append_event(tmp_path, {"event": "begin", "cell": "b"})
    assert [event["cell"] for event in read_events(tmp_path)] == ["a", "b"]


def test_a_failure_counts_until_the_cell_begins_again(tmp_path: Path) -> None:
    append_event(tmp_path, {"event": "failed", "cell": "a", "error": "no"})
    append_event(tmp_path, {"event": "failed", "cell": "b"})
    assert failures(tmp_path) == {"a": "no", "b": "failed"}
    append_event(tmp_path, {"event": "begin", "cell": "a"})
    assert failures(tmp_path) == {"b": "failed"}


def test_new_events_are_whole_lines_since_the_last_call(tmp_path: Path) -> None:
    append_event(tmp_path, {"event": "begin", "cell": "old"})
    news = NewEvents(tmp_path)
    assert news.read() == []
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"event": "begin", "cell": "a"}\n{"event"')
    assert [event["cell"] for event in news.read()] == ["a"]
    with (tmp_path / EVENTS).open("a") as file:
        file.write(': "end", "cell": "a"}\n')
    assert [event["event"] for event in news.read()] == ["end"]
