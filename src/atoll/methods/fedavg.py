"""FedAvg: train locally, average by size (McMahan et al., 2017).

    θ <- Σ_i n_i θ_i / Σ_i n_i   over the participants, n_i = nodes (or graphs) of client i

Wire, per client and round:  down  model      up  model, num_nodes
Private state: the optimizer's moments (kept over rounds, as the literature does; `reset` drops
them), and the layers that the network calls private.
Floats per client and round: 2P + 1 for P parameters.
Departures from the reference code: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from atoll.core.aggregate import Aggregate, Mean, Update, first_server, model_of, next_server
from atoll.core.graph import Graph
from atoll.core.hyper import Epochs, OptimizerState, WeightBy
from atoll.core.message import ToAll
from atoll.core.method import Clients, Method, client_step
from atoll.core.optim import Adam, Optimizer
from atoll.core.private_layers import Private, fit_received, init_shared
from atoll.core.task import TASKS
from atoll.core.tree import Tree


@dataclass(frozen=True)
class FedAvg(Method):
    """Federated averaging."""

    optimizer: Optimizer = Adam()
    epochs: Epochs = 3
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "keep"
    aggregate: Aggregate = Mean()

    tasks: ClassVar[tuple[str, ...]] = tuple(TASKS)
    paper: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized "
        "Data, AISTATS 2017"
    )
    not_private: ClassVar[str] = ""

    def init(self, clients: Clients) -> Tree:
        return first_server(self.aggregate, init_shared(self.net, clients.key))

    def round(self, server: Tree, clients: Clients) -> Tree:
        reply = clients.map(self.train, ToAll(model_of(server)))
        return next_server(self.aggregate, server, reply, clients.key)

    @client_step
    def train(
        self, graph: Graph, received: Tree, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Minimise the cross entropy on the training nodes, from the received model."""
        model, own = fit_received(self, graph, received, state, key)
        return Update(model, graph.size(self.weight_by)), own
