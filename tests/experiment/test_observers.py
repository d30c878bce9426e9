"""Observers: which events reach them, and the file that they leave for other processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import atoll
from atoll.experiment.config import make_config
from atoll.experiment.history import History
from atoll.experiment.observers import PROGRESS, Observer, Observers, Progress
from atoll.experiment.result import Result
from tests.experiment.conftest import SMALL, StopAt


def test_signs_of_life_are_rare_and_small(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = [], Progress.write
    monkeypatch.setattr(Progress, "write", lambda *of: written.append(1) or write(*of))
    monkeypatch.setattr("atoll.experiment.observers.EVERY", 1e6)
    atoll.run("fedavg", out=stopped.parent / "other", **SMALL)
    assert len(written) == 1  # the first round
    assert (stopped / PROGRESS).stat().st_size < 1000


def test_a_sign_that_cannot_be_written_stops_nobody(stopped: Path) -> None:
    progress = Progress(stopped / "config.toml")  # a file where a folder is needed
    progress.begin(make_config(rounds=4), "fused", "", [])
    history = atoll.resume(stopped).seeds[0].history
    progress.round(0, history)
    assert progress.written > 0  # it has tried


def test_an_observer_is_notified_of_every_event_and_the_first_one_stops_the_run() -> None:
    events: list[str] = []

    class Noting(Observer):
        def begin(self, *args: object) -> None:
            events.append("begin")

        def round(self, seed: int, history: History) -> None:
            events.append(f"round {history.rounds}")

        def end(self, result: Result) -> None:
            events.append("end")

    atoll.run("local", observer=Noting(), **{**SMALL, "rounds": 2})
    assert events == ["begin", "round 1", "round 2", "end"]
    assert not Observers(Observer(), None, [StopAt(0)]).should_stop()
    assert Observers(StopAt(0), None, []).should_stop()
