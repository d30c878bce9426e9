"""Scoring as a client step: a client predicts on its own graph and replies with counts alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.core.graph import Graph
from atoll.core.method import Method, client_step
from atoll.core.task import Scores
from atoll.core.tree import Tree, record


@dataclass(frozen=True)
class Evaluator:
    """Scores a method's predictions, without dropout unless a compat switch asks for it.

    With `with_train=False` training nodes, or graphs, are not scored.
    """

    method: Method
    with_auc: bool = False
    with_dropout: bool = False
    with_train: bool = True

    def derived_from(self, state: Tree) -> Tree:
        """As the method says."""
        return self.method.derived_from(state)

    def derive(self, graph: Graph, part: Tree) -> Tree:
        """As the method does."""
        return self.method.derive(graph, part)

    @client_step(keeps_state=True)
    def score(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Scores:
        """Predict and count."""
        noise = key if self.with_dropout else None
        if not self.with_train:
            graph = _held_out(graph)
        outputs = self.method.predict(graph, message, state, noise)
        return graph.task.score(outputs, graph, with_auc=self.with_auc)


def _held_out(graph: Graph) -> Graph:
    """The graph without its training part, as far as that can be left out."""
    graph = graph if graph.held_out is None else graph.held_out
    return replace(graph, train=torch.zeros_like(graph.train))


@record
class Outcome:
    """What one round found, on the device.

    Attributes:
        positions: Which clients took part.
        scored: Who scored the deployed model: all clients that are there.
        deployed: Their scores.
        local: Scores of the local models of those who took part; None if no client trained.
        finite: For a round with a tape: which of the numbers that it watched are finite.
    """

    positions: Tensor
    scored: Tensor
    deployed: Scores
    local: Scores | None = None
    finite: Tensor | None = None
