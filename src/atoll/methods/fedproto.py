"""FedProto: clients share class prototypes and no weights (Tan et al., 2022).

    C_i^j = mean of z_v over client i's training nodes v of class j, for the classes that it owns
    C^j <- mean of C_i^j over the owners of class j
    w_i <- fit(w_i) on  CE + λ R,   R pulls embeddings z to the received C^j, none at first

    pull  nodes       mean over training nodes and dimensions of (z_v - C^{y_v})²   authors' code
          classes     the same mean within each class, summed over classes          OpenFGL
          prototypes  Σ_j ‖C_i^j - C^j‖, C_i^j by the model in training             the paper
          means       the mean of these distances, as in FedTGP's paper
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

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core import private_layers as layers
from atoll.core.aggregate import Aggregate, Mean, combine
from atoll.core.errors import ConfigError
from atoll.core.graph import Graph
from atoll.core.hyper import WeightBy
from atoll.core.method import Clients
from atoll.core.private_layers import Private
from atoll.core.prototypes import PrototypeTraining, Server, Update
from atoll.core.space import USUAL, Real
from atoll.core.tree import Tree
from atoll.nn import EMBEDDERS


@dataclass(frozen=True)
class FedProto(PrototypeTraining):
    """Federated prototype learning."""

    aggregation: Annotated[Literal["owners", "counts", "paper"], "weights of a prototype mean"] = (
        "owners"
    )
    share_weights: Annotated[bool, "whether models are averaged, too"] = False
    weight_by: WeightBy = "nodes"
    compat: Annotated[Literal["none", "diluted-prototypes"], "a fault of OpenFGL"] = "none"
    aggregate: Aggregate = Mean()

    space = USUAL | {"lam": Real(0.01, 10, log=True)}
    nets = EMBEDDERS
    paper = (
        "Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
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
        reply = clients.map(self.train, self.message(server))
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

    def reply(
        self, graph: Graph, model: Tree, moments: Tree, prototypes: Tensor, count: Tensor
    ) -> tuple[Update, Private]:
        mass = (count > 0).to(count.dtype) if self.aggregation == "owners" else count
        sized = self.share_weights or self.compat == "diluted-prototypes"
        size = graph.size(self.weight_by) if sized else None
        if not self.share_weights:
            return Update(prototypes, mass, None, size), Private(model, moments)
        shared, own = layers.shared_part(self.net, model), layers.private_part(self.net, model)
        return Update(prototypes, mass, shared, size), Private(own, moments)

    def params(self, graph: Graph, received: Server, state: Private | None, key: Tensor) -> Tree:
        if not self.share_weights:
            return super().params(graph, received, state, key)
        own = layers.init_private(self.net, graph, key) if state is None else state.layers
        return layers.join_parts(received.start, own)


def aggregate(prototypes: Tensor, mass: Tensor, kind: str, diluted: Tensor | None) -> Tensor:
    """Clients' prototypes (K, C, h) and masses (K, C) -> the global ones, (C, h)."""
    if diluted is not None:  # the clients' sizes, (K,): OpenFGL's mean over owners and others alike
        return torch.einsum("k,kch->ch", diluted / diluted.sum(), prototypes)
    total, weight = torch.einsum("kc,kch->ch", mass, prototypes), mass.sum(0)
    if kind == "paper":
        weight = weight * (mass > 0).sum(0)
    return total / weight.clamp(min=1).unsqueeze(-1)
