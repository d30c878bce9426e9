"""FedSage+: FedSage on graphs mended with generated neighbours (Zhang et al., 2021).

Each client hides a share of its nodes (neither training nor test ones) from itself. For a node v
that it keeps, n_v neighbours are hidden, X_v their features, and a private generator (NeighGen)
learns to make them up: n̂_v of them, the first a_v = min(⌊n̂_v⌋, p_max) of p_max features x̂_v.

    L_d = mean_v smoothL1(n̂_v, n_v)
    L_f = mean_{v,p} [p < a_v] min_k mean_dim (x̂_v^p - X_v^k)²         k < min(n_v, p_max)
    1. alone       encoder, generator and a classifier minimise λ_d L_d + λ_f L_f + λ_c CE, the
                   classifier on the mended graph without the hidden nodes
    2. together    x̂ alone goes on to  (L_f + Σ_{j≠i} L_f with neighbours of random nodes of j) / K
    3. mending     every node of the whole graph gets its a_v neighbours, joined both ways
    4. FedSage     θ <- mean_i θ_i, each θ_i trained on the mended graph

Steps 1 and 2 are `generator_rounds` rounds, `generator_epochs` epochs and `exchanges` exchanges in
each; the classifier trains from the last of these rounds on, which by default is the first, so that
all rounds train it. Before that the initial classifier is deployed, and a client that has not
mended its graph predicts on it as it is. Who misses steps 1 and 2 learns alone before it mends.

Step 2 sends neither generator nor features: client i shows x̂ of some nodes, the others return the
gradient by it, and client i propagates it back through its generator: the same gradient, by the
chain rule, as the published form, where generator and embeddings travel.

Wire, per client and round:  down  model      up  model (and one weight);   in the first rounds, for
each exchange:  up  x̂ of `exchanged_nodes` nodes, down those of all, up gradients by them, down the
sum of its own. A gradient is 2 (x̂ - x) / D: who holds x̂, as the server does, can solve it for x.
The published form hides no more (a gradient of the last layer by weights is Σ_v h_v ⊗ this one).
Private state: the generator; after mending its noise and the moments of the classifier.
Floats per client and round: 2P + 1; an exchange 2 (K + 1) X for K participants and
X = exchanged_nodes · p_max · D (Cora: 0.46 M; the published form moves 2 K · 15.2 M).
Memory: mending is repeated when it is needed, N · p_max · D floats (Cora 78 MB, PubMed 197 MB), so
that nothing private has a node axis; training holds four times the generator for every client.
Departures from the reference code: a true minimum (the code ends at the last candidate); made nodes
are heard, and all nodes get them, also the hidden ones; noise is drawn once; L_d and L_f over all
kept nodes, as in the paper, not over training nodes; both optimizers start afresh in a phase;
labels and features of others are never read. `compat` gives the faults back: `last` candidate,
`one-directional` edges, which nobody hears, or both (`openfgl`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.errors import ConfigError
from atoll.core.fit import fit
from atoll.core.graph import Graph, Sparse, View
from atoll.core.losses import cross_entropy, masked_mean
from atoll.core.message import ToAll, ToEach
from atoll.core.method import Clients, Method, client_step
from atoll.core.mix import average, put
from atoll.core.optim import Adam, Optimizer
from atoll.core.random import fold
from atoll.core.tree import Empty, Tree, record
from atoll.nn.neighgen import (
    Made,
    NeighGen,
    made_neighbours,
    mended_sage,
    random_order,
    some_neighbours,
)
from atoll.nn.ops import at_columns, row_sum
from atoll.nn.sage import GraphSAGE
from atoll.nn.vgae import node_normal

SHOWN = "other clients answer with the gradient of their feature loss; generated, never real rows"
ANSWERED = "the owner of the shown features propagates it back through its generator"


@record
class Update:
    """What leaves a client when it trains the classifier."""

    model: Tree
    weight: Tensor


@record
class Shown:
    """Generated features, (M, p, D); zero where a slot is not used."""

    x: Tensor


@record
class Answer:
    """Gradients by what all participants showed, (K, M, p, D)."""

    slopes: Tensor


@record
class Pull:
    """The sum of the others' answers, (M, p, D), and 1 / K."""

    slopes: Tensor
    share: Tensor


@record
class Learning:
    """What a client keeps while its generator trains.

    Attributes:
        generator: NeighGen and a classifier.
        seed: Key of the hidden nodes and of the noise of mending.
        shown: Key of the nodes and of the noise last shown.
        moments: Of the part `features`, while it trains together with others.
    """

    generator: Tree
    seed: Tensor
    shown: Tensor
    moments: Tree


@record
class Mended:
    """What a client keeps afterwards; `moments` are those of the shared classifier."""

    generator: Tree
    seed: Tensor
    moments: Tree


@record
class Lost:
    """What the generator should find.

    Attributes:
        kept: One for nodes that are not hidden, (N,).
        count: Hidden neighbours of each node, (N,).
        index: Some of them, (N, p).
        there: Which of these exist, (N, p).
    """

    kept: Tensor
    count: Tensor
    index: Tensor
    there: Tensor


@dataclass(frozen=True)
class FedSagePlus(Method):
    """Federated GraphSAGE with missing-neighbour generation."""

    optimizer: Optimizer = Adam()
    epochs: int = 3
    weight_by: Literal["nodes", "train", "uniform"] = "uniform"
    optimizer_state: Literal["keep", "reset"] = "keep"
    generator_rounds: int = 1
    generator_epochs: int = 20
    generator_lr: float = 1e-3
    exchanges: int = 20
    exchanged_nodes: int = 64
    hide: float = 0.5
    p_max: int = 5
    latent: int = 128
    narrow: int = 256
    wide: int = 2048
    lam_d: float = 1.0
    lam_f: float = 1.0
    lam_c: float = 1.0
    compat: Literal["none", "last", "one-directional", "openfgl"] = "none"

    paper: ClassVar[str] = (
        "Zhang et al., Subgraph Federated Learning with Missing Neighbor Generation, NeurIPS 2021"
    )
    nets: ClassVar[tuple[str, ...]] = ("sage",)

    def __post_init__(self) -> None:
        if not isinstance(self.net, GraphSAGE):
            raise ConfigError("fedsage+ trains a GraphSAGE; use --set net=sage")
        for name in ("generator_rounds", "exchanged_nodes", "p_max", "latent", "narrow", "wide"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        for name in ("generator_epochs", "exchanges"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or more")
        if not 0 < self.hide < 1:
            raise ConfigError(f"hide is {self.hide}; give a share between 0 and 1")

    @property
    def sage(self) -> GraphSAGE:
        """The classifier."""
        assert isinstance(self.net, GraphSAGE)
        return self.net

    @property
    def neighgen(self) -> NeighGen:
        """The generator."""
        return NeighGen(
            self.sage.features, self.sage.hidden, self.latent, self.narrow, self.wide, self.p_max
        )

    @property
    def views(self) -> Mapping[str, View]:
        return {**self.net.views, "rows": _dense_features}

    def init(self, clients: Clients) -> Tree:
        return self.net.init(clients.key)

    def round(self, server: Tree, clients: Clients) -> Tree:
        if clients.round < self.generator_rounds:
            self._train_generators(clients)
        if clients.round < self.generator_rounds - 1:
            return server
        reply = clients.map(self.train, ToAll(server))
        return average(reply.model, weight=reply.weight)

    def _train_generators(self, clients: Clients) -> None:
        shown = clients.map(self.learn, ToAll(Empty())).x
        share = shown.new_full((clients.total,), 1 / len(clients))
        for _ in range(self.exchanges):
            slopes = clients.map(self.answer, ToAll(shown)).slopes
            others = slopes.sum(0) - slopes.diagonal().movedim(-1, 0)  # nobody answers itself
            rows = put(
                others.new_zeros(clients.total, *others.shape[1:]), clients.positions, others
            )
            shown = clients.map(self.pull, ToEach(Pull(rows, share))).x

    def deploy(self, server: Tree) -> ToAll:
        return ToAll(server)

    def predict(
        self, graph: Graph, message: Tree, state: Tree, key: Tensor | None = None
    ) -> Tensor:
        if not isinstance(state, Mended):
            return self.net(message, graph, key)
        made = self.mend(graph, state.generator, state.seed)
        return mended_sage(self.sage, message, graph, graph.real, made, key)

    @client_step(discloses={"x": SHOWN})
    def learn(
        self, graph: Graph, nothing: Tree, state: Learning | None, key: Tensor
    ) -> tuple[Shown, Learning]:
        """Train the generator alone, and show what it makes."""
        state = self._learned(graph, state, key)
        return Shown(self._show(graph, state)), state

    @client_step(discloses={"slopes": ANSWERED}, keeps_state=True)
    def answer(self, graph: Graph, shown: Tensor, state: Tree, key: Tensor) -> Answer:
        """The gradient of the feature loss with neighbours of random nodes of this client."""
        index, there = some_neighbours(fold(key, "neighbours"), graph, graph.real, self.p_max)
        order = random_order(fold(key, "nodes"), graph, there[:, 0])
        turn = torch.arange(shown.shape[1], device=order.device)
        nodes = order[turn.remainder(there[:, 0].sum().clamp(min=1).long())]
        gaps = self._gaps(shown, _rows(graph)[index[nodes]], there[nodes])
        # A slot that its owner does not use is zero, and nothing is told about it.
        asked = (shown != 0).any(-1, keepdim=True) & (there[nodes, 0] > 0)[:, None, None]
        return Answer(torch.where(asked, gaps * (2 / shown.shape[-1]), torch.zeros_like(gaps)))

    @client_step(discloses={"x": SHOWN})
    def pull(
        self, graph: Graph, message: Pull, state: Learning, key: Tensor
    ) -> tuple[Shown, Learning]:
        """One step of the features' generator by the answers and the own loss; show the next."""
        lost = self._lost(graph, state.seed)
        nodes, mask, z, used = self._drawn(graph, state, lost)
        weight = used * (mask * lost.there[nodes, 0]).unsqueeze(-1)
        weight = weight / (mask.sum().clamp(min=1) * self.p_max)
        true, there = _rows(graph)[lost.index[nodes]], lost.there[nodes]

        def loss(layers: Tree, key: Tensor) -> Tensor:
            made = self.neighgen.make(layers, z)
            own = (self._gaps(made, true, there) ** 2).mean(-1)
            others = (made * message.slopes).sum(-1)
            return self.lam_f * message.share * (weight * (own + others)).sum()

        layers, moments = fit(loss, state.generator["features"], self._adam, state.moments, 1, key)
        state = Learning({**state.generator, "features": layers}, state.seed, key, moments)
        return Shown(self._show(graph, state)), state

    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> tuple[Update, Mended]:
        """Mend the graph, and minimise the cross entropy on it from the received model."""
        if state is None:
            state = self._learned(graph, None, key)
        if isinstance(state, Learning):
            parts = {name: state.generator[name] for name in ("encoder", "degree", "features")}
            state = Mended(parts, state.seed, None)
        made = self.mend(graph, state.generator, state.seed)

        def loss(params: Tree, key: Tensor) -> Tensor:
            logits = mended_sage(self.sage, params, graph, graph.real, made, key)
            return cross_entropy(logits, graph)

        moments = state.moments if self.optimizer_state == "keep" else None
        model, moments = fit(loss, model, self.optimizer, moments, self.epochs, key)
        update = Update(model, graph.size(self.weight_by))
        return update, Mended(state.generator, state.seed, moments)

    def mend(self, graph: Graph, generator: Tree, seed: Tensor) -> Made:
        """Generated neighbours of every node of the whole graph; the same for the same seed."""
        z, lost = self.neighgen.encode(generator, graph, graph.real)
        x = self.neighgen.make(generator["features"], z + self._noise(seed, graph.ids, z))
        return self._joined(x, self.neighgen.used(lost))

    def _joined(self, x: Tensor, used: Tensor) -> Made:
        """Made nodes with edges in both directions; the fault's edges lead away from real nodes."""
        return made_neighbours(
            x, used * 0 if self.compat in ("one-directional", "openfgl") else used
        )

    def _learned(self, graph: Graph, state: Learning | None, key: Tensor) -> Learning:
        """The generator after some epochs alone."""
        if state is None:
            start = self.neighgen.init(fold(key, "generator"))
            start["classifier"] = self.net.init(fold(key, "classifier"))
            state = Learning(start, key, key, None)
        lost = self._lost(graph, state.seed)
        true = _rows(graph)[lost.index]

        def loss(params: Tree, key: Tensor) -> Tensor:
            z, count = self.neighgen.encode(params, graph, lost.kept)
            x = self.neighgen.make(params["features"], z + self._noise(key, graph.ids, z))
            used = self.neighgen.used(count)
            made = self._joined(x, used)
            logits = mended_sage(self.sage, params["classifier"], graph, lost.kept, made, key)
            return (
                self.lam_d * degree_loss(count, lost.count, lost.kept)
                + self.lam_f * self.feature_loss(x, true, used, lost.there, lost.kept)
                + self.lam_c * cross_entropy(logits, graph)
            )

        generator, _ = fit(loss, state.generator, self._adam, None, self.generator_epochs, key)
        return Learning(generator, state.seed, key, None)

    def _show(self, graph: Graph, state: Learning) -> Tensor:
        """What others may see: generated features of the drawn nodes that have lost neighbours."""
        lost = self._lost(graph, state.seed)
        nodes, mask, z, used = self._drawn(graph, state, lost)
        seen = used * (mask * lost.there[nodes, 0]).unsqueeze(-1)
        return self.neighgen.make(state.generator["features"], z) * seen.unsqueeze(-1)

    def _drawn(
        self, graph: Graph, state: Learning, lost: Lost
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Drawn nodes (M,), which of them are not padding, their noisy z, and their used slots."""
        order = random_order(fold(state.shown, "nodes"), graph, lost.kept)
        turn = torch.arange(self.exchanged_nodes, device=order.device)
        nodes = order[turn.remainder(order.shape[0])]
        z, count = self.neighgen.encode(state.generator, graph, lost.kept)
        z = z[nodes] + self._noise(state.shown, graph.ids[nodes], z)
        mask = (turn < lost.kept.sum()).to(z.dtype)
        return nodes, mask, z, self.neighgen.used(count[nodes])

    def _lost(self, graph: Graph, seed: Tensor) -> Lost:
        """Hide some nodes; the same ones for the same seed."""
        may = graph.real * (1 - graph.train) * (1 - graph.test)
        order = random_order(fold(seed, "hide"), graph, may)
        hidden = may * (torch.argsort(order) < torch.round(self.hide * may.sum())).to(may.dtype)
        adjacency = graph.views["mean"]
        assert isinstance(adjacency, Sparse)
        edges = at_columns(adjacency, hidden.unsqueeze(-1)) * (adjacency.values != 0).unsqueeze(-1)
        index, there = some_neighbours(fold(seed, "lost"), graph, hidden, self.p_max)
        kept = graph.real - hidden
        return Lost(kept, row_sum(adjacency, edges).squeeze(-1), index, there)

    def feature_loss(
        self, made: Tensor, true: Tensor, used: Tensor, there: Tensor, mask: Tensor
    ) -> Tensor:
        """L_f over nodes with mask one: made (n, p, D), used (n, p), true (n, k, D), there (n, k)."""
        gaps = (self._gaps(made, true, there) ** 2).mean(-1)
        return masked_mean((gaps * used * there[:, :1]).mean(-1), mask)

    def _gaps(self, made: Tensor, true: Tensor, there: Tensor) -> Tensor:
        """Made features (..., n, p, D) less the candidate that L_f compares each with."""
        last = self.compat in ("last", "openfgl")
        best = last_candidate(made, there) if last else nearest_candidate(made, true, there)
        true = true.expand(*made.shape[:-2], *true.shape[-2:])
        return made - true.gather(-2, best.unsqueeze(-1).expand(made.shape))

    def _noise(self, key: Tensor, ids: Tensor, like: Tensor) -> Tensor:
        return node_normal(fold(key, "noise"), ids, self.latent, like.dtype)

    @property
    def _adam(self) -> Adam:
        return Adam(lr=self.generator_lr, weight_decay=1e-4)


def degree_loss(guess: Tensor, count: Tensor, mask: Tensor) -> Tensor:
    """L_d over nodes with mask one."""
    return masked_mean(functional.smooth_l1_loss(guess, count, reduction="none"), mask)


def nearest_candidate(made: Tensor, true: Tensor, there: Tensor) -> Tensor:
    """The candidate at the least distance from each made node, (..., n, p)."""
    fixed = made.detach()
    # |made|² is the same for all candidates.
    apart = true.square().sum(-1).unsqueeze(-2) - 2 * fixed @ true.transpose(-1, -2)
    return torch.where(there.unsqueeze(-2) > 0, apart, torch.inf).argmin(-1)


def last_candidate(made: Tensor, there: Tensor) -> Tensor:
    """The last candidate, for each made node, (..., n, p): where the released loop ends."""
    last = (there.sum(-1).long() - 1).clamp(min=0)
    return last.unsqueeze(-1).expand(made.shape[:-1])


def _dense_features(graph: Graph) -> Tensor:
    return graph.x if isinstance(graph.x, Tensor) else graph.x.to_dense()


def _rows(graph: Graph) -> Tensor:
    rows = graph.views["rows"]
    assert isinstance(rows, Tensor)
    return rows
