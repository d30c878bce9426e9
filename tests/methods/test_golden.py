"""The cards' golden numbers (`methods/baselines/*.md`), through the real methods on every engine.

A made-up network turns the cross entropy into a quadratic, so that the numbers can be followed by
hand: with the logits (0, log(e^q - 1)) and label 0 the cross entropy is exactly q.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.federation import Federation
from atoll.core.graph import Graph, View, make_graph
from atoll.core.method import Method
from atoll.core.optim import SGD, Adam
from atoll.core.tree import Tree
from atoll.engines.base import ENGINES
from atoll.engines.simulation import Simulation
from atoll.methods import FedAvg, FedProx, Local
from atoll.testing import double_precision

engines = pytest.mark.parametrize("engine", ENGINES)


@dataclass(frozen=True)
class Quadratic:
    """Cross entropy 1 + Σ h/2 (w - a)²; a node's features are h and a."""

    start: tuple[float, ...]

    @property
    def views(self) -> Mapping[str, View]:
        return {}

    def init(self, key: Tensor) -> Tree:
        return {"w": torch.tensor(self.start)}

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        h, a = graph.x.chunk(2, dim=-1)
        q = 1 + (h * (params["w"] - a) ** 2).sum(-1) / 2
        return torch.stack([torch.zeros_like(q), torch.log(torch.expm1(q))], dim=-1)


def owner(h: list[float], a: list[float], nodes: int) -> Graph:
    """A client whose nodes all ask for the same quadratic."""
    x = torch.tensor([h + a]).expand(nodes, -1).clone()
    edges = torch.zeros(2, 0, dtype=torch.int64)
    y = torch.zeros(nodes, dtype=torch.int64)
    return make_graph(x, edges, y, train=torch.ones(nodes))


def play(method: Method, graphs: list[Graph], engine: str, rounds: int) -> tuple[Any, Any]:
    """The server's tree and the clients' private states after some rounds."""
    simulation = Simulation(Federation(tuple(graphs), classes=2), method, engine=engine)
    server = method.init(simulation.clients(-1))
    for number in range(rounds):
        server = method.round(server, simulation.clients(number))
    return server, simulation.engine.export_states()


ADAM = Adam(lr=0.01, weight_decay=5e-4)
KEPT, RESET = [0.559832, 0.440030], [0.559956, 0.440008]


@engines
def test_local(engine):
    with double_precision():
        method = Local(Quadratic((0.5, 0.5)), optimizer=ADAM, epochs=3)
        clients = [owner([1.0, 4.0], [1.0, -2.0], nodes) for nodes in (1, 4)]
        for rounds, expected in ((1, [0.529979, 0.470004]), (2, KEPT)):
            _, states = play(method, clients, engine, rounds)
            for state in states:
                assert state.model["w"].tolist() == pytest.approx(expected, abs=1e-6)


@engines
@pytest.mark.parametrize(("keeping", "expected"), [("keep", KEPT), ("reset", RESET)])
def test_fedavg_keeps_or_resets_the_moments(engine, keeping, expected):
    # Two equal clients: the average is what either of them gets alone.
    with double_precision():
        method = FedAvg(Quadratic((0.5, 0.5)), ADAM, epochs=3, optimizer_state=keeping)
        clients = [owner([1.0, 4.0], [1.0, -2.0], nodes) for nodes in (1, 4)]
        server, _ = play(method, clients, engine, rounds=2)
    assert server["w"].tolist() == pytest.approx(expected, abs=1e-6)


@engines
def test_fedavg_weights_by_size(engine):
    # One plain step of lr 1 with h = 1 jumps from anywhere onto a: locals are the card's models.
    with double_precision():
        models, sizes = ([1.0, 2.0], [3.0, -1.0], [0.5, 0.25]), (3, 5, 2)
        clients = [owner([1.0, 1.0], a, n) for a, n in zip(models, sizes, strict=True)]
        made = {
            by: play(FedAvg(Quadratic((0.0, 0.0)), SGD(lr=1.0), 1, by), clients, engine, 1)[0]["w"]
            for by in ("nodes", "train", "uniform")
        }
    assert made["nodes"].tolist() == pytest.approx([1.9, 0.15], abs=1e-9)
    assert made["train"].tolist() == pytest.approx([1.9, 0.15], abs=1e-9)
    assert made["uniform"].tolist() == pytest.approx([1.5, 0.416667], abs=1e-6)


@engines
def test_fedprox(engine):
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
