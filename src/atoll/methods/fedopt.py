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
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.core.aggregate import Aggregate, Mean, aggregated
from atoll.core.hyper import Limits, OptimizerState, Positive, ShareBelowOne, WeightBy
from atoll.core.message import ToAll
from atoll.core.method import Clients
from atoll.core.optim import SGD, Optimizer
from atoll.core.space import USUAL_SGD, Real, Settings, paper_grid
from atoll.core.task import TASKS
from atoll.core.training import Averaging
from atoll.core.tree import Tree, record, tree_map

SERVER_OPTIMIZERS = {"adam": (0.03, 0.9), "yogi": (0.03, 0.9), "adagrad": (0.1, 0.0), "sgd": (1, 0)}
"""The defaults of η_s and β1 for each optimizer of the server."""


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
    server_optimizer: Annotated[
        Literal["adam", "yogi", "adagrad", "sgd"], "optimizer of the server"
    ] = "adam"
    server_lr: Annotated[
        float | None,
        Limits(above=0, words="a positive learning rate"),
        "η_s: learning rate of the server; none: by optimizer",
    ] = None
    server_beta1: Annotated[
        float | None, Limits(low=0, below=1), "β1: decay of m per round; none: by optimizer"
    ] = None
    server_beta2: Annotated[ShareBelowOne, "β2: decay of v per round"] = 0.99
    tau: Annotated[Positive, "τ: start of √v, and least divisor of a step"] = 1e-3
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "reset"
    aggregate: Aggregate = Mean()

    space = USUAL_SGD | {"server_lr": Real(1e-3, 1, log=True), "tau": Real(1e-5, 0.1, log=True)}
    grids = paper_grid(tau=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1))
    tasks = tuple(TASKS)
    paper = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    for_graphs: ClassVar[Settings] = {"lr": 0.03}

    @property
    def server_rates(self) -> tuple[float, float]:
        """Return η_s and β1: the given values, or else the defaults of the optimizer."""
        lr, beta1 = SERVER_OPTIMIZERS[self.server_optimizer]
        lr = lr if self.server_lr is None else self.server_lr
        return lr, beta1 if self.server_beta1 is None else self.server_beta1

    def init(self, clients: Clients) -> Server:
        model, square = self.start(clients.key), None
        if self.server_optimizer != "sgd":
            square = tree_map(lambda x: torch.full_like(x, self.tau**2), model)
        mean = tree_map(torch.zeros_like, model)
        return Server(model, mean, square, self.aggregate.init(model))

    def round(self, server: Server, clients: Clients) -> Server:
        reply = clients.map(self.train, ToAll(server.model))
        target, rule = aggregated(self.aggregate, server, reply, clients.key)
        return replace(self.step(server, target), rule=rule)

    def step(self, server: Server, target: Tree) -> Server:
        """Take one server step in the direction of the mean model."""
        lr, beta1 = self.server_rates
        if self.server_optimizer == "sgd" and not beta1:
            # x + η_s (target - x), which equals the target bit for bit if η_s = 1.
            model = tree_map(lambda x, y: torch.lerp(x, y, lr), server.model, target)
            return replace(server, model=model)
        delta = tree_map(torch.sub, target, server.model)
        mean = tree_map(lambda d, m: torch.lerp(d, m, beta1), delta, server.mean)
        direction, square = mean, None
        if self.server_optimizer != "sgd":
            square = tree_map(self._square, server.square, delta)
            direction = tree_map(lambda m, v: m / (v.sqrt() + self.tau), mean, square)
        model = tree_map(lambda x, d: x + lr * d, server.model, direction)
        return Server(model, mean, square)

    def _square(self, v: Tensor, delta: Tensor) -> Tensor:
        new, share = delta**2, 1 - self.server_beta2
        if self.server_optimizer == "adagrad":
            return v + new
        if self.server_optimizer == "yogi":
            return v - share * new * torch.sign(v - new)
        return torch.lerp(v, new, share)
