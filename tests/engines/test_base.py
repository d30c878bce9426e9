"""The registry of engines: a name or a user's factory becomes an engine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

import atoll
from atoll.core.errors import ConfigError
from atoll.core.tree import stack
from atoll.engines.base import ENGINES, Recordable, choose_engine, engine_factory, runs_at_once
from atoll.engines.clients import Simulation
from atoll.engines.prepare import EngineInputs, prepared
from atoll.engines.serial import Serial
from atoll.experiment.rounds import Experiment
from atoll.methods import FedAvg
from atoll.nn import GCN
from atoll.testing import CLASSES, FEATURES, small_federation


class Halves:
    """A user's engine: the clients are in two places, and each place prepares only its own."""

    name = "halves"

    def __init__(self, inputs: EngineInputs) -> None:
        graphs, self.middle = inputs.federation.graphs, len(inputs.federation) // 2
        self.places = [
            Serial(prepared(part, inputs.views, inputs.device))
            for part in (graphs[: self.middle], graphs[self.middle :])
        ]

    def run(self, step, positions, message, keys, round):
        replies = []
        for position, key in zip(positions, keys, strict=True):
            second = position >= self.middle
            own = position - self.middle if second else position
            place = self.places[second]
            replies.append(place.run_one(step, own, message.for_one(position), key))
        return stack(replies)

    def export_states(self):
        return [state for place in self.places for state in place.export_states()]

    def import_states(self, states):
        self.places[0].import_states(states[: self.middle])
        self.places[1].import_states(states[self.middle :])


@dataclass(frozen=True)
class Configured:
    """An engine factory with an option, called for every run."""

    engine: type = Halves

    def __call__(self, inputs: EngineInputs) -> Halves:
        return self.engine(inputs)


def same(one, other) -> None:
    for mine, right in zip(one.seeds, other.seeds, strict=True):
        for scored, scores in right.history.scores.items():
            np.testing.assert_array_equal(mine.history.scores[scored], scores)
        assert list(mine.ledger.rows()) == list(right.ledger.rows())


@pytest.mark.parametrize("engine", [Halves, Configured()])
def test_a_users_engine_gives_the_serial_numbers(engine) -> None:
    options = {"rounds": 3, "clients": 4, "seeds": 2, "fraction": 0.75}
    mine = atoll.run("fedavg", "lagoon", engine=engine, **options)
    same(mine, atoll.run("fedavg", "lagoon", engine="serial", **options))
    assert mine.engine == mine.config.engine == ("Halves" if engine is Halves else "Configured")
    assert mine.config.objects == ("engine",)


def test_an_experiment_takes_a_factory() -> None:
    method = FedAvg(GCN(FEATURES, CLASSES, hidden=5))
    runs = [
        Experiment(method, small_federation(), rounds=3, engine=engine, replay=True).run()
        for engine in (Halves, "serial")
    ]
    for scored, scores in runs[1].history.scores.items():
        np.testing.assert_array_equal(runs[0].history.scores[scored], scores)
    assert isinstance(runs[0].simulation.engine, Halves)
    assert runs[0].replay is None  # its rounds cannot be recorded


def test_a_run_with_an_engine_object_needs_it_again(tmp_path) -> None:
    whole = atoll.run("fedavg", "lagoon", engine=Halves, rounds=2, out=tmp_path)
    with pytest.raises(ConfigError) as caught:
        atoll.resume(tmp_path)
    assert str(caught.value) == (
        "this run was started in Python with an engine object, which its configuration cannot "
        "hold; continue it in Python with atoll.resume(folder, engine=...)"
    )
    same(atoll.resume(tmp_path, engine=Halves), whole)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("fusd", "unknown engine 'fusd'; did you mean 'fused'?"),
        ("xyz", "unknown engine 'xyz'; choose one of: auto, fused, serial, wire"),
        (
            3,
            "engine cannot be 3; give a name (serial, wire, fused) or a function that takes "
            "EngineInputs and returns an engine",
        ),
    ],
)
def test_an_unknown_engine_is_refused(given, sentence) -> None:
    with pytest.raises(ConfigError) as caught:
        atoll.run("fedavg", "lagoon", rounds=1, engine=given)
    assert str(caught.value) == sentence
    with pytest.raises(ConfigError, match=sentence.split(";")[0]):
        Experiment(FedAvg(GCN(FEATURES, CLASSES)), small_federation(), engine=given).begin()


def test_every_name_makes_the_engine_of_that_name() -> None:
    method = FedAvg(GCN(FEATURES, CLASSES, hidden=5))
    for name in ENGINES:
        assert choose_engine(name) == (name, "as asked")
        engine = Simulation(small_federation(), method, engine=name).engine
        assert engine.name == name
        assert isinstance(engine, Recordable) == runs_at_once(name)
    assert choose_engine("auto")[0] in ENGINES
    assert not runs_at_once(Halves)
    assert engine_factory(Halves) is Halves


def test_a_name_can_be_added(monkeypatch) -> None:
    monkeypatch.setitem(ENGINES, "halves", Halves)
    result = atoll.run("fedavg", "lagoon", rounds=1, engine="halves")
    assert result.engine == "halves"
    assert result.config.objects == ()


def test_the_registry_needs_no_torch() -> None:
    code = "import sys, atoll.engines.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
