"""MOON: FedAvg with embeddings close to the global model's (Li, He and Song, 2021).

    min_w  CE(w) + μ mean_v log(1 + exp((cos(z_v, z_v^p) - cos(z_v, z_v^g)) / τ)).
    z is the embedding of the model in training,  z^g of the received model,  z^p of the client's
    own model after its last participation.   θ <- Σ_i n_i θ_i / Σ_i n_i.

z^g and z^p are constants of a round, without dropout, so a client computes them once. Both cosines
share z. One vector per node is therefore enough: cos(z, z^p) - cos(z, z^g) = ẑ · (ẑ^p - ẑ^g), with
ẑ = z/‖z‖.

Wire, per client and round:  down  model      up  model, num_nodes
Private state: the client's last local model, which it has already sent, the optimizer's moments and
the network's private layers. Storing z^p instead of the model would save a forward pass per round,
but a tensor with a node axis cannot be stacked with other clients' states.
Floats per client and round: 2P + 1 for P parameters. A head of width k adds 2hk + k + h parameters.
Departures from the reference code: a client without a previous model trains with cross entropy
only. The authors' code does this in the first round; later it contrasts a new client with a
separate initial model. The network has a projection head only if `head` gives its width. As in the
paper, the head is between the embedding and the last layer and is averaged like the rest. It ends
in the embedding's width, because the last layer reads it. z is the last layer's input before its
activation, because after a ReLU no cosine is negative. OpenFGL uses z after the ReLU
(`embedding=post-relu`), as do `gin` and `disengcn`, whose last layer is linear. The mean is over
training nodes; OpenFGL uses all (`nodes=all`). Adam's moments are kept, as in OpenFGL; the authors'
code creates a new optimizer in each round (`optimizer_state=reset`).
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core import private_layers as layers
from atoll.core.aggregate import Aggregate, Mean, Update
from atoll.core.graph import Graph
from atoll.core.hyper import NonNegative, OptimizerState, Positive, WeightBy, WidthOrNone
from atoll.core.losses import masked_mean, unit
from atoll.core.method import Embedder, client_step
from atoll.core.random import fold
from atoll.core.space import USUAL, Real, paper_grid
from atoll.core.task import TASKS
from atoll.core.training import Averaging
from atoll.core.tree import Tree, record
from atoll.nn import EMBEDDERS
from atoll.nn.init import apply_linear, linear

CONTRAST = "moon"
"""The name of the view that contains ẑ^p - ẑ^g."""


@record
class Kept(layers.KeepsPrivate):
    """The private state: the model of the last participation, private layers and moments."""

    previous: Tree
    own: layers.Private


@dataclass(frozen=True)
class MOON(Averaging):
    """Model-contrastive federated learning."""

    mu: Annotated[NonNegative, "μ: weight of the contrast"] = 1.0
    tau: Annotated[Positive, "τ: temperature of the contrast"] = 0.5
    head: Annotated[WidthOrNone, "width of a projection head; 0 for no head"] = 0
    embedding: Annotated[Literal["pre-relu", "post-relu"], "embedding to compare"] = "pre-relu"
    nodes: Annotated[Literal["train", "all"], "nodes in the contrast"] = "train"
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "keep"
    aggregate: Aggregate = Mean()

    space = USUAL | {"mu": Real(0.01, 10, log=True), "tau": Real(0.1, 1)}
    grids = paper_grid(mu=(0.1, 1.0, 5.0, 10.0))
    tasks = tuple(TASKS)
    nets = EMBEDDERS
    compares_embeddings = True
    paper = "Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021"

    @property
    def model(self) -> Any:
        """The network, with its projection head if `head` is set."""
        return Projected(self.net, self.head) if self.head else self.net

    def start(self, key: Tensor) -> Tree:
        return layers.init_shared(self.model, key)

    def predict(
        self, graph: Graph, message: Tree, state: Kept | None, key: Tensor | None = None
    ) -> Tensor:
        out: Tensor = self.model(layers.whole_params(self.model, graph, message, state), graph, key)
        return out

    def plain_params(self, message: Tree, state: Kept | None) -> Tree:
        return None if self.head or layers.private_names(self.net) else message

    @client_step(discloses={"model": "the previous model that a client keeps is the one it sent"})
    def train(
        self, graph: Graph, received: Tree, state: Kept | None, key: Tensor
    ) -> tuple[Update, Kept]:
        """Train the received model on the task's loss and, after the first time, the contrast."""
        before = None if state is None else state.own
        if state is not None:
            graph = self.with_contrast(graph, received, state)
        model, own = layers.fit_received(self, graph, received, before, key, net=self.model)
        return Update(model, graph.size(self.weight_by)), Kept(model, own)

    def loss(self, params: Tree, graph: Graph, key: Tensor | None) -> Tensor:
        """Return the task's loss plus, if the graph has the view `CONTRAST`, the contrast."""
        z = self.model.embed(params, graph, key)
        error = graph.task.loss(self.model.logits(params, z, graph, key), graph)
        if CONTRAST not in graph.views:
            return error
        apart = graph.at_roots(graph.tensor_view(CONTRAST))
        mask = graph.at_roots(graph.train if self.nodes == "train" else graph.real)
        return error + self.mu * contrast(self._compared(z), apart, mask, self.tau)

    def with_contrast(self, graph: Graph, received: Tree, state: Kept) -> Graph:
        """Add ẑ^p - ẑ^g to the graph's views, so that mini-batches cut it with the other views."""
        own = state.own.layers
        previous, current = (
            unit(self._compared(self.model.embed(layers.join_parts(part, own), graph)))
            for part in (state.previous, received)
        )
        graph = replace(graph, training=None) if self.nodes == "all" else graph  # not only training
        return replace(graph, views={**graph.views, CONTRAST: graph.from_roots(previous - current)})

    def _compared(self, z: Tensor) -> Tensor:
        return torch.relu(z) if self.embedding == "post-relu" else z


def contrast(z: Tensor, apart: Tensor, mask: Tensor, tau: float) -> Tensor:
    """Return the mean of log(1 + exp(ẑ · apart / τ)) over the mask, for apart = ẑ^p - ẑ^g."""
    return masked_mean(functional.softplus((unit(z) * apart).sum(-1) / tau), mask)


@dataclass(frozen=True)
class Projected(Embedder):
    """A network with a shared two-layer head between its embedding and its last layer."""

    net: Any
    width: int

    @property
    def private(self) -> tuple[str, ...]:
        return layers.private_names(self.net)

    def init_private(self, key: Tensor, graph: Graph) -> Tree:
        return self.net.init_private(key, graph) if self.private else {}

    def init(self, key: Tensor) -> Tree:
        params, h = self.net.init(key), getattr(self.net, "width", self.net.hidden)
        sizes = enumerate(((h, self.width), (self.width, h)))
        head = [linear(fold(key, "head", number), *size) for number, size in sizes]
        return {**(params if isinstance(params, dict) else {"layers": params}), "head": head}

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return the head's output for the network's embedding, (N, h)."""
        one, two = params["head"]
        z = self.net.embed(params.get("layers", params), graph, key)
        return apply_linear(two, torch.relu(apply_linear(one, z)))

    def logits(self, params: Tree, h: Tensor, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Apply the network's last layer to the head's output `h`."""
        out: Tensor = self.net.logits(params.get("layers", params), h, graph, key)
        return out
