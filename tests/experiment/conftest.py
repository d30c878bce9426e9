"""A small run that was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

import atoll
from atoll.experiment.observers import Observer
from atoll.experiment.run import Stopped

SMALL = {"data": "lagoon:nodes=150", "clients": 2, "rounds": 4, "epochs": 1, "set": {"hidden": 8}}


class StopAt(Observer):
    def __init__(self, rounds: int) -> None:
        self.rounds, self.played = rounds, 0

    def round(self, seed, history):
        self.played += 1

    def should_stop(self):
        return self.played >= self.rounds


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    with pytest.raises(Stopped):
        atoll.run("fedavg", out=tmp_path / "run", observer=StopAt(3), **SMALL)
    return tmp_path / "run"
