"""FED-PUB: private masks on shared weights, and similar clients share more (Baek et al., 2023).

    W ∘ μ_i                Client i multiplies every weight matrix by its own mask.
    min_{θ, μ}  f_i(θ ∘ μ) + λ1 ‖μ‖_1 + λ2 ‖θ - θ̄_i‖²        θ starts at the received θ̄_i.
                           The masks μ start at 1. λ1 is `lam_mask`, λ2 is `lam_prox`.
    q_i = mean_v h_v       Functional embedding: the last layer's input before its activation,
                           on a random graph that all parties generate identically.
    θ̄_i <- Σ_j softmax_j(τ cos(q_i, q_j)) θ_j                over the participants.

Weights with |μ| < λ1 count as zero in predictions and in q, not in training. The gradients of both
regularisers are added to that of f_i; the L1 norm has the subgradient sign(μ). The random graph has
5 blocks of 100 nodes, edges inside a block with probability 0.1, and normal features. All parties
know its seed, `proxy_seed`, as they know the network's width, so the graph is never sent. With a
GCN, the mean is taken before the last product: q = ((1ᵀÂ / n) relu(H)) W + b.

Wire, per client and round:  down  own model      up  model, q
Private state: masks, and the optimizer's moments of weights and masks.
Floats per client and round: 2P + h for P parameters and width h.
Departures from the reference code: `regularizers=off` is the loss that the code in fact trains. The
code computes both terms from detached copies, which have no gradient. `proximal=norm` takes the
norm of each tensor without the square, as the code does. The code uploads the masks, which no party
reads, and sends the random graph (500F floats for F features). Its client starts with the mask of
the client that trained before on the same worker; here all masks start at 1. A client that has not
trained yet gets the plain mean of the participants' models. `preset=paper` has the code's network,
and its τ for disjoint clients. `preset=reference` is the same without regularisers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.graph import Graph, make_graph
from atoll.core.hyper import Epochs, NonNegative, Sharpness
from atoll.core.masks import Private, first_masks, masked
from atoll.core.message import ToEach
from atoll.core.method import Clients, Net, client_step, embedder
from atoll.core.optim import Adam, Optimizer
from atoll.core.random import fold, make_key, normal, uniform
from atoll.core.space import USUAL, Presets, Real, Settings, paper_grid
from atoll.core.training import Mixing, Mixtures, first_mixtures, mixing_of, next_mixtures
from atoll.core.tree import Tree, record, tree_map
from atoll.nn import EMBEDDERS
from atoll.nn.init import apply_linear
from atoll.nn.nets import GCN
from atoll.nn.ops import matmul

BLOCKS, BLOCK_SIZE, EDGE_PROBABILITY = 5, 100, 0.1
"""The random graph on which models are compared: blocks, nodes of a block, chance of an edge."""

PAPER: Settings = {"layers": 3, "head": "linear", "hidden": 128, "tau": 3.0, "epochs": 1}


@record
class Update:
    """The reply of a client: its weights without the mask, and q, (h,)."""

    model: Tree
    embedding: Tensor


@dataclass(frozen=True)
class FedPUB(Mixing):
    """Personalised subgraph federated learning."""

    optimizer: Optimizer = Adam(lr=0.01, weight_decay=1e-6)
    epochs: Epochs = 1
    tau: Sharpness = 10.0
    lam_mask: Annotated[NonNegative, "λ1: L1 weight of the masks, and their threshold"] = 1e-3
    lam_prox: Annotated[NonNegative, "λ2: weight of the pull towards the received model"] = 1e-3
    regularizers: Annotated[Literal["on", "off"], "off: the loss of the public code"] = "on"
    proximal: Annotated[Literal["squared", "norm"], "norm that λ2 weights"] = "squared"
    proxy_seed: Annotated[int, "seed of the common random graph"] = 0

    space = USUAL | {
        "tau": Real(1, 20, log=True),
        **dict.fromkeys(("lam_mask", "lam_prox"), Real(1e-5, 0.1, log=True)),
    }
    # From the authors' scripts: disjoint clients, overlapping clients, default.
    grids = paper_grid(tau=(3.0, 5.0, 10.0))
    paper = "Baek et al., Personalized Subgraph Federated Learning, ICML 2023"
    not_private = "its clients also send their output on a probe, and the server compares them"
    nets = EMBEDDERS
    compares_embeddings = True
    presets: ClassVar[Presets] = {"paper": PAPER, "reference": {**PAPER, "regularizers": "off"}}

    def init(self, clients: Clients) -> Mixtures:
        return first_mixtures(self.net.init(clients.key), clients)

    def round(self, server: Mixtures, clients: Clients) -> Mixtures:
        reply = clients.map(self.train, ToEach(server.models))
        return next_mixtures(server, reply.model, reply.embedding, self.tau, clients)

    def diagnostics(self, server: Mixtures) -> Mapping[str, Tensor]:
        return mixing_of(server.similarity, self.tau)

    def predict(
        self, graph: Graph, message: Tree, state: Private | None, key: Tensor | None = None
    ) -> Tensor:
        model = message if state is None else masked(message, state.masks, self.lam_mask)
        return self.net(model, graph, key)

    def plain_params(self, message: Tree, state: Private | None) -> Tree:
        return message if state is None else masked(message, state.masks, self.lam_mask)

    @client_step
    def train(
        self, graph: Graph, received: Tree, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Train weights and masks together. Reply with the model and its embedding q."""
        if state is None:
            state = Private(first_masks(received), None)
        start = {"model": received, "masks": state.masks}
        adjust = partial(self.regularised, received) if self.regularizers == "on" else None
        params, moments = self.fit(graph, start, state.moments, key, adjust=adjust)
        model, masks = params["model"], params["masks"]
        net: Any = self.net
        if hasattr(net, "dropout"):  # no view of the network depends on dropout
            net = replace(net, dropout=0.0)
        proxy = proxy_graph(net, self.proxy_seed, masks[0].dtype, masks[0].device)
        embedding = mean_embedding(self.net, masked(model, masks, self.lam_mask), proxy)
        return Update(model, embedding), Private(masks, moments)

    def loss(self, params: Tree, graph: Graph, key: Tensor | None) -> Tensor:
        """Return the task's loss with the masked weights."""
        return super().loss(masked(params["model"], params["masks"]), graph, key)

    def regularised(self, anchor: Tree, grads: Tree, params: Tree) -> Tree:
        """Add the gradients of λ1 ‖μ‖_1 and λ2 ‖θ - θ̄‖² (`proximal=norm`: not squared)."""

        def pulled(grad: Tensor, weight: Tensor, start: Tensor) -> Tensor:
            away = weight - start
            if self.proximal == "squared":
                return grad + 2 * self.lam_prox * away
            unit = functional.normalize(away.flatten(), dim=0)
            return grad + self.lam_prox * unit.view_as(away)

        masks = zip(grads["masks"], params["masks"], strict=True)
        sparse = [grad + self.lam_mask * mask.sign() for grad, mask in masks]
        return {"model": tree_map(pulled, grads["model"], params["model"], anchor), "masks": sparse}


@lru_cache(maxsize=4)
def proxy_graph(net: Net, seed: int, dtype: torch.dtype, device: torch.device) -> Graph:
    """Return the random graph, which is identical for all parties, with the network's views."""
    key, nodes = fold(make_key(seed, device), "proxy"), BLOCKS * BLOCK_SIZE
    block = torch.arange(nodes, device=device) // BLOCK_SIZE
    chosen = uniform(fold(key, "edges"), (nodes, nodes)) < EDGE_PROBABILITY
    one_way = (chosen & (block.unsqueeze(1) == block)).triu(1).nonzero().T
    edges = torch.cat([one_way, one_way.flip(0)], dim=1)
    x = normal(fold(key, "features"), (nodes, net.features), dtype)
    return make_graph(x, edges, torch.zeros_like(block), views=net.views)


def mean_embedding(net: Net, params: Tree, proxy: Graph) -> Tensor:
    """Return q: the mean over the nodes of the last layer's input before its activation, (h,)."""
    if not isinstance(net, GCN):
        return embedder(net).embed(params, proxy).mean(0)
    *before, last, _ = params
    share = matmul(proxy.views["gcn"], proxy.real.unsqueeze(-1)).squeeze(-1) / proxy.num_nodes
    read = torch.relu(net.embed(params[:-1], proxy)) if before else proxy.x
    assert isinstance(read, Tensor)
    return apply_linear(last, share @ read)
