"""From predictions to numbers in a table: counts of each client, its metrics, means over clients.

Scoring is a client step: a client predicts on its own graph and replies with counts only. Arrays
have the axes (..., clients); NaN marks a client that has no such number (an empty test set) and is
left out of every mean, never counted as right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from atoll.core.graph import Graph
from atoll.core.method import Method, client_step
from atoll.core.task import Scores
from atoll.core.tree import Tree, record

LABELS = {
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "weighted_f1": "weighted F1",
    "auc": "AUC",
    "loss": "loss",
}
"""Every metric by its name in files and options, with its label on pages."""
METRICS = tuple(LABELS)
COMPARED = tuple(name for name in METRICS if name != "loss")
"""Metrics that a comparison can use: higher is better."""
WEIGHTINGS = ("tests", "nodes", "uniform")
"""Means over clients: by test (validation, ...) nodes, by all nodes, or every client alike."""


def from_confusion(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """Accuracy and F1 scores, (...,), of confusion counts (..., C, C), true by predicted."""
    hits = np.diagonal(confusion, axis1=-2, axis2=-1).astype(float)
    support = confusion.sum(-1).astype(float)
    guessed = confusion.sum(-2).astype(float)
    total = support.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # A class counts in the macro mean if it occurs among truths or guesses, as in scikit-learn.
        occurs = (support + guessed) > 0
        f1 = np.where(occurs, 2 * hits / (support + guessed), 0.0)
        some = np.where(total > 0, 1.0, np.nan)
        return {
            "accuracy": hits.sum(-1) / total * some,
            "macro_f1": f1.sum(-1) / occurs.sum(-1) * some,
            "weighted_f1": (f1 * support).sum(-1) / total * some,
        }


def mean_over_clients(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Weighted mean over the last axis, leaving out NaN; NaN if nothing is left."""
    known = ~np.isnan(values)
    share = np.where(known, np.broadcast_to(weight, values.shape), 0.0)
    with np.errstate(invalid="ignore"):
        return np.asarray((np.where(known, values, 0.0) * share).sum(-1) / share.sum(-1))


def spread(values: Sequence[float] | np.ndarray) -> float | None:
    """The standard deviation of a sample; None for fewer than two values, which have no spread."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def best_round(validation: np.ndarray) -> int:
    """The round with the best mean validation score, the earliest of equals."""
    if np.isnan(validation).all():
        return int(validation.shape[0] - 1)
    return int(np.nanargmax(validation))


@dataclass(frozen=True)
class Evaluator:
    """Scores a method's predictions."""

    method: Method
    with_auc: bool = False
    with_dropout: bool = False  # only where a compat switch asks for it
    with_train: bool = True  # whether training nodes, or graphs, are scored

    def derived_from(self, state: Tree) -> Tree:
        return self.method.derived_from(state)

    def derive(self, graph: Graph, part: Tree) -> Tree:
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
    """The scores of one round, on the device."""

    positions: Tensor  # of the clients that took part
    scored: Tensor  # positions of all clients that are there, which scored the deployed model
    deployed: Scores
    local: Scores | None = None  # None if no client trained
    finite: Tensor | None = None  # which numbers that the round's tape watched are finite


def score_numbers(scores: Scores) -> np.ndarray:
    """Stacked scores -> (..., 3, 5), NaN where a client has no such number."""
    confusion, auc = scores.confusion.numpy(), scores.auc.numpy()
    numbers = from_confusion(confusion)
    numbers["auc"] = np.where(auc < 0, np.nan, auc)
    empty = confusion.sum((-1, -2)) == 0
    numbers["loss"] = np.where(empty, np.nan, scores.loss.numpy())
    return np.stack([numbers[metric] for metric in METRICS], axis=-1)
