"""Runs to compare, and a network that turns the cross entropy into a quadratic.

With the logits (0, log(e^q - 1)) and label 0 the cross entropy is exactly q, so that golden numbers
(`methods/baselines/*.md`) can be followed by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.core.federation import Federation
from atoll.core.graph import Graph, View, make_graph
from atoll.core.method import Method
from atoll.core.optim import Adam
from atoll.core.tree import Tree, leaves
from atoll.engines.clients import Simulation
from atoll.experiment.rounds import Experiment, Run
from atoll.nn import GCN
from atoll.testing import CLASSES, FEATURES, small_federation

ADAM = Adam(lr=0.01, weight_decay=5e-4)
TWO_ROUNDS = [0.559832, 0.440030]
"""Where six steps of `ADAM` lead from (0.5, 0.5), with h = (1, 4) and a = (1, -2)."""


@dataclass(frozen=True)
class Quadratic:
    """Cross entropy 1 + Σ h/2 (w - a)², where h and a are a node's features."""

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


NET = GCN(FEATURES, CLASSES, hidden=6)


def run(method: Method, engine: str = "fused", **more: object) -> Run:
    """Three rounds on the contract's federation."""
    return Experiment(method, small_federation(), rounds=3, engine=engine, **more).run()


def same(a: Tree, b: Tree) -> bool:
    """Whether two trees are equal bit for bit."""
    return all(map(torch.equal, leaves(a), leaves(b)))
