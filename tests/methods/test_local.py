"""Local: a common initial model, and no data leave a client."""

from __future__ import annotations

import pytest
import torch

from atoll.engines.base import ENGINES
from atoll.methods import Local
from atoll.testing import double_precision
from tests.methods.quadratic import ADAM, NET, TWO_ROUNDS, Quadratic, owner, play, run, same


@pytest.mark.parametrize("engine", ENGINES)
def test_golden(engine):
    with double_precision():
        method = Local(Quadratic((0.5, 0.5)), optimizer=ADAM, epochs=3)
        clients = [owner([1.0, 4.0], [1.0, -2.0], nodes) for nodes in (1, 4)]
        for rounds, expected in ((1, [0.529979, 0.470004]), (2, TWO_ROUNDS)):
            _, states = play(method, clients, engine, rounds)
            for state in states:
                assert state.model["w"].tolist() == pytest.approx(expected, abs=1e-6)


def test_local_clients_start_alike_and_hear_nothing():
    made = run(Local(NET))
    reply_bytes = made.ledger.by_step()["train"]
    assert reply_bytes == {"messages": 12, "down": 12 * 8, "up": 0}
    start = Local(NET).init(made.simulation.clients(-1))
    assert torch.equal(made.server, start)
    models = [state.model for state in made.simulation.engine.export_states()]
    assert not same(models[0], models[1])
