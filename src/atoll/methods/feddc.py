"""FedDC: the server tracks every client's drift and corrects the mean by it (Gao et al., 2022).

    min_θ  f_i(θ) + α/2 ‖θ + h_i - w‖² + <θ, s - s_i>,   K_i steps from w.
    d_i = θ_i - w;   h_i <- h_i + d_i.             The drift h_i starts at zero.
    s_i <- -d_i / (K_i η);   s = mean of all s_i.  The mean gradient s_i starts at zero.
    w <- mean_{i ∈ S} (θ_i + h_i)                  over the participants S; η: learning rate.

The paper has g_i = d_i and the term <θ, g_i - g> / (η K), which equals <θ, s - s_i> if every client
takes K steps. The added gradient is affine, α (θ - w) + v_i with v_i = α h_i + s - s_i. The server
computes h_i and s_i of every client from the uploaded models, and sends v_i. The h_i and s_i of
absent clients do not change.

Wire, per client and round:  down  model, v_i      up  model, K, weight
Private state: the optimizer's moments and the network's private layers, which have no drift.
Floats per client and round: 3P + 2 for P parameters.
Departures from the reference code: Atoll does not scale α and s by the clients' sizes, clip
gradients or decay the rate. `variant=authors` is the public code's server. It sets s_i <- s_i - s -
d_i / (K η) as in SCAFFOLD, and w to the mean of the participants' θ_i plus the mean of *all* h_i.
h_i sums all updates, so w is an extrapolation. With Adam, whose steps do not shrink, training
diverges. The default is therefore plain SGD, as in paper and code. Rates and α were chosen on
validation nodes of Cora and validation graphs of PROTEINS. `compat` repeats faults of OpenFGL. With
`no-server-term`, v_i lacks s. With `lagging-drift`, h_i grows by the d_i of the client's previous
round. `openfgl` repeats both. `preset=openfgl` adds OpenFGL's Adam, α and weights. OpenFGL has no
proximal term in its first round. Atoll does not reproduce this.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.core.aggregate import Aggregate, Mean, aggregated, average, put, spread
from atoll.core.errors import ConfigError
from atoll.core.fit import num_steps
from atoll.core.graph import Graph
from atoll.core.hyper import NonNegative, OptimizerState, WeightBy
from atoll.core.message import ToEach
from atoll.core.method import Clients, client_step
from atoll.core.optim import SGD, Optimizer
from atoll.core.private_layers import Private, fit_received, init_shared
from atoll.core.space import USUAL_SGD, Presets, Real, Settings, paper_grid
from atoll.core.task import TASKS
from atoll.core.training import Training
from atoll.core.tree import Tree, record, take, tree_map


@record
class Server:
    """The server's tree: w, the stacked h_i and s_i of all N clients, and the rule's state."""

    model: Tree
    drift: Tree
    slope: Tree
    rule: Tree = None


@record
class Download:
    """The message to a client: w, and v_i, which the client adds to its gradient."""

    model: Tree
    shift: Tree


@record
class Update:
    """The reply of a client: θ_i, K_i, and its weight in the mean."""

    model: Tree
    steps: Tensor
    weight: Tensor


@dataclass(frozen=True)
class FedDC(Training):
    """Track every client's drift at the server, and correct the mean model by it."""

    optimizer: Optimizer = SGD(lr=0.5, weight_decay=5e-4)
    alpha: Annotated[NonNegative, "α: weight of the proximal term and of the drift"] = 0.01
    variant: Annotated[Literal["paper", "authors"], "which of the two published servers"] = "paper"
    weight_by: WeightBy = "uniform"
    optimizer_state: OptimizerState = "keep"
    compat: Annotated[
        Literal["none", "no-server-term", "lagging-drift", "openfgl"], "faults of OpenFGL to repeat"
    ] = "none"
    aggregate: Aggregate = Mean()

    space = USUAL_SGD | {"alpha": Real(1e-3, 1, log=True)}
    # From the authors' scripts: one value for each kind of data.
    grids = paper_grid(alpha=(0.005, 0.01, 0.1))
    tasks = tuple(TASKS)
    paper = (
        "Gao et al., FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and "
        "Correction, CVPR 2022"
    )
    not_private = (
        "its clients also send how many steps they took, and the server tracks the "
        "drift of each of them"
    )
    for_graphs: ClassVar[Settings] = {"lr": 0.01}
    presets: ClassVar[Presets] = {
        "openfgl": {"optimizer": "adam", "alpha": 0.1, "weight_by": "nodes", "compat": "openfgl"},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "authors" and self.compat != "none":
            raise ConfigError("compat repeats faults of OpenFGL, which follows variant=paper")

    def init(self, clients: Clients) -> Server:
        model = init_shared(self.net, clients.key)
        zeros = spread(tree_map(torch.zeros_like, model), clients.total)
        return Server(model, zeros, tree_map(torch.clone, zeros), self.aggregate.init(model))

    def round(self, server: Server, clients: Clients) -> Server:
        to_others = 0 if self.compat in ("no-server-term", "openfgl") else 1

        def shift(h: Tensor, slope: Tensor) -> Tensor:
            return self.alpha * h + to_others * slope.mean(0) - slope  # v_i of every client

        shifts = tree_map(shift, server.drift, server.slope)
        message = Download(spread(server.model, clients.total), shifts)
        reply = clients.map(self.train, ToEach(message))
        drift, slope = self._followed(server, reply, clients.positions)
        if self.variant == "paper":
            own = tree_map(torch.add, reply.model, take(drift, clients.positions))
            reply = replace(reply, model=own)
        model, rule = aggregated(self.aggregate, server, reply, clients.key)
        if self.variant == "authors":
            model = tree_map(torch.add, model, average(drift))
        return Server(model, drift, slope, rule)

    def _followed(self, server: Server, reply: Update, present: Tensor) -> tuple[Tree, Tree]:
        """Return all h_i and all s_i after the participants' updates."""

        def far(like: Tensor) -> Tensor:  # K η of each participant, for a stacked tensor
            return (self.optimizer.lr * reply.steps).reshape(-1, *[1] * (like.dim() - 1))

        before = take(server.slope, present)
        update = tree_map(torch.sub, reply.model, server.model)
        slope = tree_map(lambda d: -d / far(d), update)
        if self.compat in ("lagging-drift", "openfgl"):
            update = tree_map(lambda s: -s * far(s), before)
        if self.variant == "authors":
            mean = average(server.slope)
            slope = tree_map(lambda new, old, s: new + old - s, slope, before, mean)
        drift = tree_map(torch.add, take(server.drift, present), update)
        return put(server.drift, present, drift), put(server.slope, present, slope)

    @client_step
    def train(
        self, graph: Graph, received: Download, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Minimise the task's loss with the proximal term and the shift v_i."""
        sent = received.model, received.shift

        def correct(grads: Tree, params: Tree) -> Tree:
            return tree_map(lambda g, x, w, v: g + self.alpha * (x - w) + v, grads, params, *sent)

        model, own = fit_received(self, graph, received.model, state, key, adjust=correct)
        return Update(model, num_steps(graph, self.epochs), graph.size(self.weight_by)), own
