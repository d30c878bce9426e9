"""FedProto: clients share class prototypes and no weights (Tan et al., 2022).

    C_i^j = mean of z_v over client i's training nodes v of class j, for the classes it has.
    C^j <- mean of C_i^j over the clients that have class j, its owners.
    w_i <- fit(w_i) on  CE + λ R,   R pulls embeddings z to the received C^j; R = 0 at first.

    pull  nodes       mean over training nodes and dimensions of (z_v - C^{y_v})².  Authors' code.
          classes     the same mean within each class, summed over classes.         OpenFGL.
          prototypes  Σ_j ‖C_i^j - C^j‖, C_i^j by the model in training.            The paper.
          means       the mean of these distances, as in FedTGP's paper.
    aggregation  owners  plain mean.       counts  weighted by training nodes of the class.
                 paper   as counts, but again divided by the number of owners, as printed.

Wire, per client and round:  down  prototypes, which of them are known, the key of the common
initial model      up  prototypes, its classes (`counts` and `paper`: training nodes of each).
With `share_weights` also the model in both directions, and num_nodes up. With `compat` also
num_nodes up.
Private state: the model (with `share_weights` only its private layers) and the optimizer's moments.
The prototype of a class with one training node is that node's embedding, and the reply discloses
which classes a client has.
Floats per client and round: 2C(h + 1) + 1 for C classes and width h; `share_weights`: 2P more.
Departures from the reference code: z is the last layer's input before its activation (after it for
`gin` and `disengcn`, whose last layer is linear). Prototypes come from one forward pass without
dropout after training; the authors average the embeddings of the last epoch. A class keeps its last
prototype while all its owners are absent. A class without an owner has no prototype. The
optimizer's moments stay with the model, so that λ = 0 is Local (`optimizer_state=reset`: a new
optimizer each round, as in the authors' code). `inference=prototype` predicts the class of the
nearest prototype, as in the paper. The default is the head, which is better here on validation
nodes (docs/methods.md). Right after training, before the server answers, a client can only use its
own prototypes. `share_weights` averages models as in FedAvg and scores the global model.
`compat=diluted-prototypes` is OpenFGL's mean: over all participants, weighted by size. There a
participant without the class contributes a zero vector, also if no participant has the class.
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
    share_weights: Annotated[bool, "whether models are averaged as well"] = False
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
            raise ConfigError("compat=diluted-prototypes has its own mean; remove aggregation")
        if not self.share_weights and type(self.aggregate) is not Mean:
            raise ConfigError(
                "fedproto averages models only with share_weights; remove aggregate, or use "
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
            known = torch.ones_like(known)  # in OpenFGL a class without an owner is at zero, too
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
    """Return the global prototypes, (C, h), given those of K clients, (K, C, h).

    `mass` is the weight of each client's prototype, (K, C).
    """
    if diluted is not None:  # the clients' sizes, (K,), for OpenFGL's mean over all participants
        return torch.einsum("k,kch->ch", diluted / diluted.sum(), prototypes)
    total, weight = torch.einsum("kc,kch->ch", mass, prototypes), mass.sum(0)
    if kind == "paper":
        weight = weight * (mass > 0).sum(0)
    return total / weight.clamp(min=1).unsqueeze(-1)
