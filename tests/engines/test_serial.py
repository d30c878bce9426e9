"""One client after another: errors name the client, and replies must have one shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from atoll.core.errors import StepError
from atoll.core.message import ToAll
from atoll.core.method import client_step
from atoll.core.random import make_key
from atoll.engines.serial import Serial
from atoll.testing import small_federation


@dataclass(frozen=True)
class Toy:
    @client_step
    def count(self, graph: Any, message: Any, state: Any, key: Any) -> Any:
        total = 0 if state is None else state
        return {"nodes": graph.real.sum()}, total + 1

    @client_step
    def show(self, graph: Any, message: Any, state: Any, key: Any) -> Any:
        return {"rows": graph.y}, state

    @client_step
    def vary(self, graph: Any, message: Any, state: Any, key: Any) -> Any:
        name = "even" if len(graph.y) % 2 == 0 else "odd"
        return {name: graph.real.sum()}, state

    @client_step
    def fail(self, graph: Any, message: Any, state: Any, key: Any) -> Any:
        raise KeyError("x")


def run(step: Any, engine: Serial | None = None) -> Any:
    engine = engine or Serial(small_federation((9, 12)).graphs)
    return engine.run(step, [0, 1], ToAll(None), torch.stack([make_key(1)] * 2), 7)


def test_replies_are_stacked_and_states_kept() -> None:
    engine = Serial(small_federation((9, 12)).graphs)
    assert run(Toy().count, engine)["nodes"].tolist() == [9, 12]
    run(Toy().count, engine)
    assert engine.export_states() == [2, 2]
    other = Serial(engine.graphs)
    other.import_states(engine.export_states())
    run(Toy().count, other)
    assert other.states == [3, 3]
    assert engine.states == [2, 2]


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ("show", r"reply 'rows' has shape \(12,\) here and \(9,\) on client 0; a reply must not"),
        ("vary", r"the reply holds \['even'\] here and \['odd'\] on client 0; a reply must always"),
    ],
)
def test_replies_that_depend_on_the_graph_are_refused(step: str, problem: str) -> None:
    with pytest.raises(StepError, match=f"client 1, step {step}, round 7: {problem}"):
        run(getattr(Toy(), step))


def test_an_error_names_client_step_and_round() -> None:
    with pytest.raises(StepError, match=r"round 7: KeyError in test_serial.py line \d+: 'x'"):
        run(Toy().fail)
