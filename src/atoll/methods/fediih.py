"""FedIIH: similar clients share more, factor by factor (Yu et al., 2025).

    H = encoder(X, A)      K factors side by side; a linear classifier reads H.
    μ, log σ²              Two heads on H: q_i = N(μ_i, σ_i²) for every node i.
    q_m = N(mean_i μ_i, exp(mean_i log σ_i²))      Client m sends it for every factor.
    S^k_mj = 1 - JS(q_m^k, q_j^k) / ln 2,   β^k_m = softmax_j(τ S^k_mj).
    θ_m^k <- Σ_j β^k_mj θ_j^k.     All weights of factor k, in encoder and classifier.
                                   The classifier's bias: plain mean.
    α̃^k = Σ_m mean μ_m^k / (M + σ²_H / σ²_α).      The global factors, for M participants.
    -ELBO = BCE(A, z zᵀ) + KL(q ‖ N(α̂_m, σ²_H))
            + KL(N(α̂_m, σ²_H) ‖ N(α̃, σ²_α)) - log N(α̂_m; 0, 1).
    z is drawn from q, and α̂_m is the client's own copy of α̃.
    σ²_H is `factor_variance`, σ²_α is `alpha_variance`.

`trains_encoder`: in the paper's Algorithm 1 the cross entropy trains the classifier and the ELBO
trains the encoder ("elbo"). In the public code the ELBO's optimizer holds only α̂, which no other
part reads. Cross entropy therefore trains everything ("ce"; without the ELBO the numbers are the
same). "both" adds the two losses. With "elbo" and "both", BCE uses all edges and, per node, `pairs`
random pairs (0: all pairs).
`heads`: in the code both heads are one function, so log σ² = μ except for dropout ("shared").
"separate" gives log σ² a scale and a shift per dimension. Then it can reach log σ²_H, which the
code's rows of length one cannot. "two-encoders" gives log σ² its own encoder: the second DisenGCN
of Eq. 7. Both variants start as the code's head. Only the ELBO trains their additional parameters,
and Eq. 10 does not share these.
`js`: the code's surrogate averages moments and can exceed ln 2 ("moments"). "monte-carlo" estimates
the divergence itself. `elbo_sums`: "sum" is Eq. 6 divided by N²; "mean" averages each term over its
own axes, as in the code. `prior`: the code adds log N(α̂) to the loss, and its ELBO has σ²_H
instead of σ²_α. `statistics`: the code's q has dropout only if `epochs` is 1.

Wire, per client and round:  down  model (and α̃ for the ELBO)      up  model, mean, log_variance
Private state: Adam's moments; for the ELBO also α̂ and the variance head. z never leaves.
Floats per client and round: 2P + 2Kh for P parameters and K factors of width h; Kh more for α̃.
Departures from the reference code: α̃ and α̂ start at zero, not at random. One Adam takes the steps
of both losses, so after the first epoch the classifier reads that epoch's encoder. Eq. 6 prints
N(α̃, ·) as the prior of q, which would disconnect α̂. Here it is N(α̂, ·), as in the code.
Ablations, which the paper names but does not define: `hierarchy=false` has the prior N(0, 1) and no
α, which matters only for the ELBO. `inference=false` has no q, hence equal weights and no ELBO.
`disentangle=false` has one factor with the width of all.
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
    """The server's tree: M stacked models, α̃, (K * h,), and the latest S, (K, M, M)."""

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
    """The reply of a client: its model and the parameters of q, (K, h) each, or None."""

    model: Tree
    mean: Tensor | None
    log_variance: Tensor | None


@record
class Private:
    """The private state: α̂ and the variance head (empty without the ELBO), Adam's moments."""

    latent: Tree
    moments: Tree


@dataclass(frozen=True)
class FedIIH(Mixing):
    """Mix the clients' models factor by factor, according to their similarity."""

    net: DisenGCN
    optimizer: Optimizer = Adam(lr=0.01, weight_decay=1e-6)
    epochs: Epochs = 1
    tau: Sharpness = 10.0
    trains_encoder: Annotated[Literal["ce", "elbo", "both"], "losses that train the encoder"] = "ce"
    heads: Annotated[Literal["shared", "separate", "two-encoders"], "parts of log σ²"] = "shared"
    js: Annotated[Literal["moments", "monte-carlo"], "how the divergence is computed"] = "moments"
    prior: Annotated[Literal["paper", "code"], "source of the terms between α̂ and α̃"] = "paper"
    elbo_sums: Annotated[Literal["sum", "mean"], "sums or means over nodes in the ELBO"] = "sum"
    elbo_weight: Annotated[float, "weight of the ELBO"] = 1.0
    statistics: Annotated[
        Literal["no-dropout", "code"], "whether q has dropout when it is sent"
    ] = "no-dropout"
    pairs: Annotated[ZeroOrMore, "random pairs per node in the ELBO; 0 for all pairs"] = 0
    samples: Annotated[OneOrMore, "samples of a Monte Carlo divergence"] = 512
    factor_variance: Annotated[Positive, "variance of a factor around α̂"] = 0.25
    alpha_variance: Annotated[Positive, "variance of α̂ around α̃"] = 1.0
    hierarchy: Annotated[bool, "ablation: whether α exists"] = True
    inference: Annotated[bool, "ablation: whether q exists"] = True
    disentangle: Annotated[bool, "ablation: whether the network has several factors"] = True

    space = USUAL | {
        "hidden": OneOf((32, 64, 128)),
        "tau": Real(1, 50, log=True),
        "factors": OneOf((1, 2, 4, 6, 8, 10)),
        "routing": Whole(1, 6),
        "iterations": Whole(2, 7),
    }
    # All values in the tables of its appendix, and the numbers of factors in its code.
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
        # Algorithm 1 and Eqs. 5 to 11 as written. On Cora they learn little more than each
        # client's majority class. The defaults learn; they differ from the code in q's dropout.
        paper=("elbo", "separate", "monte-carlo", "paper", "sum", "no-dropout"),
        # The computation of the public code.
        reference=("ce", "shared", "moments", "code", "mean", "code"),
    )

    @property
    def disengcn(self) -> DisenGCN:
        """The network. Without disentangling it has one factor of the same total width."""
        return self.net if self.disentangle else replace(self.net, factors=1, hidden=self.net.width)

    @property
    def uses_elbo(self) -> bool:
        """Whether the ELBO trains any parameter."""
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
        """Train classifier, encoder and latent parameters. Reply with the model and q."""
        state = state or Private(self._latent(received), None)
        start = {"model": received.model, "latent": state.latent}
        loss = partial(self.whole_loss, received.alpha)
        params, moments = self.fit(graph, start, state.moments, key, loss=loss)
        described = self.describe(params, graph, fold(key, "statistics"))
        return Update(params["model"], *described), Private(params["latent"], moments)

    def whole_loss(
        self, alpha: Tensor | None, params: Tree, graph: Graph, key: Tensor | None
    ) -> Tensor:
        """Return the cross entropy plus, if the ELBO is used, its negative with a weight."""
        # With `detach`, one Adam takes the same steps as a separate Adam for each loss.
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
        """Return the negative ELBO: Eq. 6 divided by N², or with means (`elbo_sums`)."""
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
            # The terms between α̂ and α̃, and the prior of α̂.
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
        """Return μ and log σ² of every node, (N, K * h) each."""
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
        """Return the client's q: means of μ and log σ² over its nodes, (K, h) each, or None."""
        if not self.inference:
            return None, None
        noise = key if self.statistics == "code" and self.epochs == 1 else None
        h = self.disengcn.embed(params["model"], graph, noise)
        share = graph.real / graph.real.sum()
        mean, log_variance = self.posterior(params["latent"], h, graph, noise)
        shape = (self.disengcn.factors, self.disengcn.hidden)
        return (share @ mean).reshape(shape), (share @ log_variance).reshape(shape)

    def similarities(self, reply: Update, clients: Clients) -> Tensor:
        """Return S among n participants, (K, n, n). Without inference all entries are one."""
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
        """Return the initial private parameters, or {} without the ELBO.

        α̂ starts at α̃, the variance head at the identity, and its encoder at the received encoder.
        """
        if (alpha := received.alpha) is None:
            return {}
        own: dict[str, dict[str, Tree]] = {
            "separate": {"scale": torch.ones_like(alpha), "shift": torch.zeros_like(alpha)},
            "two-encoders": {"encoder": received.model["encoder"]},
        }
        return ({"alpha": alpha} if self.hierarchy else {}) | own.get(self.heads, {})


def separate_federation(models: Tree, beta: Tensor) -> Tree:
    """Mix the stacked models of n DisenGCNs, (n, ...), factor by factor for each client.

    `beta` contains one matrix per factor, (K, n, n), whose rows sum to one.
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
