"""Base of methods that exchange class prototypes: the mean embedding of each class.

    C_i^j = mean of z_v over client i's training nodes v of class j, for the classes it has.
    w_i <- fit(w_i) on  CE + λ R

z_v is the embedding of node v, and CE the task's loss. R pulls embeddings towards the received
prototypes C^j and is zero before the first ones arrive. `pull` implements the variants of R. In
`FedProto` and `FedTGP` the server combines the clients' prototypes in different ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core import private_layers as layers
from atoll.core.errors import ConfigError
from atoll.core.graph import Graph
from atoll.core.hyper import NonNegative, OptimizerState
from atoll.core.losses import class_means
from atoll.core.message import ToAll
from atoll.core.method import client_step, embedder
from atoll.core.private_layers import Private
from atoll.core.random import make_key
from atoll.core.task import CLASSIFICATIONS
from atoll.core.training import Training
from atoll.core.tree import Tree, record


@record
class Update:
    """The reply of a client."""

    prototypes: Tensor  # mean embedding of each class, (C, h); zero without training nodes
    mass: Tensor  # per class: one if the client has it, or the count of its training nodes, (C,)
    model: Tree = None  # the shared layers, if the method shares any
    size: Tensor | None = None  # the client's size, if the method weights by it


@record
class Server:
    """The server's tree. Clients receive at most the first three fields."""

    start: Tree  # the key of the common initial model, or a shared model
    prototypes: Tensor | None  # (C, h); None before the first round
    known: Tensor | None  # one for the classes that have a prototype, (C,)
    rule: Tree = None  # the state of an aggregation rule
    learner: Tree = None  # the state of a model that learns prototypes


@dataclass(frozen=True)
class PrototypeTraining(Training):
    """Clients train their own models towards the received prototypes, and send prototypes."""

    lam: Annotated[NonNegative, "λ: weight of the pull towards the prototypes"] = 1.0
    pull: Annotated[
        Literal["nodes", "classes", "prototypes", "means"], "unit over which the pull averages"
    ] = "nodes"
    inference: Annotated[Literal["head", "prototype"], "last layer, or nearest prototype"] = "head"
    optimizer_state: OptimizerState = "keep"

    tasks = CLASSIFICATIONS
    compares_embeddings = True
    not_private = (
        "its clients send a mean embedding for each of their classes, not an update of a model"
    )
    deployed = "personalised"

    def message(self, server: Server) -> ToAll:
        """Return the message that clients need for training."""
        return ToAll(Server(server.start, server.prototypes, server.known))

    def deploy(self, server: Server) -> ToAll:
        if self.inference == "head":
            return ToAll(Server(server.start, None, None))
        return self.message(server)

    def local(self, reply: Update) -> Server:
        if self.inference == "head":
            return Server(reply.model, None, None)
        return Server(reply.model, reply.prototypes, (reply.mass > 0).to(reply.mass.dtype))

    def predict(
        self, graph: Graph, message: Server, state: Private | None, key: Tensor | None = None
    ) -> Tensor:
        params = self.params(graph, message, state, make_key(0, graph.real.device))
        net = embedder(self.net)
        z = net.embed(params, graph, key)
        if self.inference == "head" or message.prototypes is None or message.known is None:
            return net.logits(params, z, graph, key)
        known = message.known if graph.has_classes is None else message.known * graph.has_classes
        return graph.from_roots(nearness(z, message.prototypes, known))

    @client_step
    def train(
        self, graph: Graph, received: Server, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Train the client's own model towards the prototypes. Reply with its new prototypes."""
        net = embedder(self.net)

        def loss(params: Tree, graph: Graph, key: Tensor) -> Tensor:
            z = net.embed(params, graph, key)
            error = graph.task.loss(net.logits(params, z, graph, key), graph)
            if received.prototypes is None or received.known is None:
                return error
            rows = z, graph.at_roots(graph.y), graph.at_roots(graph.train)
            return error + self.lam * pull(*rows, received.prototypes, received.known, self.pull)

        params = self.params(graph, received, state, key)
        moments = None if state is None else state.moments
        model, moments = self.fit(graph, params, moments, key, loss=loss)
        rows = net.embed(model, graph), graph.at_roots(graph.y), graph.at_roots(graph.train)
        return self.reply(graph, model, moments, *class_means(*rows, self.net.classes))

    def reply(
        self, graph: Graph, model: Tree, moments: Tree, prototypes: Tensor, count: Tensor
    ) -> tuple[Update, Private]:
        """Return (reply, state), given each class's prototype and number of training nodes."""
        return Update(prototypes, (count > 0).to(prototypes.dtype)), Private(model, moments)

    def params(self, graph: Graph, received: Server, state: Private | None, key: Tensor) -> Tree:
        """Return the client's model: at first the common start, with keyed private layers."""
        if state is not None:
            return state.layers
        if received.start is None:
            name = type(self).__name__.lower()
            raise ConfigError(f"{name}'s clients upload no model; choose a method whose clients do")
        own = layers.init_private(self.net, graph, key)
        return layers.join_parts(layers.init_shared(self.net, received.start), own)


def pull(
    z: Tensor, y: Tensor, mask: Tensor, prototypes: Tensor, known: Tensor, kind: str
) -> Tensor:
    """Return R: the distance of the masked rows of z to the prototypes of their classes.

    Kinds: "nodes" is the mean square over rows and dimensions. "classes" sums the mean squares
    of the classes. "prototypes" sums the distances between class means and prototypes. "means"
    averages these distances. Only classes that are `known` count.
    """
    classes, width = prototypes.shape
    each = (z - prototypes[y]).square().sum(-1) / width * mask * known[y]
    if kind == "nodes":
        return each.sum() / mask.sum().clamp(min=1)
    own, count = class_means(z, y, mask, classes)
    if kind == "classes":
        return (each / count.clamp(min=1)[y]).sum()
    square = (own - prototypes).square().sum(-1)
    # If only this client has a class, it starts at the prototype, where the slope is rounding.
    least = (16 * torch.finfo(z.dtype).eps) ** 2 * prototypes.square().sum(-1)
    owned = known * (count > 0)
    apart = owned * (square > least)
    total = (apart * torch.where(apart > 0, square, torch.ones_like(square)).sqrt()).sum()
    return total / owned.sum().clamp(min=1) if kind == "means" else total


def nearness(z: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Return logits, (N, C): ‖z‖² - ‖z - C^j‖² for known prototypes C^j, and -1e30 for others."""
    near = 2 * z @ prototypes.T - prototypes.square().sum(-1)
    return torch.where(known > 0, near, torch.full_like(near, -1e30))
