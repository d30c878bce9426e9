"""FedProx: FedAvg with a pull towards the received model (Li et al., 2020).

    min_w  f_i(w) + μ/2 ‖w - θ‖²,   i.e. gradient  ∇f_i(w) + μ (w - θ);   θ <- Σ_i n_i θ_i / Σ_i n_i

Wire, per client and round:  down  model      up  model, num_nodes
Private state: the optimizer's moments, and the layers that the network calls private.
Floats per client and round: 2P + 1 for P parameters.
Departures from the reference code: clients are sampled uniformly and averaged by size, as the
authors' code does (the paper samples by size and averages plainly). The pull is added to the
gradient: the same number, without differentiating a squared norm, and it can never reach the
server's copy of the model. With Adam the pull is preconditioned like the rest of the gradient;
`optimizer=sgd` is the paper's step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from atoll.core.aggregate import Aggregate, Mean, Update, first_server, model_of, next_server
from atoll.core.graph import Graph
from atoll.core.hyper import Epochs, NonNegative, OptimizerState, WeightBy
from atoll.core.message import ToAll
from atoll.core.method import Clients, Method, client_step
from atoll.core.optim import Adam, Optimizer
from atoll.core.private_layers import Private, fit_received, init_shared
from atoll.core.space import USUAL, OneOf, Real, Space
from atoll.core.task import TASKS
from atoll.core.tree import Tree, tree_map


@dataclass(frozen=True)
class FedProx(Method):
    """Federated averaging with a proximal term."""

    optimizer: Optimizer = Adam()
    epochs: Epochs = 3
    mu: Annotated[NonNegative, "μ: weight of the pull towards the received model"] = 0.01
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "keep"
    aggregate: Aggregate = Mean()

    space: ClassVar[Space] = {**USUAL, "mu": Real(1e-4, 10, log=True)}
    grids: ClassVar[Mapping[str, Space]] = {"paper": {"mu": OneOf((0.001, 0.01, 0.1, 1.0))}}
    tasks: ClassVar[tuple[str, ...]] = tuple(TASKS)
    paper: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"
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
        """Minimise the cross entropy near the received model."""

        def pull(grads: Tree, params: Tree) -> Tree:
            return tree_map(
                lambda g, w, anchor: g + self.mu * (w - anchor), grads, params, received
            )

        model, own = fit_received(self, graph, received, state, key, adjust=pull)
        return Update(model, graph.size(self.weight_by)), own
