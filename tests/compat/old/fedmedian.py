"""FedMedian: train locally, take the median of every weight (after Yin et al., 2018).

    θ <- median_i θ_i   over the participants

Wire, per client and round:  down  model      up  model
Private state: the optimizer's moments.
Floats per client and round: 2P for P parameters.
Departures from the reference code: there is none.
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll import Method, client_step
from atoll.core.fit import fit
from atoll.core.losses import cross_entropy
from atoll.core.message import ToAll
from atoll.core.optim import Adam, Optimizer
from atoll.core.tree import Tree, record, tree_map


@record
class Update:
    """What a client sends. Nothing else leaves it."""

    model: Tree


@dataclass(frozen=True)
class FedMedian(Method):
    """Hyper-parameters, and nothing else."""

    optimizer: Optimizer = Adam()
    epochs: int = 3

    paper: ClassVar[str] = "Yin et al., Byzantine-Robust Distributed Learning, ICML 2018"

    def init(self, clients):
        return self.net.init(clients.key)

    def round(self, server, clients):
        reply = clients.map(self.train, ToAll(server))  # of all clients, stacked
        return tree_map(lambda weights: weights.median(dim=0).values, reply.model)

    def deploy(self, server):
        return ToAll(server)

    @client_step
    def train(self, graph, model, state, key):
        def loss(params, key):
            return cross_entropy(self.net(params, graph, key), graph)

        model, state = fit(loss, model, self.optimizer, state, self.epochs, key)
        return Update(model), state
