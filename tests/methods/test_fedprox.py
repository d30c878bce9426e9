"""FedProx: golden numbers, and equality with FedAvg at mu = 0."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.core.federation import Federation
from atoll.core.optim import SGD, Adam
from atoll.core.tree import leaves
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.methods import FedAvg, FedProx
from atoll.testing import double_precision
from tests.methods.quadratic import NET, Quadratic, owner, run, same

engines = pytest.mark.parametrize("engine", ENGINES)


@engines
def test_golden(engine):
    with double_precision():
        method = FedProx(Quadratic((0.5,)), optimizer=SGD(lr=0.1), epochs=3, mu=0.5)
        clients = [owner([1.0], [1.0], 1), owner([3.0], [-1.0], 3)]
        simulation = Simulation(Federation(tuple(clients), classes=2), method, engine=engine)
        server = method.init(simulation.clients(-1))
        everyone = simulation.clients(0)
        server = method.round(server, everyone)
    locals_ = everyone.replies["train"].model["w"].flatten()
    assert locals_.tolist() == pytest.approx([0.628625, -0.432625], abs=1e-9)
    assert server["w"].tolist() == pytest.approx([-0.167313], abs=1e-6)


@engines
@pytest.mark.parametrize("optimizer", [Adam(), SGD(lr=0.1, momentum=0.9)])
def test_fedprox_without_pull_is_fedavg_bit_for_bit(engine, optimizer):
    avg = run(FedAvg(NET, optimizer), engine, fraction=0.75)
    prox = run(FedProx(NET, optimizer, mu=0.0), engine, fraction=0.75)
    assert same(avg.server, prox.server)
    assert same(avg.simulation.engine.export_states(), prox.simulation.engine.export_states())
    for scored, rounds in avg.history.scores.items():
        np.testing.assert_array_equal(rounds, prox.history.scores[scored])


def test_a_pull_keeps_models_near_the_received_one():
    def moved(mu: float) -> float:
        method = FedProx(NET, SGD(lr=0.05), epochs=8, mu=mu)
        made = run(method)
        start = method.init(made.simulation.clients(-1))
        return sum(
            float((a - b).square().sum())
            for a, b in zip(leaves(start), leaves(made.server), strict=True)
        )

    assert moved(0.0) > moved(1.0) > moved(10.0) > 0
