"""FedProto: clients share class prototypes and no weights (Tan et al., 2022).

    C_i^j = mean of z_v over client i's training nodes v of class j, for the classes that it owns
    C^j <- mean of C_i^j over the owners of class j
    w_i <- fit(w_i) on  CE + λ R,   R pulls embeddings z to the received C^j, none at first

    pull  nodes       mean over training nodes and dimensions of (z_v - C^{y_v})²   authors' code
          classes     the same mean within each class, summed over classes          OpenFGL
          prototypes  Σ_j ‖C_i^j - C^j‖, C_i^j by the model in training             the paper
    aggregation  owners  plain mean        counts  weighted by training nodes of the class
                 paper   the latter once more divided by the number of owners, as the paper prints

Wire, per client and round:  down  prototypes, which of them are known, the seed of the common
initial model      up  prototypes, which classes it owns (`counts` and `paper`: how many training
nodes of each); with `share_weights` also the model both ways and num_nodes up
Private state: the model and the optimizer's moments. The prototype of a class with one training
node is that node's embedding, and the owners' flags tell which classes a client has.
Floats per client and round: 2C(h + 1) + 1 for C classes and width h; `share_weights`: 2P + 1 more.
Departures from the reference code: z is what the last layer reads before its activation (after it
for `gin` and `disengcn`, whose last layer is linear); prototypes come from one forward pass without
dropout after training (the authors average what they saw in the last epoch). A class whose owners
are all absent keeps its last prototype, one that nobody ever owned has none. The optimizer's
moments stay with the model, so that λ = 0 is Local (`optimizer_state=reset`: a new optimizer each
round, as by the authors). `inference=prototype` predicts the class of the nearest prototype, as the
paper does; the head is the default because it is better here on validation nodes (docs/methods.md).
Right after training, before the server answers, a client can only use its own prototypes.
`share_weights` averages models as FedAvg does and scores the global one.
`compat=diluted-prototypes` is OpenFGL's mean: over all participants, by size, with a zero vector
for a class that a participant does not own, also where nobody does.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core import private_layers as layers
from atoll.core.aggregate import Aggregate, Mean, combine
from atoll.core.errors import ConfigError
from atoll.core.graph import Graph
from atoll.core.hyper import NonNegative, OptimizerState, WeightBy
from atoll.core.losses import class_means
from atoll.core.message import ToAll
from atoll.core.method import Clients, client_step, embedder
from atoll.core.private_layers import Private
from atoll.core.random import make_key
from atoll.core.space import USUAL, Real
from atoll.core.task import CLASSIFICATIONS
from atoll.core.training import Training
from atoll.core.tree import Tree, record
from atoll.nn import EMBEDDERS


@record
class Update:
    """What leaves a client."""

    prototypes: Tensor  # mean embedding of each class, (C, h); zero without training nodes
    mass: Tensor  # one for the classes that it owns or, if asked for, their training nodes, (C,)
    model: Tree  # with `share_weights`, the layers that are shared
    size: Tensor | None  # the client's, where something is weighted by it


@record
class Server:
    """What the server keeps and, but for the state of the aggregation rule, sends."""

    start: Tree  # the seed of the common initial model; with `share_weights`, the model
    prototypes: Tensor | None  # (C, h); None before the first round
    known: Tensor | None  # one for the classes that have a prototype, (C,)
    rule: Tree = None


@dataclass(frozen=True)
class FedProto(Training):
    """Federated prototype learning."""

    lam: Annotated[NonNegative, "λ: weight of the pull towards the prototypes"] = 1.0
    pull: Annotated[Literal["nodes", "classes", "prototypes"], "what the pull averages"] = "nodes"
    aggregation: Annotated[Literal["owners", "counts", "paper"], "weights of a prototype mean"] = (
        "owners"
    )
    inference: Annotated[Literal["head", "prototype"], "last layer, or nearest prototype"] = "head"
    share_weights: Annotated[bool, "whether models are averaged, too"] = False
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "keep"
    compat: Annotated[Literal["none", "diluted-prototypes"], "a fault of OpenFGL"] = "none"
    aggregate: Aggregate = Mean()

    space = USUAL | {"lam": Real(0.01, 10, log=True)}
    tasks = CLASSIFICATIONS
    nets = EMBEDDERS
    paper = (
        "Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022"
    )
    not_private = (
        "its clients send a mean embedding for each of their classes, not an update of a model"
    )
    deployed = "personalised"

    def __post_init__(self) -> None:
        super().__post_init__()
        embedder(self.net)
        if self.compat == "diluted-prototypes" and self.aggregation != "owners":
            raise ConfigError("compat=diluted-prototypes has its own mean; leave out aggregation")
        if not self.share_weights and type(self.aggregate) is not Mean:
            raise ConfigError(
                "fedproto averages models only with share_weights; leave out aggregate, or use "
                "--set share_weights=true"
            )

    def scored_as(self) -> str:
        return "global" if self.share_weights else self.deployed

    def init(self, clients: Clients) -> Server:
        if not self.share_weights:
            return Server(clients.key, None, None)
        model = layers.init_shared(self.net, clients.key)
        return Server(model, None, None, self.aggregate.init(model))

    def round(self, server: Server, clients: Clients) -> Server:
        reply = clients.map(self.train, ToAll(replace(server, rule=None)))
        diluted = reply.size if self.compat == "diluted-prototypes" else None
        found = aggregate(reply.prototypes, reply.mass, self.aggregation, diluted)
        known = (reply.mass > 0).any(0).to(found.dtype)
        if diluted is not None:
            known = torch.ones_like(known)  # there a class without an owner is at zero, too
        if server.prototypes is not None and server.known is not None:
            found = torch.where(known.unsqueeze(-1) > 0, found, server.prototypes)
            known = torch.maximum(known, server.known)
        start, rule = server.start, server.rule
        if self.share_weights and reply.size is not None:
            models = reply.model, reply.size
            start, rule = combine(self.aggregate, start, *models, clients.key, rule)
        return Server(start, found, known, rule)

    def deploy(self, server: Server) -> ToAll:
        if self.inference == "head":
            return ToAll(Server(server.start, None, None))
        return ToAll(replace(server, rule=None))

    def local(self, reply: Update) -> Server:
        if self.inference == "head":
            return Server(reply.model, None, None)
        return Server(reply.model, reply.prototypes, (reply.mass > 0).to(reply.mass.dtype))

    def predict(
        self, graph: Graph, message: Server, state: Private | None, key: Tensor | None = None
    ) -> Tensor:
        params = self._params(graph, message, state, make_key(0, graph.real.device))
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
        """Train the client's own model towards the prototypes; describe its classes."""
        net = embedder(self.net)

        def loss(params: Tree, graph: Graph, key: Tensor) -> Tensor:
            z = net.embed(params, graph, key)
            error = graph.task.loss(net.logits(params, z, graph, key), graph)
            if received.prototypes is None or received.known is None:
                return error
            rows = z, graph.at_roots(graph.y), graph.at_roots(graph.train)
            return error + self.lam * pull(*rows, received.prototypes, received.known, self.pull)

        params = self._params(graph, received, state, key)
        moments = None if state is None else state.moments
        model, moments = self.fit(graph, params, moments, key, loss=loss)
        rows = net.embed(model, graph), graph.at_roots(graph.y), graph.at_roots(graph.train)
        prototypes, mass = class_means(*rows, self.net.classes)
        if self.aggregation == "owners":
            mass = (mass > 0).to(mass.dtype)
        sized = self.share_weights or self.compat == "diluted-prototypes"
        size = graph.size(self.weight_by) if sized else None
        if not self.share_weights:
            return Update(prototypes, mass, None, size), Private(model, moments)
        shared, own = layers.shared_part(self.net, model), layers.private_part(self.net, model)
        return Update(prototypes, mass, shared, size), Private(own, moments)

    def _params(self, graph: Graph, received: Server, state: Private | None, key: Tensor) -> Tree:
        """The client's model; before it has trained, the common start and layers by the key."""
        if not self.share_weights and state is not None:
            return state.layers
        common = received.start
        if common is None:
            raise ConfigError("fedproto's clients upload no model; use --set share_weights=true")
        if not self.share_weights:
            common = layers.init_shared(self.net, common)
        own = layers.init_private(self.net, graph, key) if state is None else state.layers
        return layers.join_parts(common, own)


def pull(
    z: Tensor, y: Tensor, mask: Tensor, prototypes: Tensor, known: Tensor, kind: str
) -> Tensor:
    """How far the masked rows of z are from the prototypes of their classes (`FedProto.pull`)."""
    classes, width = prototypes.shape
    each = (z - prototypes[y]).square().sum(-1) / width * mask * known[y]
    if kind == "nodes":
        return each.sum() / mask.sum().clamp(min=1)
    own, count = class_means(z, y, mask, classes)
    if kind == "classes":
        return (each / count.clamp(min=1)[y]).sum()
    square = (own - prototypes).square().sum(-1)
    # A sole owner starts at its own prototype, where a distance has no slope but rounding's.
    least = (16 * torch.finfo(z.dtype).eps) ** 2 * prototypes.square().sum(-1)
    apart = known * (count > 0) * (square > least)
    return (apart * torch.where(apart > 0, square, torch.ones_like(square)).sqrt()).sum()


def aggregate(prototypes: Tensor, mass: Tensor, kind: str, diluted: Tensor | None) -> Tensor:
    """Clients' prototypes (K, C, h) and masses (K, C) -> the global ones, (C, h)."""
    if diluted is not None:  # the clients' sizes, (K,): OpenFGL's mean over owners and others alike
        return torch.einsum("k,kch->ch", diluted / diluted.sum(), prototypes)
    total, weight = torch.einsum("kc,kch->ch", mass, prototypes), mass.sum(0)
    if kind == "paper":
        weight = weight * (mass > 0).sum(0)
    return total / weight.clamp(min=1).unsqueeze(-1)


def nearness(z: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Logits that are highest for the nearest prototype, (N, C): -‖z - C^j‖² + ‖z‖²."""
    near = 2 * z @ prototypes.T - prototypes.square().sum(-1)
    return torch.where(known > 0, near, torch.full_like(near, -1e30))
