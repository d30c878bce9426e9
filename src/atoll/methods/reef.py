"""Reef: two networks that see neighbours differently teach each other, and each client weighs them.

    θ_i <- fit of Σ_b [CE(f_b) + λ H(p̄, p_b)] + μ/2 ‖θ - θ̄‖²;   θ̄ <- Σ_i n_i θ_i / Σ_i n_i

    client i predicts  Σ_b w_ib p_b,   p_b = softmax(f_b(θ̄_b)),   p̄ = mean of p_b, held fixed

The branches b are a GCN and a residual network (`net=duo`). H(p̄, p_b) is the cross entropy over all
nodes of the client: on nodes without a label the networks learn from their common prediction (deep
mutual learning, Zhang et al., 2018). A client weighs three settings by the likelihood of its
validation nodes: the GCN, the residual network, and the mean of both. These weights give w_ib.

Wire, per client and round:  down  model      up  model, num_nodes
Private state: the optimizer's moments, and the score of every setting.
Floats per client and round: 2P + 1 for P parameters of both networks.
Departures from the reference code: none, because the method is Atoll's own.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.aggregate import Aggregate, Mean, Update
from atoll.core.graph import Graph
from atoll.core.hyper import NonNegative, OptimizerState, Share, WeightBy
from atoll.core.method import client_step
from atoll.core.private_layers import KeepsPrivate, Private, fit_received
from atoll.core.space import USUAL, Real
from atoll.core.training import Averaging
from atoll.core.tree import Tree, record, tree_map
from atoll.nn.residual import Duo


@record
class Kept(KeepsPrivate):
    """The private state of a client: the optimizer's moments, and the score of every setting."""

    own: Private
    scores: Tensor  # log-likelihood of the validation nodes: first, second, both, (3,)


@dataclass(frozen=True)
class Reef(Averaging):
    """Two averaged networks that teach each other, and a choice between them at every client."""

    net: Duo
    mu: Annotated[NonNegative, "μ: weight of the pull towards the received model"] = 0.1
    teach: Annotated[NonNegative, "λ: weight of the networks' common prediction in the loss"] = 0.3
    memory: Annotated[Share, "share of a setting's earlier scores in its score"] = 0.8
    sharpness: Annotated[NonNegative, "weight of a validation node in the choice"] = 1.0
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "keep"
    aggregate: Aggregate = Mean()

    space = USUAL | {"mu": Real(1e-2, 1, log=True), "teach": Real(0, 1)}
    nets = ("duo",)
    made_for = (Duo, "Reef trains two networks side by side")
    deployed = "personalised"
    paper = "no paper: Atoll's own method"

    def loss(self, params: Tree, graph: Graph, key: Tensor | None) -> Tensor:
        logits = self.net.each(params, graph, key)
        logs = [functional.log_softmax(one, -1) for one in logits]
        common = torch.softmax(torch.logaddexp(*logs).detach(), -1)
        apart = -(common * (logs[0] + logs[1])).sum(-1)
        taught = (apart * graph.real).sum() / graph.real.sum().clamp(min=1)
        return sum(graph.task.loss(one, graph) for one in logits) + self.teach * taught

    def bend(self, grads: Tree, params: Tree, received: Tree) -> Tree:
        return tree_map(lambda g, w, start: g + self.mu * (w - start), grads, params, received)

    @client_step
    def train(
        self, graph: Graph, received: Tree, state: Kept | None, key: Tensor
    ) -> tuple[Update, Kept]:
        """Score the settings of the received model, then train both networks."""

        def bent(grads: Tree, params: Tree) -> Tree:
            return self.bend(grads, params, received)

        scores = self._scores(graph, received)
        if state is not None:
            scores = torch.lerp(scores, state.scores, self.memory)
        before = None if state is None else state.own
        model, own = fit_received(self, graph, received, before, key, adjust=bent)
        return Update(model, graph.size(self.weight_by)), Kept(own, scores)

    def _scores(self, graph: Graph, params: Tree) -> Tensor:
        """Return the log-likelihood of the validation nodes for every setting, (3,)."""
        with torch.no_grad():
            logs = [
                functional.log_softmax(logits, -1).gather(-1, graph.y.unsqueeze(-1)).squeeze(-1)
                for logits in self.net.each(params, graph)
            ]
            both = torch.logaddexp(*logs) - math.log(2)
            return (torch.stack([*logs, both]) * graph.val).sum(-1)

    def predict(
        self, graph: Graph, message: Tree, state: Kept | None, key: Tensor | None = None
    ) -> Tensor:
        if state is None:
            return self.net(message, graph, key)
        first, second, both = torch.softmax(self.sharpness * state.scores, 0).unbind()
        shares = torch.stack([first, second]) + both / 2
        logs = [functional.log_softmax(x, -1) for x in self.net.each(message, graph, key)]
        return (torch.stack(logs) + shares.log().reshape(-1, 1, 1)).logsumexp(0)
