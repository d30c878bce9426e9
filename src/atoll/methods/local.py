"""Local: every client starts from the same model and trains without the others.

    θ_i <- fit(θ_i) on its own graph;   nothing is aggregated

Wire, per client and round:  down  the key of the common initial model      up  nothing
Private state: the model and the optimizer's moments.
Floats per client and round: one number down, none up.
Departures from the reference code: public codes initialise each client's model separately (OpenFGL)
or train fewer epochs than the federated methods (GCFL). Here all clients have the same start and
the same budget. Each client initialises the network's private layers by itself.
"""

from dataclasses import dataclass

from torch import Tensor

from atoll.core.graph import Graph
from atoll.core.message import ToAll
from atoll.core.method import Clients, client_step
from atoll.core.private_layers import (
    init_private,
    init_shared,
    join_parts,
    private_names,
    whole_params,
)
from atoll.core.task import TASKS
from atoll.core.training import Training
from atoll.core.tree import Empty, Tree, record


@record
class Private:
    """The private state of a client: its whole model and the optimizer's moments."""

    model: Tree
    moments: Tree


@dataclass(frozen=True)
class Local(Training):
    """The non-federated baseline that a federated method must beat."""

    tasks = tuple(TASKS)
    paper = "Every client trains by itself (also called self-train or isolate); no paper"
    not_private = "nothing leaves its clients"
    not_averaging = "nothing is aggregated"
    deployed = "personalised"

    def init(self, clients: Clients) -> Tensor:
        return clients.key

    def round(self, server: Tensor, clients: Clients) -> Tensor:
        clients.map(self.train, ToAll(server))
        return server

    def local(self, reply: Empty) -> Empty:
        return reply

    def predict(
        self, graph: Graph, message: Tree, state: Private | None, key: Tensor | None = None
    ) -> Tensor:
        if state is not None:
            return self.net(state.model, graph, key)
        start = init_shared(self.net, message)
        return self.net(whole_params(self.net, graph, start, None), graph, key)

    def plain_params(self, message: Tree, state: Private | None) -> Tree:
        return None if state is None or private_names(self.net) else state.model

    @client_step
    def train(
        self, graph: Graph, seed: Tensor, state: Private | None, key: Tensor
    ) -> tuple[Empty, Private]:
        """Continue training the client's own model."""
        if state is None:
            own = init_private(self.net, graph, key)
            state = Private(join_parts(init_shared(self.net, seed), own), None)
        return Empty(), Private(*self.fit(graph, state.model, state.moments, key))
