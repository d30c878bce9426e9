"""FedATH: learn which edges help, share only the network that uses them (Fu et al., 2025).

    ω_ij = sigmoid(Φ(i, j))                     A private evaluator scores every directed edge.
    H^c = f^c(graph weighted by ω, X)           The causal network classifies; it is shared.
    H^b = f^b(graph weighted by 1 - ω, X)       The biased network is uninformative and private.
    f^c and Φ minimise  CE(H^c) + λ HSIC(H^c, H^b),  H^b is held fixed.
    f^b minimises       ENT(H^b) + λ HSIC(H^c, H^b),  H^c and ω are held fixed.
    W^c <- Σ_k N_k W^c_k / N.   A client predicts with W^c and its own Φ.

`routing`: "code" is the above: Algorithm 1, with Φ trained by the losses that train it in the
public code. "joint" is Eq. 12: all networks minimise CE + ENT + λ HSIC and nothing is held fixed,
so ENT reaches Φ through 1 - ω. `weight_by`: "nodes" is Eq. 4 and the code, "uniform" is the 1/K of
Eq. 2.

ENT is the negative entropy. HSIC with linear kernels is a squared cross-covariance, Tr(K1 C K2 C) =
‖(C H^c)ᵀ H^b‖². It costs O(N d²) and needs no N x N matrix.

Wire, per client and round:  down  causal network      up  causal network, num_nodes
Private state: evaluator, biased network, Adam's moments of all three. Edge weights never leave.
Floats per client and round: 2P + 1 for P parameters of the causal network (more with `share`).
Departures from the reference code: evaluation has no dropout (the code keeps it on). Log-softmax
replaces log(softmax). Batch normalisation always uses the statistics of the client's own edges, as
the code does in effect. The paper's Eq. 11 prints (N-1)² for (N-1)⁻², and Eq. 9 omits a factor p;
`hsic` and `entropy` name the variants.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core.aggregate import Aggregate, Mean, Update
from atoll.core.graph import Graph, View
from atoll.core.hyper import NonNegative, WeightBy
from atoll.core.losses import cross_entropy
from atoll.core.method import client_step
from atoll.core.optim import Adam, Optimizer
from atoll.core.random import fold
from atoll.core.space import USUAL, Real, paper_grid, preset_table
from atoll.core.training import Averaging
from atoll.core.tree import Tree, record
from atoll.nn.edges import weighted_gcn
from atoll.nn.nets import GCN, EdgeGNN, EdgeMLP

SHARED = {
    "cg": ("causal",),
    "cg+ee": ("causal", "evaluator"),
    "cg+bg": ("causal", "biased"),
    "all": ("causal", "evaluator", "biased"),
}


@record
class Private:
    """The private state: the networks that are not shared, and Adam's moments of all networks."""

    networks: Tree
    moments: Tree


@dataclass(frozen=True)
class FedATH(Averaging):
    """Learn edge weights, and average the network that uses them."""

    net: GCN  # both f^c and f^b
    optimizer: Optimizer = Adam(lr=1e-3)
    lam: Annotated[NonNegative, "λ: weight of the HSIC term"] = 0.1
    evaluator: Annotated[Literal["mlp", "gnn"], "network that scores the edges"] = "mlp"
    hsic: Annotated[Literal["trace/N", "trace/(N-1)^2"], "scale of HSIC"] = "trace/(N-1)^2"
    entropy: Annotated[Literal["sum", "mean", "uniform"], "variant of Eq. 9"] = "mean"
    routing: Annotated[Literal["code", "joint"], "which loss trains which network"] = "code"
    use_entropy: Annotated[bool, "whether the loss has the entropy term"] = True
    use_hsic: Annotated[bool, "whether the loss has the HSIC term"] = True
    share: Annotated[Literal["cg", "cg+ee", "cg+bg", "all"], "networks that are averaged"] = "cg"
    weight_by: WeightBy = "nodes"
    aggregate: Aggregate = Mean()

    space = USUAL | {"lam": Real(1e-4, 10, log=True)}
    # The paper's grid of λ. The values 7 and 10 fit only the units of its public code, trace/N.
    grids = paper_grid(hsic=("trace/N",), lam=(0.001, 0.1, 7.0, 10.0))
    paper = (
        "Fu et al., Less is More: Federated Graph Learning with Alleviating Topology Heterogeneity "
        "from A Causal Perspective, ICML 2025"
    )
    nets = ("gcn",)
    made_for = (GCN, "fedath weighs the edges of a gcn")
    presets = preset_table(
        *("evaluator", "hsic", "entropy", "lam", "hidden", "lr"),
        # Eqs. 5 to 12 where they make sense. λ is from the paper's grid (it reports no choice).
        paper=("mlp", "trace/(N-1)^2", "mean", 0.1, 64, 1e-3),
        # The public code's defaults, made for Cora. λ = 7 ruins Photo (docs/results/fedath.md).
        reference=("gnn", "trace/N", "sum", 7.0, 512, 1e-3),
    )

    @property
    def scorer(self) -> EdgeMLP | EdgeGNN:
        """The edge evaluator Φ."""
        net = self.net
        if self.evaluator == "mlp":
            return EdgeMLP(net.features, net.hidden)
        return EdgeGNN(net.features, net.classes, net.hidden, net.dropout)

    @property
    def views(self) -> Mapping[str, View]:
        return {**self.net.views, **self.scorer.views}

    @property
    def reach(self) -> int | None:
        # Batch normalisation in the evaluator "gnn" reads every edge.
        return None if self.evaluator == "gnn" else self.net.reach

    def start(self, key: Tensor) -> Tree:
        return {name: self._fresh(name, key) for name in SHARED[self.share]}

    def _fresh(self, name: str, key: Tensor) -> Tree:
        network = self.scorer if name == "evaluator" else self.net
        return network.init(fold(key, "init", name))

    def predict(
        self, graph: Graph, message: Tree, state: Private | None, key: Tensor | None = None
    ) -> Tensor:
        networks = message if state is None else {**state.networks, **message}
        # A client that never trained has no evaluator, so it uses every edge.
        weight = self.edge_weights(networks, graph, key)
        propagate = weighted_gcn(graph.sparse_view("loops"), weight)
        return self.net.on(propagate, networks["causal"], graph, key)

    @client_step
    def train(
        self, graph: Graph, shared: Tree, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Train evaluator, causal network and biased network together."""
        sent = SHARED[self.share]  # not the names in the message, which a server could choose
        kept = [name for name in SHARED["all"] if name not in sent]
        own = state or Private({name: self._fresh(name, key) for name in kept}, None)
        networks, moments = self.fit(graph, {**shared, **own.networks}, own.moments, key)
        reply = Update({name: networks[name] for name in sent}, graph.size(self.weight_by))
        return reply, Private({name: networks[name] for name in kept}, moments)

    def loss(self, params: Tree, graph: Graph, key: Tensor | None) -> Tensor:
        """Sum both losses. Unless `routing=joint`, detach the part that each holds fixed."""
        # One Adam over all networks takes the same steps as one Adam per network.
        loops = graph.sparse_view("loops")
        weight = self.edge_weights(params, graph, key)
        causal = self.net.on(weighted_gcn(loops, weight), params["causal"], graph, key)
        joint = self.routing == "joint"
        rest = weighted_gcn(loops, 1 - (weight if joint else weight.detach()))
        noise = None if key is None else fold(key, "biased")
        biased = self.net.on(rest, params["biased"], graph, noise)
        total = cross_entropy(causal, graph)
        if self.use_entropy:
            total = total + negative_entropy(biased, graph.real, self.entropy)
        if self.use_hsic:
            # Once with H^b held fixed and once with H^c: one value gives the gradients of both.
            both = hsic(causal, biased, graph.real, self.hsic)
            total = total + self.lam * (both if joint else both + both.detach())
        return total

    def edge_weights(self, networks: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return ω for every entry of the view `loops`, (E,), or ones without an evaluator."""
        if "evaluator" not in networks:
            return torch.ones_like(graph.sparse_view("loops").values)
        noise = None if key is None else fold(key, "evaluator")
        return torch.sigmoid(self.scorer(networks["evaluator"], graph, noise))

    def explain_edges(self, graph: Graph, message: Tree, state: Private | None) -> Tensor:
        """Return ω for every entry of the view `loops`. `atoll explain` shows it at the client."""
        networks = message if state is None else {**state.networks, **message}
        return self.edge_weights(networks, graph)


def hsic(a: Tensor, b: Tensor, real: Tensor, scale: str) -> Tensor:
    """Return HSIC, with linear kernels, of two representations (N, d) over the real nodes."""
    mask, count = real.unsqueeze(-1), real.sum()
    centred = (a - (a * mask).sum(0) / count) * mask
    trace = ((centred.T @ (b * mask)) ** 2).sum()
    return trace / (count if scale == "trace/N" else (count - 1).clamp(min=1) ** 2)


def negative_entropy(logits: Tensor, real: Tensor, reading: str) -> Tensor:
    """Return the sum or mean of Σ_c p log p. "uniform" is Eq. 9 as printed: mean of -Σ_c log p."""
    log_p = logits.log_softmax(dim=-1)
    each = -log_p.sum(-1) if reading == "uniform" else (log_p.exp() * log_p).sum(-1)
    total = (each * real).sum()
    return total if reading == "sum" else total / real.sum()
