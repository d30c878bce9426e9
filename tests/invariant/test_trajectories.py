"""Pinned training losses: no method, network, optimizer or noise may drift unnoticed.

`trajectories.json` holds, for every registered method, the mean training loss of the deployed model
after each round, on the contract's federation, in float64. If a change is meant to move them, write
them anew and say why in the change log:

    ATOLL_PIN=1 python -m pytest tests/invariant
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from atoll.core.method import Method
from atoll.core.optim import SGD
from atoll.engines.base import ENGINES
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import METHODS
from atoll.nn import NETS
from atoll.testing import CLASSES, FEATURES, double_precision, small_federation

PINNED = Path(__file__).with_name("trajectories.json")
ROUNDS = 5
TOLERANCE = 1e-8


def trajectory(method: Method, engine: str = "serial") -> list[float]:
    """Mean training loss after each round, with three of four clients as participants."""
    experiment = Experiment(method, small_federation(), ROUNDS, fraction=0.75, engine=engine)
    run = Run(experiment)
    run.start()
    losses = []
    for number in range(ROUNDS):
        run.one_round()
        # Asked for again, because the history keeps single precision.
        everyone = run.simulation.clients(number)
        scores = everyone.map(run.evaluator.score, method.deploy(run.server))
        losses.append(float(scores.loss[:, 0].mean()))
    return losses


SOONER = {"adafgl": {"federated_rounds": 2}}
"""What brings all of a method into the few rounds that are pinned."""


def make(name: str) -> Method:
    net = NETS[(*METHODS[name].nets, "gcn")[0]]
    return METHODS[name](net=net(FEATURES, CLASSES, hidden=8, dropout=0.5), **SOONER.get(name, {}))


def write() -> None:
    with double_precision():
        found = {name: trajectory(make(name)) for name in METHODS}
    PINNED.write_text(json.dumps(found, indent=2) + "\n")


if os.environ.get("ATOLL_PIN"):
    write()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", list(METHODS))
def test_every_engine_traces_the_pinned_losses(name, engine):
    pinned = json.loads(PINNED.read_text())
    assert name in pinned, f"no losses are pinned for '{name}': run with ATOLL_PIN=1 and look"
    with double_precision():
        found = trajectory(make(name), engine)
    assert found == pytest.approx(pinned[name], abs=TOLERANCE, rel=0)


def test_nothing_is_pinned_for_methods_that_are_gone():
    assert set(json.loads(PINNED.read_text())) == set(METHODS)


def test_pinned_losses_are_those_of_training():
    for name, losses in json.loads(PINNED.read_text()).items():
        assert len(losses) == ROUNDS
        assert len(set(losses)) == ROUNDS, name  # every round changes something


def test_a_small_change_is_noticed():
    with double_precision():
        moved = trajectory(METHODS["fedavg"](make("fedavg").net, optimizer=SGD(lr=0.01)))
    pinned = json.loads(PINNED.read_text())["fedavg"]
    assert moved != pytest.approx(pinned, abs=1e3 * TOLERANCE, rel=0)
