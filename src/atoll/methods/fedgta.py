"""FedGTA: average with clients whose smoothed predictions are similar (Li et al., 2024).

    Ŷ = softmax(f(θ_i))   on all nodes, no dropout;   Y⁰ = one-hot on training nodes, else Ŷ.
    `steps` times         Y <- α Â Y + (1 - α) Y⁰;   Y += Y⁰ on training nodes.
    p = softmax(Y),   q = softmax(Y / temperature),   both one-hot on training nodes.
    H_i = Σ_v d_v Σ_c (1/e + q_vc log q_vc).          The confidence; d_v = degree of v.
    M_i = mean_v p^r  and  mean_v (p - mean)^r,  r = 1..`order`.      The mixed moments.
    θ_i <- Σ_{j ∈ S_i} H_j θ_j / Σ_{j ∈ S_i} H_j,   S_i = {j : cos(M_i, M_j) > threshold} ∪ {i}.

`propagation`: "authors" is the above, from their code. "paper" is Y <- (1 - α) Â Y + α Y⁰ with
nothing added on training nodes. "openfgl" starts from Ŷ on training nodes and zero elsewhere, has
no self-loops, and keeps Y in [0, 1]. `moments_of=all` computes moments of every propagation step,
as in the paper; the code uses the last step. `preset=reference` has the code's network: GAMLP with
its fault. `net=gamlp` is GAMLP without the fault.

Wire, per client and round:  down  own model      up  model, confidence H, moments M
Private state: the optimizer's moments. M discloses how often a client predicts each class.
Floats per client and round: 2P + 1 + 2RC for P parameters, C classes and order R ("hybrid"; times
`steps` for `moments_of=all`).
Departures from the reference code: sets contain participants only, and an absent client keeps its
model (the code reads models by the wrong index). If no client of a set has an edge, its weights are
0/0; then a client keeps its own model. 0 log 0 is 0, without the code's 1e-8. More than half of all
pairs pass a threshold of 0.5 (Cora, 10 clients by Louvain). The server's tree contains the cosines.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.aggregate import cosines, mix, put, spread
from atoll.core.graph import Graph, View
from atoll.core.hyper import OneOrMore, OptimizerState, Positive, Share
from atoll.core.message import ToEach
from atoll.core.method import Clients, client_step
from atoll.core.space import USUAL, Presets, Real, Whole, paper_grid
from atoll.core.training import Mixing, put_pairs, unmet
from atoll.core.tree import Tree, record
from atoll.nn import views
from atoll.nn.ops import matmul


@record
class Update:
    """The reply of a client: its model, H, and M (`order` or 2 `order` blocks of C numbers).

    With `moments_of=all` every smoothing step has these blocks.
    """

    model: Tree
    confidence: Tensor
    moments: Tensor


@record
class Server:
    """The server's tree: all clients' models, and the latest cosines and weights (NaN: unknown)."""

    models: Tree
    similarity: Tensor
    weights: Tensor


@dataclass(frozen=True)
class FedGTA(Mixing):
    """Average the models of clients with similar smoothed predictions."""

    threshold: Annotated[float, "cosine of moments above which two clients average"] = 0.5
    moments: Annotated[
        Literal["origin", "central", "hybrid"], "moments that describe each client"
    ] = "hybrid"
    order: Annotated[OneOrMore, "highest order of the moments"] = 10
    propagation: Annotated[Literal["authors", "paper", "openfgl"], "how labels are smoothed"] = (
        "authors"
    )
    steps: Annotated[OneOrMore, "number of smoothing steps"] = 5
    alpha: Annotated[Share, "α: weight of the neighbours (in `paper`: of the node)"] = 0.5
    temperature: Annotated[Positive, "temperature of the softmax for the confidence"] = 20.0
    moments_of: Annotated[Literal["last", "all"], "smoothing steps with moments"] = "last"
    optimizer_state: OptimizerState = "keep"

    space = USUAL | {
        "threshold": Real(0.05, 0.95),
        "order": Whole(2, 20),
        "steps": Whole(1, 10),
        "alpha": Real(0.1, 0.9),
        "temperature": Real(1, 100, log=True),
    }
    # The values of its public code for Cora, CiteSeer and PubMed.
    grids = paper_grid(moments=("hybrid", "origin"), order=(6, 13, 20), threshold=(0.5, 0.6, 0.65))
    paper = "Li et al., FedGTA: Topology-aware Averaging for Federated Graph Learning, VLDB 2024"
    not_private = "its clients also send moments of their soft labels, and the server compares them"
    presets: ClassVar[Presets] = {"reference": {"net": "gamlp", "hop_weights": "sgl"}}

    @property
    def views(self) -> Mapping[str, View]:
        bare = self.propagation == "openfgl"
        walk = {"bare": views.bare_adjacency} if bare else {"gcn": views.gcn_adjacency}
        return {**self.net.views, **walk, "degree": views.degrees}

    def init(self, clients: Clients) -> Server:
        models = spread(self.net.init(clients.key), clients.total)
        return Server(models, unmet(clients), unmet(clients))

    def round(self, server: Server, clients: Clients) -> Server:
        reply, present = clients.map(self.train, ToEach(server.models)), clients.positions
        alike = cosines(reply.moments)
        weight = personal_weights(alike, reply.confidence, self.threshold)
        models = put(server.models, present, mix(reply.model, weight))
        pairs = (server.similarity, alike), (server.weights, weight)
        return Server(models, *(put_pairs(known, present, found) for known, found in pairs))

    def diagnostics(self, server: Server) -> Mapping[str, Tensor]:
        return {"similarity": server.similarity, "mixing": server.weights}

    @client_step
    def train(self, graph: Graph, received: Tree, state: Tree, key: Tensor) -> tuple[Update, Tree]:
        """Train the received model, then compute H and M of its predictions."""
        model, moments = self.fit(graph, received, state, key)
        return Update(model, *self.describe(self.net(model, graph), graph)), moments

    def describe(self, logits: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        """Compute H and M of a client from its logits (N, C)."""
        truth = functional.one_hot(graph.y, logits.shape[-1]).to(logits.dtype)
        walked = torch.stack(self.propagated(torch.softmax(logits, -1), truth, graph))
        p, q = (torch.softmax(walked / t, -1) for t in (1.0, self.temperature))
        p, q = (torch.where(graph.train.unsqueeze(-1) > 0, truth, soft) for soft in (p, q))
        sure = (1 / math.e + torch.xlogy(q[-1], q[-1])).sum(-1)
        share = graph.real / graph.real.sum()
        return graph.tensor_view("degree") @ sure, self.mixed_moments(p, share)

    def propagated(self, soft: Tensor, truth: Tensor, graph: Graph) -> list[Tensor]:
        """Return Y after every propagation step, or only after the last, (N, C) each."""
        # Y is linear in Y⁰, but storing the part of the one-hot rows would save no product.
        train, found = graph.train.unsqueeze(-1), []
        openfgl = self.propagation == "openfgl"
        known = soft * train if openfgl else torch.where(train > 0, truth, soft)
        adjacency = graph.views["bare" if openfgl else "gcn"]
        spreads = 1 - self.alpha if self.propagation == "paper" else self.alpha
        y = known
        for _ in range(self.steps):
            y = spreads * matmul(adjacency, y) + (1 - spreads) * known
            if self.propagation == "authors":
                y = y + train * known
            found.append(y := y.clamp(0, 1) if openfgl else y)
        return found if self.moments_of == "all" else found[-1:]

    def mixed_moments(self, p: Tensor, share: Tensor) -> Tensor:
        """Compute M from class probabilities p of S smoothing steps, (S, N, C).

        `share` is each node's weight in a mean, (N,).
        """
        mean = (share @ p).unsqueeze(-2)
        blocks = {"origin": [p], "central": [p - mean], "hybrid": [p, p - mean]}[self.moments]
        found = []
        for block in blocks:
            power = block
            for _ in range(self.order):
                found.append(share @ power)
                power = power * block
        return torch.cat(found, dim=-1).flatten()


def personal_weights(alike: Tensor, confidence: Tensor, threshold: float) -> Tensor:
    """Return each model's weight (column) for each client (row), (K, K). Rows sum to 1."""
    own = torch.eye(len(alike), dtype=alike.dtype, device=alike.device)
    weight = torch.where(alike > threshold, 1.0, own) * confidence.clamp(min=0).to(alike.dtype)
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / torch.where(total > 0, total, 1.0), own)
