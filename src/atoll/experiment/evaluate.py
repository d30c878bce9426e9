"""Scoring as a client step: a client predicts on its own graph and replies with counts only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from atoll.core.graph import Graph
from atoll.core.method import Method, client_step
from atoll.core.task import Scores
from atoll.core.tree import Tree, record
from atoll.experiment.metrics import METRICS, from_confusion


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
        if not self.with_train:  # the training part is left out as far as that is possible
            graph = graph if graph.held_out is None else graph.held_out
            graph = replace(graph, train=torch.zeros_like(graph.train))
        noise = key if self.with_dropout else None
        outputs = self.method.predict(graph, message, state, noise)
        return graph.task.score(outputs, graph, with_auc=self.with_auc)


@record
class Outcome:
    """What one round found, on the device.

    Clients at `positions` took part and have `local` scores, unless no client trained. Those at
    `scored`, all that are there, scored the deployed model. `finite` belongs to a round with a
    tape: which of the numbers that it watched are finite.
    """

    positions: Tensor
    scored: Tensor
    deployed: Scores
    local: Scores | None = None
    finite: Tensor | None = None


def score_numbers(scores: Scores) -> np.ndarray:
    """Stacked scores -> (..., 3, 5), NaN where a client has no such number."""
    confusion, auc = scores.confusion.numpy(), scores.auc.numpy()
    numbers = from_confusion(confusion)
    numbers["auc"] = np.where(auc < 0, np.nan, auc)
    empty = confusion.sum((-1, -2)) == 0
    numbers["loss"] = np.where(empty, np.nan, scores.loss.numpy())
    return np.stack([numbers[metric] for metric in METRICS], axis=-1)
