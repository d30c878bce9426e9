"""FedSage+: FedSage on graphs mended with generated neighbours (Zhang et al., 2021).

A client hides a share of its nodes without a training or test role from itself. A kept node v then
lacks n_v neighbours with features X_v. A private generator (NeighGen) learns to replace them. From
v's embedding it predicts their number n̂_v, and with noise it generates features x̂_v in p_max
slots. The first a_v = min(⌊n̂_v⌋, p_max) slots are used.

    L_d = mean_v smoothL1(n̂_v, n_v).
    L_f = mean_{v,p} [p < a_v] min_k mean_dim (x̂_v^p - X_v^k)².
    learn   A generator and a classifier minimise λ_d L_d + λ_f L_f + λ_c CE.
    pull    The generator's x̂ then minimise  λ_f (L_f + Σ_{j≠i} L_f^j) / K  for K participants.
    mend    Every node gets its a_v neighbours, connected in both directions.
    train   FedSage on the mended graphs:  θ <- mean_i θ_i.

X_v are up to p_max hidden neighbours of v; in L_f^j they are neighbours of a random node of client
j. CE is the classifier's loss on the mended graph without hidden nodes; `mend` also mends hidden
nodes. `learn` (`generator_epochs` epochs) and `pull` (`exchanges` times) run in the first
`generator_rounds` rounds. `train` runs in the last of these and in all later rounds. By default the
first round does all three, and every round trains the classifier. Before `train` first runs, the
initial classifier is deployed. Until a client has mended its graph, it predicts on the given graph.
A client that missed the first rounds learns without the others before it trains.

In an exchange, client i sends x̂ of some kept nodes, and the others return the gradient with
respect to x̂. Client i propagates the sum back through its generator. By the chain rule this is the
gradient of the published form, which sends whole generators and embeddings. The gradient is 2 (x̂ -
x) / D, so a party that has x̂ can solve it for a row x of features. Client i gets only the sum over
the others, but the server sees each gradient. The published form hides no more. Let h_v be
the generator's last hidden layer at node v, of width `wide`. The gradient with respect to the
generator's last weights is Σ_v h_v ⊗ (the gradient above). A party that knows all h_v can solve
this sum too, if there are fewer nodes than `wide`.

Wire, per client and round:  down  model      up  model (and one weight).
In each exchange, up x̂ of `exchanged_nodes` nodes, down the x̂ of all clients, up the gradients
with respect to them, down the sum for the client's own x̂. The server omits most unused slots.
Private state: the generator and the key of its noise, later also the classifier's moments.
Floats per client and round: 2P + 1 for P parameters. An exchange adds at most 2 (K + 1) F for K
participants, where F = exchanged_nodes · p_max · D. On Cora F is 0.46 M, and the published form
takes 2K · 15.2 M. The server then holds K² F floats. On Cora it forwards a tenth of the slots.
Departures from the reference code: L_f uses the nearest candidate (the released loop keeps the last
one). Real nodes read generated nodes. All nodes are mended, not only kept ones. The noise of
the mended graph is drawn once. L_d and L_f use all kept nodes, as in the paper, not only training
nodes. n̂ starts near one, because a ReLU that starts at zero stays there. The generator is 256
wide; `preset=paper` has 2048 (Cora, 10 clients: up to 5.4 GB instead of 2.0, a third of the speed).
No private state has a node axis, because the mended graph is derived from the state. A CPU computes
only the used slots (Cora: one in thirty), and the engine `fused` caches them for later rounds. If
they are too many, or on a GPU, every step mends the graph again. A GPU computes all slots, N ·
p_max · D floats (Cora 78 MB, PubMed 197 MB).
`compat` repeats faults of public codes. With `last`, L_f keeps the last candidate. With
`one-directional`, no real node reads a generated one, so FedSage+ equals FedSage. `openfgl` repeats
both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from atoll.core import hyper
from atoll.core.aggregate import Aggregate, Mean, Update, put
from atoll.core.fit import fit
from atoll.core.graph import Graph, View
from atoll.core.message import ToAll, ToEach
from atoll.core.method import Clients, client_step
from atoll.core.optim import Adam
from atoll.core.random import fold
from atoll.core.space import USUAL, Presets, Real
from atoll.core.training import Averaging
from atoll.core.tree import Empty, Tree, record
from atoll.nn import neighgen as parts
from atoll.nn.neighgen_slots import Places, used_places
from atoll.nn.nets import GraphSAGE
from atoll.nn.vgae import node_normal

SHOWN = "other clients answer with the gradient of their feature loss; generated, never real rows"
WHOLE = "fedsage+ mends the whole graph"
ANSWERED = (
    "the owner of the shown features propagates it back through its generator; with the shown "
    "features it can be solved for real ones"
)


@record
class Shown:
    """Generated features of M nodes with p slots each, (M, p, D). Unused slots are zero."""

    x: Tensor


@record
class Answer:
    """Gradients with respect to the features of all participants, (K, M, p, D)."""

    slopes: Tensor


@record
class Pull:
    """The message of `pull`: the sum of the others' answers, (M, p, D), and 1 / K."""

    slopes: Tensor
    share: Tensor


@record
class Learning:
    """The private state while the generator trains."""

    generator: Tree  # NeighGen and a classifier
    seed: Tensor  # key of the hidden nodes and of the noise of mending
    shown: Tensor  # key of the nodes and of the noise of the latest `Shown`
    moments: Tree  # of the part `features`, while clients exchange gradients


@record
class Mended:
    """The private state once the client has mended its graph. `moments` are the classifier's."""

    generator: Tree
    seed: Tensor
    moments: Tree


@record
class Seen:
    """Values that are constant during exchanges: hidden nodes, and the encoder's output."""

    lost: parts.Lost
    z: Tensor  # (N, latent)
    count: Tensor  # n̂, (N,)


class Sample(NamedTuple):
    """Kept nodes whose generated features a client sends."""

    nodes: Tensor  # their numbers, (M,)
    z: Tensor  # their embeddings, with noise, (M, latent)
    used: Tensor  # one for used slots of nodes that have lost neighbours, (M, p)
    size: Tensor  # the number of nodes; the rest of M is padding, whose slots are unused
    places: Places | None  # the used slots among M, or None if all slots are computed


@dataclass(frozen=True)
class FedSagePlus(Averaging):
    """Federated GraphSAGE with missing-neighbour generation."""

    net: GraphSAGE
    weight_by: hyper.WeightBy = "uniform"
    optimizer_state: hyper.OptimizerState = "keep"
    generator_rounds: Annotated[hyper.OneOrMore, "rounds in which generators train"] = 1
    generator_epochs: Annotated[hyper.ZeroOrMore, "epochs of a generator before exchanges"] = 20
    generator_lr: Annotated[hyper.LearningRate, "learning rate of the generators"] = 1e-3
    exchanges: Annotated[hyper.ZeroOrMore, "exchanges of gradients per round"] = 20
    exchanged_nodes: Annotated[hyper.OneOrMore, "nodes per client in an exchange"] = 64
    hide: Annotated[
        float,
        hyper.Limits(above=0, below=1, words="a share between 0 and 1"),
        "share of nodes to hide",
    ] = 0.5
    p_max: Annotated[hyper.OneOrMore, "largest number of generated neighbours of a node"] = 5
    latent: Annotated[hyper.OneOrMore, "width of the encoder's output"] = 128
    narrow: Annotated[hyper.OneOrMore, "width of the generator's first hidden layer"] = 256
    wide: Annotated[hyper.OneOrMore, "width of the generator's second hidden layer"] = 256
    lam_d: Annotated[hyper.NonNegative, "weight of the loss of degrees"] = 1.0
    lam_f: Annotated[hyper.NonNegative, "weight of the loss of features"] = 1.0
    lam_c: Annotated[hyper.NonNegative, "weight of the classification loss"] = 1.0
    compat: Annotated[
        Literal["none", "last", "one-directional", "openfgl"], "faults of public codes to repeat"
    ] = "none"
    aggregate: Aggregate = Mean()

    space = USUAL | {
        "generator_lr": Real(1e-4, 1e-2, log=True),
        "hide": Real(0.1, 0.9),
        **dict.fromkeys(("lam_d", "lam_f", "lam_c"), Real(0.1, 10, log=True)),
    }
    paper = (
        "Zhang et al., Subgraph Federated Learning with Missing Neighbor Generation, NeurIPS 2021"
    )
    not_private = "its clients send generated features of single nodes"
    nets = ("sage",)
    made_for = (GraphSAGE, "fedsage+ trains a GraphSAGE")
    presets: ClassVar[Presets] = {"paper": {"narrow": 256, "wide": 2048}}
    repeats = ("epochs", "generator_epochs", "exchanges")

    @property
    def neighgen(self) -> parts.NeighGen:
        """The generator."""
        widths = self.net.features, self.net.hidden, self.latent, self.narrow, self.wide
        return parts.NeighGen(*widths, self.p_max)

    @property
    def views(self) -> Mapping[str, View]:
        return {**self.net.views, "rows": _dense_features}

    def round(self, server: Tree, clients: Clients) -> Tree:
        if clients.round < self.generator_rounds:
            self._train_generators(clients)
        if clients.round < self.generator_rounds - 1:
            return server
        return super().round(server, clients)

    def stage(self, round: int) -> int:
        return min(round, self.generator_rounds)

    def _train_generators(self, clients: Clients) -> None:
        shown = clients.map(self.learn, ToAll(Empty())).x
        share = shown.new_full((clients.total,), 1 / len(clients))
        for _ in range(self.exchanges):
            rows, places = parts.gathered(shown)
            slopes = clients.map(self.answer, ToAll(rows)).slopes
            others = parts.from_others(slopes, places // self.p_max)
            others = parts.given_back(others, places, shown.shape)
            if len(clients) < clients.total:
                rows = others.new_zeros(clients.total, *others.shape[1:])
                others = put(rows, clients.positions, others)
            shown = clients.map(self.pull, ToEach(Pull(others, share))).x

    @property
    def reach(self) -> None:
        return None  # the generator depends on more hops than the classifier

    def derived_from(self, state: Tree) -> Tree:
        if isinstance(state, Mended):
            return state.generator, state.seed
        if not isinstance(state, Learning):
            return None
        # Exchanges train the rest of the generator, and nothing here depends on it.
        fixed = {name: state.generator[name] for name in ("encoder", "degree")}
        return fixed, state.seed

    def derive(self, graph: Graph, part: Tree) -> parts.Made | Seen:
        generator, seed = part
        if "features" in generator:
            made = self.mend(graph, generator, seed, sparing=True)
            if made.places is not None:
                made = replace(made, places=replace(made.places, lasting=True))
            return replace(made, around=parts.surrounded(graph, graph.real, made))
        return self._seen(graph, generator, seed)

    def _seen(self, graph: Graph, generator: Tree, seed: Tensor) -> Seen:
        lost = parts.hide_nodes(seed, graph, self.hide, self.p_max)
        return Seen(lost, *self.neighgen.encode(generator, graph, lost.kept))

    def _derived(self, graph: Graph, state: Learning | Mended) -> Tree:
        kept = isinstance(graph.derived, parts.Made if isinstance(state, Mended) else Seen)
        return graph.derived if kept else self.derive(graph, self.derived_from(state))

    def predict(
        self, graph: Graph, message: Tree, state: Tree, key: Tensor | None = None
    ) -> Tensor:
        if not isinstance(state, Mended):
            return self.net(message, graph, key)
        made = self._derived(graph, state)
        return parts.mended_sage(self.net, message, graph, graph.real, made, key)

    @client_step(discloses={"x": SHOWN})
    def learn(
        self, graph: Graph, nothing: Tree, state: Learning | None, key: Tensor
    ) -> tuple[Shown, Learning]:
        """Train the generator without the other clients. Reply with generated features."""
        state = self._learned(graph, state, key)
        # Compute it again, because `graph.derived` belongs to the generator before these epochs.
        sample = self._sample(graph, self._seen(graph, state.generator, state.seed), state.shown)
        return self._show(state.generator["features"], sample), state

    @client_step(discloses={"slopes": ANSWERED}, keeps_state=True, rows=True)
    def answer(self, graph: Graph, shown: Tensor, state: Tree, key: Tensor) -> Answer:
        """Return the gradient of the shown features' loss, given neighbours of random own nodes."""
        true, there = self._strangers(graph, shown.shape[1], key)
        # The m-th nodes of all clients meet the same candidates: one product for each m.
        made = shown.movedim(1, 0).flatten(1, -2)
        # An unused slot is zero, and so is the answer.
        asked = made.any(-1, keepdim=True).to(made.dtype) * there[:, :1].unsqueeze(-1)
        scale = asked * (2 / made.shape[-1])
        slopes = made * scale - (parts.compared(made, true, there, self._last) * scale) @ true
        return Answer(slopes.reshape(shown.movedim(1, 0).shape).movedim(0, 1))

    def _strangers(self, graph: Graph, count: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return neighbours of M random nodes: features, (M, p, D), and which exist, (M, p)."""
        near = fold(key, "neighbours")
        index, there = parts.some_neighbours(near, graph, graph.real, self.p_max)
        order = parts.random_order(fold(key, "nodes"), graph, there[:, 0])
        turn = torch.arange(count, device=order.device)
        nodes = order[turn.remainder(there[:, 0].sum().clamp(min=1).long())]
        return graph.tensor_view("rows")[index[nodes]], there[nodes]

    @client_step(discloses={"x": SHOWN})
    def pull(
        self, graph: Graph, message: Pull, state: Learning, key: Tensor
    ) -> tuple[Shown, Learning]:
        """Take one step of the feature generator with the answers. Reply with new features."""
        seen = self._derived(graph, state)
        lost, sample = seen.lost, self._sample(graph, seen, state.shown)
        nodes, places = sample.nodes, sample.places
        weight, slopes = sample.used / (sample.size * self.p_max), message.slopes
        if places is not None:
            nodes = places.at(nodes)
            weight, slopes = places.at_slots(weight), places.at_slots(slopes)
        true, there = graph.tensor_view("rows")[lost.index[nodes]], lost.there[nodes]

        def loss(layers: Tree, graph: Graph, key: Tensor) -> Tensor:
            made = self._made(layers, sample)
            gaps = made - parts.compared(made, true, there, self._last) @ true
            own = gaps.square().mean(-1)
            others = (made * slopes).sum(-1)
            return self.lam_f * message.share * (weight * (own + others)).sum()

        start = state.generator["features"], self._adam, state.moments
        layers, moments = fit(loss, *start, 1, key, graph, needs_whole=WHOLE)
        generator = {**state.generator, "features": layers}
        state = Learning(generator, state.seed, key, moments)
        return self._show(layers, self._sample(graph, seen, key)), state

    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> tuple[Update, Mended]:
        """Mend the graph, then train the received model on it with cross entropy."""
        if state is None:
            state = self._learned(graph, None, fold(key, "alone"))
        if isinstance(state, Learning):
            generator = {name: state.generator[name] for name in ("encoder", "degree", "features")}
            state = Mended(generator, state.seed, None)
        made = self._derived(graph, state)

        def loss(params: Tree, graph: Graph, key: Tensor) -> Tensor:
            logits = parts.mended_sage(self.net, params, graph, graph.real, made, key)
            return graph.task.loss(logits, graph)

        model, moments = self.fit(graph, model, state.moments, key, loss=loss, needs_whole=WHOLE)
        return Update(model, graph.size(self.weight_by)), replace(state, moments=moments)

    def mend(self, graph: Graph, generator: Tree, key: Tensor, sparing: bool = False) -> parts.Made:
        """Generate neighbours of all nodes. `sparing` computes only the used slots, if possible."""
        z, lost = self.neighgen.encode(generator, graph, graph.real)
        used = self.neighgen.used(lost) * graph.real.unsqueeze(-1)
        places = used_places(used * self._both_ways) if sparing else None
        slots = used * self._both_ways, places
        return self._joined(generator["features"], graph.ids, z, fold(key, "mend"), *slots)

    def _joined(
        self, layers: Tree, ids: Tensor, z: Tensor, key: Tensor, read: Tensor, places: Places | None
    ) -> parts.Made:
        """Generate neighbours from embeddings and keyed noise, and connect those in `read`."""
        if places is not None:
            z, ids, read = z[places.nodes], ids[places.nodes], places.at_slots(read)
        x = self.neighgen.make(layers, z + self._noise(key, ids, z), places)
        return parts.made_neighbours(x, read, places)

    @property
    def _both_ways(self) -> int:
        """One if a real node reads its generated neighbours, else zero."""
        return int(self.compat not in ("one-directional", "openfgl"))

    def _learned(self, graph: Graph, state: Learning | None, key: Tensor) -> Learning:
        """Train the generator for `generator_epochs` epochs without the other clients."""
        if state is None:
            start = self.neighgen.init(fold(key, "generator"))
            start["classifier"] = self.net.init(fold(key, "classifier"))
            state = Learning(start, key, key, None)
        lost = parts.hide_nodes(state.seed, graph, self.hide, self.p_max)

        def loss(params: Tree, graph: Graph, key: Tensor) -> Tensor:
            z, count = self.neighgen.encode(params, graph, lost.kept)
            # The neighbours of hidden nodes are in no loss.
            used = self.neighgen.used(count) * lost.kept.unsqueeze(-1)
            places = used_places(used)
            slots, classifier = (used * self._both_ways, places), params["classifier"]
            made = self._joined(params["features"], graph.ids, z, key, *slots)
            logits = parts.mended_sage(self.net, classifier, graph, lost.kept, made, key)
            index, there = lost.index, lost.there
            if places is not None:
                used, index, there = places.at_slots(used), places.at(index), places.at(there)
            rows = graph.tensor_view("rows")[index], used, there, lost.kept
            return (
                self.lam_d * parts.degree_loss(count, lost.count, lost.kept)
                + self.lam_f * parts.feature_loss(made.x, *rows, self._last, places)
                + self.lam_c * graph.task.loss(logits, graph)
            )

        start, epochs = state.generator, self.generator_epochs
        generator, _ = fit(loss, start, self._adam, None, epochs, key, graph, needs_whole=WHOLE)
        return Learning(generator, state.seed, key, None)

    def _sample(self, graph: Graph, seen: Seen, key: Tensor) -> Sample:
        """Draw kept nodes, given the encoder's output on all nodes."""
        lost = seen.lost
        order = parts.random_order(fold(key, "nodes"), graph, lost.kept)
        turn = torch.arange(self.exchanged_nodes, device=order.device)
        nodes = order[turn.remainder(order.shape[0])]  # repeat them if there are fewer
        z, guess = seen.z[nodes], seen.count[nodes]
        mask = (turn < lost.kept.sum()).to(z.dtype)
        used = self.neighgen.used(guess) * (mask * lost.there[nodes, 0]).unsqueeze(-1)
        noisy = z + self._noise(key, graph.ids[nodes], z)
        return Sample(nodes, noisy, used, mask.sum().clamp(min=1), used_places(used))

    def _made(self, layers: Tree, sample: Sample) -> Tensor:
        """Generate x̂ of a sample."""
        z = sample.z if sample.places is None else sample.z[sample.places.nodes]
        return self.neighgen.make(layers, z, sample.places)

    def _show(self, layers: Tree, sample: Sample) -> Shown:
        made, places = self._made(layers, sample), sample.places
        if places is not None:  # unused slots are zero
            return Shown(places.spread(made))
        return Shown(made * sample.used.unsqueeze(-1))

    def _noise(self, key: Tensor, ids: Tensor, like: Tensor) -> Tensor:
        return node_normal(fold(key, "noise"), ids, self.latent, like.dtype)

    @property
    def _last(self) -> bool:
        return self.compat in ("last", "openfgl")

    @property
    def _adam(self) -> Adam:
        return Adam(lr=self.generator_lr, weight_decay=1e-4)


def _dense_features(graph: Graph) -> Tensor:
    return graph.x if isinstance(graph.x, Tensor) else graph.x.to_dense()
