"""An own method as it was written before the move: deep imports and `loss(params, key)`."""

from dataclasses import dataclass
from typing import ClassVar

from atoll.core.layers import fit_layers, kept
from atoll.core.mix import average

from atoll import Method, client_step
from atoll.core.losses import cross_entropy
from atoll.core.message import ToAll
from atoll.core.optim import Adam, Optimizer
from atoll.core.tree import Tree, record


@record
class Sent:
    model: Tree


@dataclass(frozen=True)
class FedPlain(Method):
    optimizer: Optimizer = Adam()
    epochs: int = 3

    paper: ClassVar[str] = "none"

    def init(self, clients):
        return self.net.init(clients.key)

    def round(self, server, clients):
        return average(clients.map(self.train, ToAll(server)).model)

    def deploy(self, server):
        return ToAll(server)

    @client_step
    def train(self, graph, model, state, key):
        def loss(params, graph, key):
            return cross_entropy(self.net(params, graph, key), graph)

        own = kept(self.net, graph, state, key)
        model, own = fit_layers(loss, self.net, graph, model, own, self.optimizer, self.epochs, key)
        return Sent(model), own
