"""What one seed's rounds measured, and the protocol's rule that picks the reported round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from atoll.core.federation import Federation
from atoll.core.task import ROLES
from atoll.core.tree import Tree
from atoll.engines.ledger import Ledger
from atoll.experiment.metrics import METRICS, best_round, mean_over_clients

if TYPE_CHECKING:
    from atoll.experiment.config import RunConfig
    from atoll.experiment.protocols import Protocol

SCORED = ("deployed", "local")
BEST_CACHED = "best-cached-test"
"""Each client's best test score over the models put aside and the last: this leaks test data."""


@dataclass
class History:
    """Everything measured, round by round."""

    counts: np.ndarray  # training, validation and test nodes (or graphs) of each client, (K, 3)
    nodes: np.ndarray  # nodes (or graphs) of each client, (K,)
    # By `SCORED`, for each round an array by client, role and metric, (K, 3, 5).
    scores: dict[str, list[np.ndarray]] = field(default_factory=lambda: {k: [] for k in SCORED})
    seconds: list[float] = field(default_factory=list)  # of each round, training and scoring
    cached: list[list[int]] = field(default_factory=list)  # rounds of models put aside, by client
    ledger: Ledger = field(default_factory=Ledger)  # the traffic of every round

    @property
    def rounds(self) -> int:
        return len(self.seconds)

    def array(self, scored: str, metric: str, role: str) -> np.ndarray:
        """One number for each round and client, (R, K); NaN where a client has none."""
        return np.stack(self.scores[scored])[:, :, ROLES.index(role), METRICS.index(metric)]

    def restore(self, checkpoint: Tree) -> None:
        """Continue with the scores, seconds and traffic of a checkpoint."""
        self.scores = {name: list(rounds.numpy()) for name, rounds in checkpoint["scores"].items()}
        self.seconds = checkpoint["seconds"].tolist()
        self.ledger.restore(checkpoint["ledger"])


def empty_history(federation: Federation) -> History:
    """The clients' sizes, and nothing measured yet."""
    masks = [torch.stack([g.train, g.val, g.test]).sum(1) for g in federation.graphs]
    nodes = np.array([int(g.size("nodes")) for g in federation.graphs])
    return History(torch.stack(masks).numpy().astype(np.int64), nodes)


@dataclass(frozen=True)
class Selection:
    """How the reported round is picked."""

    scored: str  # "deployed" or "local": the model whose scores pick
    metric: str  # the metric that picks, unless no client has it; then accuracy does
    weights: str  # the mean over clients, one of `metrics.WEIGHTINGS`
    select: str  # "best-val" (mean over clients), "best-val-per-client", "last" or `BEST_CACHED`

    def picked_by(self, history: History) -> str:
        """The metric that picks the round."""
        undefined = np.isnan(history.array(self.scored, self.metric, "val")).all()
        return "accuracy" if undefined else self.metric

    def rounds(self, history: History) -> np.ndarray:
        """The picked round of each client, (K,)."""
        by, clients = self.picked_by(history), len(history.nodes)
        if self.select == "last":
            return np.full(clients, len(history.scores[self.scored]) - 1)
        if self.select == "best-val":
            return np.full(clients, best_round(self.mean(history, by, "val")))
        if self.select == BEST_CACHED:
            scores = history.array(self.scored, by, "test")
            cached = np.zeros(scores.shape, dtype=bool)
            cached[-1] = True
            for client, rounds in enumerate(history.cached):
                cached[rounds, client] = True
            scores = np.where(cached, scores, np.nan)
        else:
            scores = history.array(self.scored, by, "val")
        return np.asarray(np.nan_to_num(scores, nan=-1.0).argmax(0))

    def of_clients(self, history: History, metric: str, role: str) -> np.ndarray:
        """A metric of each client, (K,), at its picked round."""
        values = history.array(self.scored, metric, role)
        return np.asarray(values[self.rounds(history), np.arange(values.shape[1])])

    def mean(self, history: History, metric: str, role: str) -> np.ndarray:
        """A metric of each round, (R,), mean over clients."""
        values = history.array(self.scored, metric, role)
        return mean_over_clients(values, weight_of(history, role, self.weights))

    def value(self, history: History, metric: str, role: str) -> float:
        """A metric at the picked round, mean over clients."""
        values = self.of_clients(history, metric, role)
        return float(mean_over_clients(values, weight_of(history, role, self.weights)))


class Improvements:
    """Finds the clients for which a round is the best so far: `Selection.rounds`, step by step."""

    def __init__(self, selection: Selection, rounds: int) -> None:
        self.selection, self.last = selection, rounds - 1
        self.best = np.array(np.nan)

    def of(self, history: History, number: int) -> np.ndarray:
        """Whether each client's picked round, of those up to this one, is this one, (K,) bool."""
        rule, clients = self.selection, len(history.nodes)
        if rule.select in ("last", BEST_CACHED):
            return np.full(clients, rule.select == "last" and number == self.last)
        val = history.scores[rule.scored][number][:, ROLES.index("val")]
        scores = val[:, METRICS.index(rule.metric)]
        if np.isnan(scores).all():
            scores = val[:, METRICS.index("accuracy")]
        if rule.select == "best-val":
            weight = weight_of(history, "val", rule.weights)
            scores = np.full(clients, mean_over_clients(scores, weight))
        else:
            scores = np.nan_to_num(scores, nan=-1.0)
        # As long as there is no score at all, the last round is picked.
        better = np.isnan(self.best) | (scores > self.best)
        self.best = np.where(better, scores, self.best)
        return np.asarray(better)


def weight_of(history: History, role: str, weights: str) -> np.ndarray:
    """What each client counts in a mean over clients, (K,)."""
    if weights == "uniform":
        return np.ones(history.nodes.shape[0])
    return history.counts[:, ROLES.index(role)] if weights == "tests" else history.nodes


def select_rule(config: RunConfig, rules: Protocol) -> str:
    """How the round is picked: the protocol's rule, unless a compat switch overrules it."""
    return BEST_CACHED if "test-selection" in config.compat else rules.select


def selection_of(config: RunConfig, rules: Protocol, metric: str) -> Selection:
    """How the reported round is picked."""
    select = select_rule(config, rules)
    return Selection(config.evaluate or "deployed", metric, rules.weights, select)
