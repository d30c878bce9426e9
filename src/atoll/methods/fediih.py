"""FedIIH: alike clients share more, factor by factor (Yu et al., 2025).

    H = encoder(X, A)      K factors side by side; a linear classifier reads H
    μ, log σ²              two heads on H: q_i = N(μ_i, σ_i²) for every node i
    q_m = N(mean_i μ_i, exp(mean_i log σ_i²))      what client m tells of a factor
    S^k_mj = 1 - JS(q_m^k, q_j^k) / ln 2,   β^k_m = softmax_j(τ S^k_mj)
    θ_m^k <- Σ_j β^k_mj θ_j^k      all weights of factor k, the encoder's and the
                                   classifier's; b_cls: plain mean
    α̃^k = Σ_m mean μ_m^k / (M + σ²_H / σ²_α)       global factors
    -ELBO = BCE(A, z zᵀ) + KL(q ‖ N(α̂_m, σ²_H))
            + KL(N(α̂_m, σ²_H) ‖ N(α̃, σ²_α)) - log N(α̂_m; 0, 1)
    with z drawn from q, and α̂_m the client's own copy of α̃

`trains_encoder`: in the paper's Algorithm 1 the cross entropy trains the classifier and the ELBO
the encoder ("elbo"). In the public code the ELBO's optimizer holds α̂ alone, which nothing reads, so
that cross entropy trains everything ("ce"; the ELBO is left out, which changes no number). "both"
adds the two losses. Everything but "ce" needs A to be reconstructed: `pairs` per node, 0 for all.
`heads`: in the code both heads are one function, so that log σ² = μ but for dropout ("shared").
"separate" gives log σ² a scale and a shift per dimension, so that it can reach log σ²_H, which rows
of length one cannot. "two-encoders" gives it its own W and b: the second DisenGCN of Eq. 7. Both
start as the code's head. Only the ELBO trains them, and Eq. 10 does not share them.
`js`: the code's surrogate averages moments and may pass ln 2 ("moments"); "monte-carlo" estimates
the divergence itself. `elbo_sums`: "sum" is Eq. 6 over N²; "mean" averages each term over its own
axes, as the code does. `prior`: the code adds log N(α̂) to what it minimises, and its ELBO has σ²_H
in the place of σ²_α. `statistics`: the code's q has dropout if there is one epoch, else none.

Wire, per client and round:  down  model (and α̃ for the ELBO)      up  model, mean, log_variance
Private state: Adam's moments; for the ELBO also α̂ and the variance head. z never leaves.
Floats per client and round: 2P + 2Kh for P parameters and K factors of width h; Kh more for α̃.
Departures from the reference code: α̃ and α̂ start at zero, not at random; one Adam takes both
losses' steps, so that after the first epoch the classifier reads that epoch's encoder. Eq. 6 prints
N(α̃, ·) as the prior of q, with which α̂ would touch nothing; it is N(α̂, ·) here, as in the code.
Ablations, which the paper names but does not define: `hierarchy=false` has the prior N(0, 1) and no
α (only the ELBO can tell); `inference=false` has no q, hence equal weights and no ELBO;
`disentangle=false` has one factor as wide as all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core.aggregate import average, mix, put, spread
from atoll.core.graph import Graph
from atoll.core.hyper import Epochs, OneOrMore, Positive, Sharpness, ZeroOrMore
from atoll.core.losses import cross_entropy
from atoll.core.message import ToEach
from atoll.core.method import Clients, client_step
from atoll.core.optim import Adam, Optimizer
from atoll.core.random import fold
from atoll.core.space import USUAL, OneOf, Real, Whole, paper_grid, preset_table
from atoll.core.training import Mixing, mixing_of, put_pairs, unmet
from atoll.core.tree import Tree, record
from atoll.nn import vgae
from atoll.nn.disengcn import DisenGCN


@record
class Server:
    """Every client's own model, stacked; α̃, (K * h,); the last known S, (K, M, M)."""

    models: Tree
    alpha: Tensor
    similarity: Tensor


@record
class Download:
    """A client's model and, if the ELBO is used, α̃."""

    model: Tree
    alpha: Tensor | None


@record
class Update:
    """What leaves a client: its model and q's parameters, (K, h) each, if there is a q."""

    model: Tree
    mean: Tensor | None
    log_variance: Tensor | None


@record
class Private:
    """What stays: α̂ and the variance head (empty without the ELBO), and Adam's moments."""

    latent: Tree
    moments: Tree


@dataclass(frozen=True)
class FedIIH(Mixing):
    """Inter- and intra-heterogeneity."""

    net: DisenGCN
    optimizer: Optimizer = Adam(lr=0.01, weight_decay=1e-6)
    epochs: Epochs = 1
    tau: Sharpness = 10.0
    trains_encoder: Annotated[Literal["ce", "elbo", "both"], "losses that train the encoder"] = "ce"
    heads: Annotated[Literal["shared", "separate", "two-encoders"], "parts of log σ²"] = "shared"
    js: Annotated[Literal["moments", "monte-carlo"], "how the divergence is computed"] = "moments"
    prior: Annotated[Literal["paper", "code"], "whose terms tie α̂ to α̃"] = "paper"
    elbo_sums: Annotated[Literal["sum", "mean"], "sums or means over nodes in the ELBO"] = "sum"
    elbo_weight: Annotated[float, "weight of the ELBO"] = 1.0
    statistics: Annotated[
        Literal["no-dropout", "code"], "whether q has dropout when it is sent"
    ] = "no-dropout"
    pairs: Annotated[ZeroOrMore, "pairs without an edge per node in the ELBO; 0 for all"] = 0
    samples: Annotated[OneOrMore, "draws of a Monte Carlo divergence"] = 512
    factor_variance: Annotated[Positive, "variance of a factor around α̂"] = 0.25
    alpha_variance: Annotated[Positive, "variance of α̂ around α̃"] = 1.0
    hierarchy: Annotated[bool, "ablation: whether there is an α"] = True
    inference: Annotated[bool, "ablation: whether there is a q"] = True
    disentangle: Annotated[bool, "ablation: whether there are several factors"] = True

    space = USUAL | {
        "hidden": OneOf((32, 64, 128)),
        "tau": Real(1, 50, log=True),
        "factors": OneOf((1, 2, 4, 6, 8, 10)),
        "routing": Whole(1, 6),
        "iterations": Whole(2, 7),
    }
    # All values in the tables of its appendix, and the numbers of factors that it has code for.
    grids = paper_grid(
        factors=(1, 2, 4, 6, 8, 10),
        hidden=(128, 256),
        routing=(1, 3, 4, 5, 6),
        iterations=(2, 5, 6, 7),
        dropout=(0.25, 0.3, 0.35, 0.4),
        lr=(0.01, 0.015, 0.02),
        weight_decay=(1e-6, 4.5e-3, 5e-3),
    )
    paper = "Yu et al., Modeling Inter-Intra Heterogeneity for Graph Federated Learning, AAAI 2025"
    not_private = (
        "its clients also send mean and variance of their factors, and the server compares them"
    )
    nets = ("disengcn",)
    made_for = (DisenGCN, "fediih shares the factors of a disengcn")
    presets = preset_table(
        *("trains_encoder", "heads", "js", "prior", "elbo_sums", "statistics"),
        # Algorithm 1 and Eqs. 5 to 11 as written. On Cora that learns each client's majority class
        # and little else; the defaults, which differ from the code in q's dropout, learn.
        paper=("elbo", "separate", "monte-carlo", "paper", "sum", "no-dropout"),
        # What the public code computes.
        reference=("ce", "shared", "moments", "code", "mean", "code"),
    )

    @property
    def disengcn(self) -> DisenGCN:
        """The network; without disentangling, one factor of the same width."""
        return self.net if self.disentangle else replace(self.net, factors=1, hidden=self.net.width)

    @property
    def uses_elbo(self) -> bool:
        """Whether the ELBO trains anything."""
        return self.inference and self.trains_encoder != "ce"

    def init(self, clients: Clients) -> Server:
        net, key = self.disengcn, clients.key
        alpha = torch.zeros(net.width, dtype=torch.get_default_dtype(), device=key.device)
        return Server(spread(net.init(key), clients.total), alpha, unmet(clients, net.factors))

    def round(self, server: Server, clients: Clients) -> Server:
        alpha = spread(server.alpha, clients.total) if self.uses_elbo else None
        reply = clients.map(self.train, ToEach(Download(server.models, alpha)))
        alike, present = self.similarities(reply, clients), clients.positions
        mixed = separate_federation(reply.model, torch.softmax(self.tau * alike, dim=-1))
        models, factors = put(server.models, present, mixed), server.alpha
        if reply.mean is not None:  # α̃: the posterior mean, given the clients' means
            count = len(reply.mean) + self.factor_variance / self.alpha_variance
            factors = reply.mean.sum(0).flatten() / count
        return Server(models, factors, put_pairs(server.similarity, present, alike))

    def diagnostics(self, server: Server) -> Mapping[str, Tensor]:
        return mixing_of(server.similarity, self.tau)

    @client_step
    def train(
        self, graph: Graph, received: Download, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Train classifier, encoder and the latent parameters; describe the client by q."""
        state = state or Private(self._latent(received), None)
        start = {"model": received.model, "latent": state.latent}
        loss = partial(self.whole_loss, received.alpha)
        params, moments = self.fit(graph, start, state.moments, key, loss=loss)
        described = self.describe(params, graph, fold(key, "statistics"))
        return Update(params["model"], *described), Private(params["latent"], moments)

    def whole_loss(
        self, alpha: Tensor | None, params: Tree, graph: Graph, key: Tensor | None
    ) -> Tensor:
        """Cross entropy and, if it is used, the ELBO."""
        # Detaching what a loss must not train makes one Adam's steps those of one Adam for each.
        model, net = params["model"], self.disengcn
        h = net.embed(model, graph, key)
        if not self.uses_elbo:
            return cross_entropy(net.logits(model, h, graph), graph)
        assert alpha is not None
        read = h.detach() if self.trains_encoder == "elbo" else h
        error = cross_entropy(net.logits(model, read, graph), graph)
        return error + self.elbo_weight * self.negative_elbo(params["latent"], alpha, h, graph, key)

    def negative_elbo(
        self, latent: Tree, alpha: Tensor, h: Tensor, graph: Graph, key: Tensor | None
    ) -> Tensor:
        """Eq. 6 with its sign turned and divided by N², or with means (`elbo_sums`)."""
        mean, log_variance = self.posterior(latent, h, graph, key)
        z, draw = mean, None
        if key is not None:
            noise = vgae.node_normal(fold(key, "z"), graph.ids, mean.shape[-1], mean.dtype)
            z, draw = mean + torch.exp(0.5 * log_variance) * noise, fold(key, "pairs")
        edges = graph.sparse_view("neighbours")
        error = vgae.adjacency_loss(edges, z, graph.real, graph.ids, draw, self.pairs)
        centre, width = torch.zeros_like(alpha), 0.0
        tie = centre.sum()
        if self.hierarchy:
            centre, width = latent["alpha"], math.log(self.factor_variance)
            # What ties α̂ to α̃, and its prior.
            code = self.prior == "code"
            wide = width if code else math.log(self.alpha_variance)
            tie = vgae.gaussian_kl(centre, torch.full_like(centre, width), alpha, wide).sum()
            tie = tie + vgae.log_normal(centre).sum() * (1 if code else -1)
        each = vgae.gaussian_kl(mean, log_variance, centre, width) * graph.real.unsqueeze(-1)
        nodes = graph.real.sum()
        if self.elbo_sums == "sum":
            return error + (each.sum() + tie) / nodes**2
        return error + (each.sum() / nodes + tie) / self.disengcn.hidden

    def posterior(
        self, latent: Tree, h: Tensor, graph: Graph, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """μ and log σ² of every node, (N, K * h)."""
        net, second = self.disengcn, "encoder" in latent
        mean = log_variance = net.head(h, graph, key, "mean")
        if second:
            h = net.embed(latent, graph, None if key is None else fold(key, "sigma"))
        if second or key is not None:  # with a key, their dropout differs
            log_variance = net.head(h, graph, key, "log-variance")
        if "scale" in latent:
            log_variance = log_variance * latent["scale"] + latent["shift"]
        return mean, log_variance

    def describe(
        self, params: Tree, graph: Graph, key: Tensor
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The client's q: means over its nodes, (K, h) each."""
        if not self.inference:
            return None, None
        noise = key if self.statistics == "code" and self.epochs == 1 else None
        h = self.disengcn.embed(params["model"], graph, noise)
        share = graph.real / graph.real.sum()
        mean, log_variance = self.posterior(params["latent"], h, graph, noise)
        shape = (self.disengcn.factors, self.disengcn.hidden)
        return (share @ mean).reshape(shape), (share @ log_variance).reshape(shape)

    def similarities(self, reply: Update, clients: Clients) -> Tensor:
        """S among the participants, (K, P, P); one without inference: all clients are alike."""
        if reply.mean is None or reply.log_variance is None:
            bias: Tensor = reply.model["encoder"]["bias"]
            return bias.new_ones(self.disengcn.factors, len(clients), len(clients))
        found = []
        for k, q in enumerate(zip(reply.mean.unbind(1), reply.log_variance.unbind(1), strict=True)):
            draws = (*q, fold(clients.key, "js", k), self.samples)
            moments = self.js == "moments"
            found.append(vgae.js_of_moments(*q) if moments else vgae.js_by_sampling(*draws))
        return (1 - torch.stack(found) / math.log(2)).to(reply.mean.dtype)

    def _latent(self, received: Download) -> dict[str, Tree]:
        """α̂ starts at α̃, the variance head at the identity, its encoder at the received one."""
        if (alpha := received.alpha) is None:
            return {}
        own: dict[str, dict[str, Tree]] = {
            "separate": {"scale": torch.ones_like(alpha), "shift": torch.zeros_like(alpha)},
            "two-encoders": {"encoder": received.model["encoder"]},
        }
        return ({"alpha": alpha} if self.hierarchy else {}) | own.get(self.heads, {})


def separate_federation(models: Tree, beta: Tensor) -> Tree:
    """Each client's own mixture of the stacked models of a DisenGCN, (P, ...), factor by factor.

    `beta` has a matrix for each factor, (K, P, P), whose rows add up to one.
    """
    encoder, classifier, factors = models["encoder"], models["classifier"], len(beta)
    blocks = zip(
        encoder["weight"].chunk(factors, dim=-1),
        encoder["bias"].chunk(factors, dim=-1),
        classifier["weight"].chunk(factors, dim=-2),
        strict=True,
    )
    mixed = [mix(block, matrix) for block, matrix in zip(blocks, beta, strict=True)]
    weight, bias, reading = zip(*mixed, strict=True)
    common = spread(average(classifier["bias"]), beta.shape[-1])
    return {
        "encoder": {"weight": torch.cat(weight, dim=-1), "bias": torch.cat(bias, dim=-1)},
        "classifier": {"weight": torch.cat(reading, dim=-2), "bias": common},
    }
