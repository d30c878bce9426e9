"""Reef: two networks, a pull towards the server, and at each client a step of its own.

    θ_i <- fit of Σ_b CE(f_b(θ_b) + τ log π_i) with the pull μ (θ - θ̄);   θ̄ <- Σ_i n_i θ_i / Σ_i n_i
    client i predicts  Σ_b w_b softmax(f_b(θ̄_b + α_b (θ_ib - θ̄_b)) + τ log π_i)

Branches b are a GCN and a residual network (`net=duo`). π_i are the shares of the classes among the
client's training nodes: the shared models learn what is left after them, which differs less between
clients. Each client weighs the settings w in {(1,0), (0,1), (1/2,1/2)}, α_b in {0, 1/2, 1} by the
likelihood of its own validation nodes.

Wire, per client and round:  down  model      up  model, num_nodes
Private state: the optimizer's moments, the client's last model, and the score of every setting.
Floats per client and round: 2P + 1 for P parameters of both networks.
Departures from the reference code: there is none; the method is Atoll's own.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.aggregate import Aggregate, Mean, Update
from atoll.core.graph import Graph
from atoll.core.hyper import NonNegative, OptimizerState, Share, WeightBy
from atoll.core.method import client_step
from atoll.core.space import USUAL, Real
from atoll.core.training import Averaging
from atoll.core.tree import Tree, record, tree_map
from atoll.nn.residual import Duo


@record
class Kept:
    """What a client keeps between rounds."""

    moments: Tree
    model: Tree  # as it was sent last
    prior: Tensor  # log π, (C,)
    scores: Tensor  # log-likelihood of the validation nodes for each setting, (S,)


@dataclass(frozen=True)
class Reef(Averaging):
    """Two averaged networks and a choice at every client."""

    mu: Annotated[NonNegative, "μ: weight of the pull towards the received model"] = 0.1
    prior: Annotated[Share, "τ: how much of the client's class shares is added to logits"] = 1.0
    memory: Annotated[Share, "share of the old scores in the new ones"] = 0.8
    sharpness: Annotated[NonNegative, "weight of a validation node in the choice"] = 1.0
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "keep"
    aggregate: Aggregate = Mean()

    space = USUAL | {"mu": Real(1e-2, 1, log=True)}
    nets = ("duo",)
    made_for = (Duo, "Reef trains two networks side by side")
    deployed = "personalised"
    steps = (0.0, 0.5, 1.0)  # from the server's model to the client's own
    paper = "Atoll's own"

    @property
    def settings(self) -> tuple[tuple[float, ...], ...]:
        """Weights of the two branches, then the steps of both."""
        return (
            *((1.0, 0.0, step, 0.0) for step in self.steps),
            *((0.0, 1.0, 0.0, step) for step in self.steps),
            *((0.5, 0.5, *pair) for pair in product(self.steps, self.steps)),
        )

    def bend(self, grads: Tree, params: Tree, received: Tree) -> Tree:
        return tree_map(lambda g, w, start: g + self.mu * (w - start), grads, params, received)

    @client_step(discloses={"model": "the own model that a client keeps is the one it sent"})
    def train(
        self, graph: Graph, received: Tree, state: Kept | None, key: Tensor
    ) -> tuple[Update, Kept]:
        """Train both networks; then score every setting on the client's validation nodes."""
        shares = self.prior * _log_shares(graph, self.net.classes)

        def loss(params: Tree, graph: Graph, key: Tensor | None) -> Tensor:
            found = self.net.each(params, graph, key)
            return sum(graph.task.loss(logits + shares, graph) for logits in found)

        def bent(grads: Tree, params: Tree) -> Tree:
            return self.bend(grads, params, received)

        moments = None if state is None else state.moments
        model, moments = self.fit(graph, received, moments, key, loss=loss, adjust=bent)
        scores = self._scores(graph, received, model, shares)
        if state is not None:
            scores = torch.lerp(scores, state.scores, self.memory)
        update = Update(model, graph.size(self.weight_by))
        return update, Kept(moments, model, shares, scores)

    def _scores(self, graph: Graph, received: Tree, model: Tree, shares: Tensor) -> Tensor:
        """Log-likelihood of the validation nodes, summed, for every setting, (S,)."""
        labels, found = graph.y.unsqueeze(-1), dict[tuple[int, float], Tensor]()
        for step in self.steps:
            between = tree_map(lambda a, b, s=step: torch.lerp(a, b, s), received, model)
            for branch, logits in enumerate(self.net.each(between, graph)):
                logs = functional.log_softmax(logits + shares, -1)
                found[branch, step] = logs.gather(-1, labels).squeeze(-1)
        rows = [
            found[0, a]
            if not w2
            else found[1, b]
            if not w1
            else torch.logaddexp(found[0, a], found[1, b]) - math.log(2)
            for w1, w2, a, b in self.settings
        ]
        return (torch.stack(rows) * graph.val).sum(-1)

    def predict(
        self, graph: Graph, message: Tree, state: Kept | None, key: Tensor | None = None
    ) -> Tensor:
        if state is None:
            return self.net(message, graph, key)
        weights, steps = self._setting(state.scores)
        pairs = zip(message, state.model, steps.unbind(), strict=True)
        params = [tree_map(lambda a, b, s=s: a + s * (b - a), *pair) for *pair, s in pairs]
        logs = [
            functional.log_softmax(x + state.prior, -1) for x in self.net.each(params, graph, key)
        ]
        return (torch.stack(logs) + weights.log().reshape(-1, 1, 1)).logsumexp(0)

    def _setting(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the branches, (2,), and how far each goes its own way, (2,)."""
        table = torch.tensor(self.settings, dtype=scores.dtype, device=scores.device)
        share = torch.softmax(self.sharpness * scores, 0)
        mixed = share @ table
        weights = mixed[:2]
        # A branch that does not count has no step: the mean is over the settings that use it.
        used = share @ table[:, :2].sign()
        return weights, mixed[2:] / used.clamp(min=1e-12)


def _log_shares(graph: Graph, classes: int) -> Tensor:
    """Log of the classes' shares among the training nodes, each counted once more, (C,)."""
    counts = 1 + (functional.one_hot(graph.y, classes) * graph.train.unsqueeze(-1)).sum(0)
    return (counts / counts.sum()).log()
