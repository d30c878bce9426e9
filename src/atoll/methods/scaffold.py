"""SCAFFOLD: control variates correct every local step (Karimireddy et al., 2020).

    y <- y - η (∇f_i(y) - c_i + c)           K steps from the received model x.
    c_i <- c_i - c + (x - y) / (K η)         Option II; option I: c_i <- ∇f_i(x).
    x <- x + η_g mean_{i ∈ S} (y_i - x)      S are the participants, of N clients.
    c <- c + |S|/N mean_{i ∈ S} Δc_i

c and all c_i start at zero. c is therefore the mean of all c_i, including those of absent clients.
With option II, Δc_i = (x - y_i) / (K_i η) - c: the server needs only y_i and the number of steps.

Wire, per client and round:  down  model, c      up  model, K, weight (option I: Δc_i as well;
`replace-controls`: c_i)
Private state: c_i, the optimizer's moments and the network's private layers, which are not
corrected. c_i stays at the client but is no secret, because the server can reconstruct Δc_i.
Floats per client and round: 3P + 2 for P parameters; 4P + 2 with option I or `replace-controls`.
Departures from the reference code: K counts the steps of each client, epochs times mini-batches.
Weight decay is part of f_i for option II. Option I excludes it from c_i and c; in c - c_i it would
cancel. The paper's step is plain SGD, the default here. Its rates were chosen on validation nodes
of Cora and on validation graphs of PROTEINS. With Adam or momentum the correction enters before the
preconditioner, and (x - y) / (K η) is a mean direction, not a mean gradient. OpenFGL uses Adam, and
its training is unstable. `compat=replace-controls` is OpenFGL's server, which sets c to the mean of
the participants' c_i. That is correct only with full participation. `preset=openfgl` has Adam and
this server.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.core import private_layers as layers
from atoll.core.aggregate import Aggregate, Mean, aggregated, average
from atoll.core.fit import gradient, num_steps
from atoll.core.graph import Graph
from atoll.core.hyper import OptimizerState, Positive, WeightBy
from atoll.core.message import ToAll
from atoll.core.method import Clients, client_step
from atoll.core.optim import SGD, Optimizer
from atoll.core.random import fold
from atoll.core.space import USUAL_SGD, Presets, Real, Settings
from atoll.core.task import TASKS
from atoll.core.training import Training
from atoll.core.tree import Tree, record, tree_map


@record
class Server:
    """The server's tree: model x and control c, which clients receive, and the rule's state."""

    model: Tree
    control: Tree
    rule: Tree = None


@record
class Update:
    """The reply: y_i, K_i, its weight, and Δc_i (option I), c_i (`replace-controls`) or None."""

    model: Tree
    steps: Tensor
    weight: Tensor
    control: Tree


@record
class Private(layers.KeepsPrivate):
    """The private state: c_i, the network's private layers, and the optimizer's moments."""

    control: Tree
    own: layers.Private


@dataclass(frozen=True)
class Scaffold(Training):
    """Stochastic controlled averaging."""

    optimizer: Optimizer = SGD(lr=0.5, weight_decay=5e-4)
    option: Annotated[Literal["I", "II"], "control from a gradient (I) or the steps (II)"] = "II"
    eta_g: Annotated[Positive, "η_g: learning rate of the server; 1 for a plain mean"] = 1.0
    weight_by: WeightBy = "uniform"
    optimizer_state: OptimizerState = "keep"
    compat: Annotated[Literal["none", "replace-controls"], "a fault of OpenFGL to repeat"] = "none"
    aggregate: Aggregate = Mean()

    space = USUAL_SGD | {"eta_g": Real(0.1, 2, log=True)}
    tasks = tuple(TASKS)
    paper = (
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, "
        "ICML 2020"
    )
    not_private = (
        "its clients also send how many steps they took, and the server rebuilds a "
        "control from each of their models"
    )
    for_graphs: ClassVar[Settings] = {"lr": 0.01}
    presets: ClassVar[Presets] = {
        "openfgl": {"optimizer": "adam", "weight_by": "nodes", "compat": "replace-controls"},
    }

    def init(self, clients: Clients) -> Server:
        model = layers.init_shared(self.net, clients.key)
        return Server(model, tree_map(torch.zeros_like, model), self.aggregate.init(model))

    def round(self, server: Server, clients: Clients) -> Server:
        reply = clients.map(self.train, ToAll(replace(server, rule=None)))
        mean, rule = aggregated(self.aggregate, server, reply, clients.key)
        # x + η_g (mean - x), which equals the mean bit for bit if η_g = 1.
        model = tree_map(lambda x, y: torch.lerp(x, y, self.eta_g), server.model, mean)
        share = len(clients) / clients.total
        if self.compat == "replace-controls":
            control = average(reply.control)
        elif self.option == "I":
            mean = average(reply.control)
            control = tree_map(lambda c, d: c + share * d, server.control, mean)
        else:  # c + share (mean slope - c)
            mean = average(mean_slope(server.model, reply.model, reply.steps, self.optimizer.lr))
            control = tree_map(lambda c, s: torch.lerp(c, s, share), server.control, mean)
        return Server(model, control, rule)

    @client_step(discloses={"control": "option I and OpenFGL's server need it"})
    def train(
        self, graph: Graph, received: Server, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Train the received model with corrected steps, then update the control."""
        if state is None:
            own = layers.Private(layers.init_private(self.net, graph, key), None)
            state = Private(tree_map(torch.zeros_like, received.control), own)
        shift = tree_map(torch.sub, received.control, state.control)

        def bent(grads: Tree, params: Tree) -> Tree:
            return tree_map(torch.add, grads, shift)

        model, own = layers.fit_received(self, graph, received.model, state.own, key, adjust=bent)
        steps, sent = num_steps(graph, self.epochs), None
        if self.option == "I":
            start = layers.join_parts(received.model, state.own.layers)
            noise = fold(key, "control")
            slope = gradient(lambda params, key: self.loss(params, graph, key), start, noise)
            control = layers.shared_part(self.net, slope)
            sent = tree_map(torch.sub, control, state.control)
        else:
            slope = mean_slope(received.model, model, steps, self.optimizer.lr)
            control = tree_map(torch.sub, slope, shift)
        if self.compat == "replace-controls":
            sent = control
        return Update(model, steps, graph.size(self.weight_by), sent), Private(control, own)


def mean_slope(start: Tree, end: Tree, steps: Tensor, lr: float) -> Tree:
    """Return (x - y) / (K η), the mean direction of K plain steps. `end` may be stacked."""

    def divided(x: Tensor, y: Tensor) -> Tensor:
        return (x - y) / (lr * steps).reshape(*steps.shape, *[1] * x.dim())

    return tree_map(divided, start, end)
