"""FedOPT: the server uses the clients' mean update as a gradient (Reddi et al., 2021).

    Δ = Σ_i n_i (θ_i - x) / Σ_i n_i          over the participants, n_i = nodes.  x: global model.
    m <- β1 m + (1 - β1) Δ                   from zero.
    v <- v + Δ²                              adagrad.
    v <- v - (1 - β2) Δ² sign(v - Δ²)        yogi.
    v <- β2 v + (1 - β2) Δ²                  adam;  all from v = τ².
    x <- x + η_s m / (√v + τ)                sgd:  x <- x + η_s m.

There is no bias correction. `server_optimizer` selects FedAdam, FedYogi or FedAdagrad. With sgd,
η_s = 1 and β1 = 0 the server's step equals FedAvg's bit for bit. With sgd and β1 > 0 the method is
FedAvgM, whose rate is η_s (1 - β1).

Wire, per client and round:  down  model      up  model, num_nodes
Private state: the network's private layers and the optimizer's moments. Moments restart in each
round, because the paper's clients are stateless (`optimizer_state=keep` keeps them).
Floats per client and round: 2P + 1 for P parameters.
Departures from the reference code: none known. The defaults of `server_lr` (η_s) and `server_beta1`
(β1) are 0.03 and 0.9 for adam and yogi, 0.1 and 0 for adagrad, 1 and 0 for sgd. β1 and β2 are the
paper's. Clients use plain SGD, as in the paper, because adaptive steps of both sides compound. A
step of an adaptive server is about η_s for every parameter that moves, even for a small Δ, so a
large η_s diverges. The paper tunes η_s and τ for each task. Rates here were chosen on validation
nodes of Cora, the clients' rate also on validation graphs of PROTEINS.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from atoll.core.aggregate import (
    Adaptive,
    Aggregate,
    Mean,
    Moments,
    ServerBeta1,
    ServerBeta2,
    ServerOptimizer,
    ServerRate,
    ServerTau,
    aggregated,
)
from atoll.core.errors import ConfigError
from atoll.core.hyper import OptimizerState, WeightBy
from atoll.core.message import ToAll
from atoll.core.method import Clients
from atoll.core.optim import SGD, Optimizer
from atoll.core.space import USUAL_SGD, Real, Settings, paper_grid
from atoll.core.task import TASKS
from atoll.core.training import Averaging
from atoll.core.tree import Tree, record, tree_map


@record
class Server:
    """The server's tree: x, m, v (None for sgd), and the state of the aggregation rule."""

    model: Tree
    mean: Tree
    square: Tree
    rule: Tree = None


@dataclass(frozen=True)
class FedOpt(Averaging):
    """Adaptive federated optimization."""

    optimizer: Optimizer = SGD(lr=0.5, weight_decay=5e-4)
    server_optimizer: ServerOptimizer = "adam"
    server_lr: ServerRate = None
    server_beta1: ServerBeta1 = None
    server_beta2: ServerBeta2 = 0.99
    tau: ServerTau = 1e-3
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "reset"
    aggregate: Aggregate = Mean()

    space = USUAL_SGD | {"server_lr": Real(1e-3, 1, log=True), "tau": Real(1e-5, 0.1, log=True)}
    grids = paper_grid(tau=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1))
    tasks = tuple(TASKS)
    paper = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    for_graphs: ClassVar[Settings] = {"lr": 0.03}

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.aggregate, Adaptive):
            raise ConfigError(
                "fedopt has its own server optimizer; remove --set aggregate=adaptive, or use "
                "fedavg with it"
            )

    @property
    def adaptive(self) -> Adaptive:
        """Return the server's optimizer."""
        rates = self.server_lr, self.server_beta1, self.server_beta2
        return Adaptive(self.server_optimizer, *rates, self.tau)

    def init(self, clients: Clients) -> Server:
        model = self.start(clients.key)
        first = self.adaptive.init(model)
        return Server(model, first.mean, first.square, self.aggregate.init(model))

    def round(self, server: Server, clients: Clients) -> Server:
        reply = clients.map(self.train, ToAll(server.model))
        target, rule = aggregated(self.aggregate, server, reply, clients.key)
        return replace(self.step(server, target), rule=rule)

    def step(self, server: Server, target: Tree) -> Server:
        """Take one server step in the direction of the mean model."""
        lr, beta1 = self.adaptive.rates
        if self.server_optimizer == "sgd" and not beta1:
            # x + η_s (target - x), which equals the target bit for bit if η_s = 1.
            model = tree_map(lambda x, y: torch.lerp(x, y, lr), server.model, target)
            return replace(server, model=model)
        delta = tree_map(torch.sub, target, server.model)
        update, state = self.adaptive.step(delta, Moments(server.mean, server.square))
        return Server(tree_map(torch.add, server.model, update), state.mean, state.square)
