"""Reef: average two networks, and let each client add its class prior and weigh the networks.

    θ_i <- fit of Σ_b CE(f_b + log π_i) from θ;   Δ = Σ_i n_i (θ_i - θ) / Σ_i n_i.

    θ <- θ + η m / (√v + τ),   m and v: running means of Δ and Δ².

    client i predicts  Σ_b w_ib p_b,   p_b = softmax(f_b(θ_b) + log π_i)

The branches b are a GCN and a residual network (`net=duo`). π_i are the class frequencies of the
client's training nodes. The client adds their logarithm to the logits, in training and for its
predictions (logit adjustment, Menon et al., 2021). So the averaged networks need not learn which
classes are frequent at which client. A client weighs three settings by the likelihood of its
validation nodes: the GCN, the residual network, and the mean of both. These weights give w_ib.
Clients use plain SGD, and the server takes FedOPT's step (`core.aggregate.Adaptive`).

Wire, per client and round:  down  model      up  model, num_nodes
Private state: the class frequencies, the score of every setting, and the optimizer's moments if it
has any.
Floats per client and round: 2P + 1 for P parameters of both networks.
Departures from the reference code: none, because the method is Atoll's own.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from atoll.core.aggregate import Adaptive, Aggregate, Update
from atoll.core.graph import Graph
from atoll.core.hyper import NonNegative, OptimizerState, Share, WeightBy
from atoll.core.losses import log_probabilities
from atoll.core.method import client_step
from atoll.core.optim import SGD, Optimizer
from atoll.core.space import USUAL_SGD, Real
from atoll.core.training import Averaging
from atoll.core.tree import Tree, record
from atoll.nn.residual import Duo


@record
class Kept:
    """The private state of a client."""

    moments: Tree
    prior: Tensor  # the addend of the logits: log frequencies of the classes, (C,)
    scores: Tensor  # log-likelihood of the validation nodes: first, second, both, (3,)


@dataclass(frozen=True)
class Reef(Averaging):
    """Two averaged networks with each client's class prior, and a choice between them."""

    net: Duo
    optimizer: Optimizer = SGD(lr=0.5)
    prior: Annotated[NonNegative, "weight of the client's log class frequencies"] = 1.0
    memory: Annotated[Share, "share of a setting's earlier scores in its score"] = 0.8
    sharpness: Annotated[NonNegative, "weight of a validation node in the choice"] = 1.0
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "keep"
    aggregate: Aggregate = Adaptive(lr=0.1)

    space = USUAL_SGD | {"weight_decay": Real(0, 1e-2), "prior": Real(0, 1)}
    nets = ("duo",)
    made_for = (Duo, "Reef trains two networks side by side")
    deployed = "personalised"
    paper = "no paper: Atoll's own method"

    @client_step
    def train(
        self, graph: Graph, received: Tree, state: Kept | None, key: Tensor
    ) -> tuple[Update, Kept]:
        """Score the settings of the received model, then train both networks."""
        prior = self._prior(graph) if state is None else state.prior
        scores = self._scores(graph, received, prior)
        if state is not None:
            scores = torch.lerp(scores, state.scores, self.memory)

        def loss(params: Tree, graph: Graph, key: Tensor) -> Tensor:
            first, second = self.net.each(params, graph, key)
            return graph.task.loss(first + prior, graph) + graph.task.loss(second + prior, graph)

        before = None if state is None else state.moments
        model, moments = self.fit(graph, received, before, key, loss=loss)
        return Update(model, graph.size(self.weight_by)), Kept(moments, prior, scores)

    def _prior(self, graph: Graph) -> Tensor:
        """Return the addend of the logits, (C,): log frequencies of the training labels.

        Each count is increased by one, so none is zero.
        """
        classes = torch.arange(self.net.classes, device=graph.y.device)
        own = (graph.y.unsqueeze(-1) == classes) * graph.train.unsqueeze(-1)
        counts = own.sum(0) + 1
        return self.prior * (counts / counts.sum()).log()

    def _scores(self, graph: Graph, params: Tree, prior: Tensor) -> Tensor:
        """Return the log-likelihood of the validation nodes for every setting, (3,)."""
        with torch.no_grad():
            logs = self._logs(params, graph, prior)
            labels = graph.y.reshape(1, -1, 1).expand(2, -1, 1)
            first, second = logs.gather(-1, labels).squeeze(-1)
            both = torch.logaddexp(first, second) - math.log(2)
            return (torch.stack([first, second, both]) * graph.val).sum(-1)

    def _logs(self, params: Tree, graph: Graph, prior: Tensor, key: Tensor | None = None) -> Tensor:
        """Return the log probabilities of both networks, (2, N, C)."""
        return log_probabilities(torch.stack(self.net.each(params, graph, key)) + prior)

    def predict(
        self, graph: Graph, message: Tree, state: Kept | None, key: Tensor | None = None
    ) -> Tensor:
        if (mixed := self.mixture(state)) is None:  # a new client
            return self.net(message, graph, key)
        prior, shares = mixed
        logs = self._logs(message, graph, prior, key)
        return (logs + shares.log().reshape(-1, 1, 1)).logsumexp(0)

    def mixture(self, state: Kept | None) -> tuple[Tensor, Tensor] | None:
        if state is None:
            return None
        first, second, both = torch.softmax(self.sharpness * state.scores, 0).unbind()
        return state.prior, torch.stack([first, second]) + both / 2

    def plain_params(self, message: Tree, state: Kept | None) -> Tree:
        return message
