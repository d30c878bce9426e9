"""AdaFGL: a federated model first, then every client adapts it to its own graph (Li et al., 2024).

Step 1, the first `federated_rounds` rounds: FedAvg, θ <- Σ_i n_i θ_i / Σ_i n_i.
Step 2, all later rounds, on each client alone, with P = softmax f(θ) on its graph:

    HCS = how well half of its training labels, propagated, predict the other half
          Y <- Â Y / 2 + Y0 / 2 + Y0 on the seeds, 10 times;  Y0 = one-hot on the seeds, else 1/C
    T = D^-1/2 (α A + (1 - α) S + I) D^-1/2,   S = cosines of the rows of P, zero diagonal
    X~ = [X, TX, ..., T^k X]
    homophilous     H = MLP2(X~);  minimise CE(H) + MSE(softmax H, P) over all nodes
                    Y_ho = (softmax H + P) / 2
    heterophilous   MLP3(X), MLP3(X~) and signed messages between the outputs of another MLP3(X~)
                    (`nn/similarity.py`);  minimise their three CE;  Y_he = mean of their softmaxes
    Y = HCS Y_ho + (1 - HCS) Y_he

A run of R rounds has R - `federated_rounds` for step 2, of `personal_epochs` epochs each: 50 and 4
make the authors' 200 epochs out of 100 rounds. With R <= `federated_rounds` it is FedAvg.

Wire, per client and round:  down  model      up  model, num_nodes      in step 1;
    down  model once, then nothing      up  nothing      in step 2.
    `keep="best"` takes the model of the federated round with the best validation accuracy over all
    clients: each downloads the new model and sends two counts, also in step 1.
Private state: in step 2 the global model, the heads, Adam's moments and HCS; in step 1 nothing, or
the moments (`optimizer_state="keep"`). It has no node axis: P is one forward pass of the model, and
X~ (N x 4F, dense: 6 MB for one of ten clients of Cora, 464 MB of Physics) is never made.
Floats per client and round: 2P + 1 in step 1 (3P + 3 for `keep="best"`), P in the first round of
step 2, then none.
Compute: S in low rank is O(N C) per column; the signed messages are O(N² C), held `block` rows at a
time, and so is S where it has a `threshold`.
Departures from the reference code: both heads are trained and mixed by HCS, as in the paper; the
authors' code takes one of them, the homophilous one where HCS >= 0.9 (`switch="hard"`). Ties in the
label propagation count as a fair draw, not for the first class. Faults of both public codes, each a
switch: P goes through a second softmax (`double_softmax`), S is cut to 0/1 at .999 because of it
(`threshold`), logits are compared with probabilities (`logit_mse`), and pairs below the mean
similarity push the more, the more alike they are (`inverted_rescale`). The codes' MLPs share slopes
of PReLU; here each has its own. Every client's best epoch is not picked by validation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.errors import ConfigError, unknown
from atoll.core.fit import fit
from atoll.core.graph import Graph, Sparse, View
from atoll.core.losses import cross_entropy, masked_mean
from atoll.core.message import ToAll
from atoll.core.method import Clients, Method, client_step
from atoll.core.mix import average
from atoll.core.optim import Adam, Optimizer
from atoll.core.random import fold, random_bits
from atoll.core.tree import Empty, Tree, record
from atoll.nn import views
from atoll.nn.heads import Heads
from atoll.nn.ops import matmul
from atoll.nn.similarity import directions, propagation, signed_messages

HARD_SWITCH = 0.9
"""HCS from which the authors' code trusts the homophilous head alone."""


@record
class Update:
    """What leaves a client in step 1."""

    model: Tree
    weight: Tensor


@record
class Validated:
    """Validation nodes that the new global model gets right, and all of them."""

    right: Tensor
    total: Tensor


@record
class Start:
    """The message that opens step 2 for a client; later ones are `Empty`."""

    model: Tree


@record
class Personal:
    """What a client has in step 2: the global model, its heads, their moments, and HCS."""

    model: Tree
    heads: Tree
    moments: Tree
    confidence: Tensor


@record
class Private:
    """What a client keeps: moments in step 1, all the rest in step 2."""

    moments: Tree
    personal: Personal | None


@record
class Server:
    """The global model, the best one so far (`keep="best"`), and who has begun step 2, (N,)."""

    model: Tree
    best: Tree
    score: Tensor
    ready: Tensor


class Surroundings(NamedTuple):
    """What the global model says about a client's graph: P, the directions of its rows, and T."""

    belief: Tensor
    q: Tensor
    propagate: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AdaFGL(Method):
    """Federated knowledge, then adaptive propagation on every client."""

    optimizer: Optimizer = Adam()
    epochs: int = 3
    federated_rounds: int = 50
    personal_epochs: int = 4
    alpha: float = 0.5
    beta: float = 0.2
    hops: int = 3
    threshold: float = 0.0
    keep: Literal["last", "best"] = "last"
    optimizer_state: Literal["keep", "reset"] = "reset"
    switch: Literal["mix", "hard"] = "mix"
    double_softmax: bool = False
    logit_mse: bool = False
    inverted_rescale: bool = False
    block: int = 1024

    paper: ClassVar[str] = (
        "Li et al., AdaFGL: A New Paradigm for Federated Node Classification with Topology "
        "Heterogeneity, ICDE 2024"
    )
    deployed: ClassVar[str] = "personalised"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # The authors' code for 300 rounds, but for its network (ChebNet) and its choice of epochs.
        "reference": {
            "federated_rounds": 100, "personal_epochs": 1, "alpha": 0.05, "beta": 0.2,
            "threshold": 0.999, "keep": "best", "switch": "hard", "double_softmax": True,
            "logit_mse": True, "inverted_rescale": True,
        },
        "openfgl": {
            "federated_rounds": 50, "personal_epochs": 1, "alpha": 0.5, "beta": 0.0,
            "threshold": 0.999, "double_softmax": True, "logit_mse": True, "inverted_rescale": True,
        },
    }  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("federated_rounds", "personal_epochs", "hops", "block"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        for name in ("alpha", "beta", "threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a number from 0 to 1")
        for name, allowed in (("keep", ("last", "best")), ("switch", ("mix", "hard"))):
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed)

    @property
    def views(self) -> Mapping[str, View]:
        mine = {"x": views.features, "gcn": views.gcn_adjacency, "plain": views.plain_adjacency}
        return {**self.net.views, **mine}

    @property
    def heads(self) -> Heads:
        """The networks of step 2, as wide as the federated one."""
        return Heads(
            self.net.features, self.net.classes, self.hops,
            propagated=(("homo", 2), ("smooth", 3), ("message", 3)), plain=(("raw", 3),),
            hidden=getattr(self.net, "hidden", 64), dropout=getattr(self.net, "dropout", 0.5),
        )  # fmt: skip

    def init(self, clients: Clients) -> Server:
        model = self.net.init(clients.key)
        ready = torch.zeros(clients.total, dtype=torch.int64, device=clients.key.device)
        best = model if self.keep == "best" else None
        return Server(model, best, ready.new_full((), -1, dtype=torch.float64), ready)

    def round(self, server: Server, clients: Clients) -> Server:
        if clients.round < self.federated_rounds:
            return self._federated(server, clients)
        known = bool(server.ready[clients.positions].all())
        clients.map(self.train, ToAll(Empty() if known else Start(server.model)))
        return replace(server, ready=server.ready.index_fill(0, clients.positions, 1))

    def _federated(self, server: Server, clients: Clients) -> Server:
        reply = clients.map(self.train, ToAll(server.model))
        server = replace(server, model=average(reply.model, weight=reply.weight))
        if self.keep == "last":
            return server
        seen = clients.map(self.validate, ToAll(server.model))
        score = (seen.right.sum() / seen.total.sum().clamp(min=1)).to(server.score)
        if score > server.score:
            server = replace(server, best=server.model, score=score)
        last = clients.round == self.federated_rounds - 1
        return replace(server, model=server.best) if last else server

    def deploy(self, server: Server) -> ToAll:
        return ToAll(server.model)

    def local(self, reply: Update | Empty) -> Tree:
        return reply.model if isinstance(reply, Update) else reply

    def predict(
        self, graph: Graph, message: Tree, state: Private | None, key: Tensor | None = None
    ) -> Tensor:
        if state is None or state.personal is None:
            return self.net(message, graph, key)
        own = state.personal
        around = self.surroundings(own.model, graph)
        homo, *hetero = (
            functional.softmax(h, dim=-1) for h in self.outputs(own.heads, around, graph, key)
        )
        belief = functional.softmax(around.belief, -1) if self.double_softmax else around.belief
        trust = own.confidence
        trust = (trust >= HARD_SWITCH).to(trust.dtype) if self.switch == "hard" else trust
        mixed = mix_heads(trust, (homo + belief) / 2, sum(hetero) / 3)
        return mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log()

    @client_step
    def train(
        self, graph: Graph, message: Tree, state: Private | None, key: Tensor
    ) -> tuple[Update | Empty, Private | None]:
        """Step 1: train the received model. Step 2: train the client's own heads."""
        if isinstance(message, Start | Empty):
            return Empty(), self._personal(graph, message, state, key)

        def loss(params: Tree, key: Tensor) -> Tensor:
            return cross_entropy(self.net(params, graph, key), graph)

        moments = None if state is None else state.moments
        model, moments = fit(loss, message, self.optimizer, moments, self.epochs, key)
        keeps = self.optimizer_state == "keep"
        return Update(model, graph.size("nodes")), Private(moments if keeps else None, None)

    @client_step(keeps_state=True)
    def validate(self, graph: Graph, model: Tree, state: Private | None, key: Tensor) -> Validated:
        """Count the validation nodes that a model gets right."""
        right = (self.net(model, graph).argmax(-1) == graph.y).to(graph.val.dtype)
        return Validated((right * graph.val).sum(), graph.val.sum())

    def _personal(
        self, graph: Graph, message: Start | Empty, state: Private | None, key: Tensor
    ) -> Private | None:
        own = None if state is None else state.personal
        if own is None and isinstance(message, Empty):
            return state  # it has not heard of the global model yet: wait
        if own is None:
            trust = homophily(graph, self.net.classes, fold(key, "halves"))
            own = Personal(message.model, self.heads.init(fold(key, "heads")), None, trust)
        around = self.surroundings(own.model, graph)

        def loss(heads: Tree, key: Tensor) -> Tensor:
            homo, *hetero = self.outputs(heads, around, graph, key)
            near = homo if self.logit_mse else functional.softmax(homo, dim=-1)
            preserved = masked_mean(((near - around.belief) ** 2).mean(-1), graph.real)
            return sum((cross_entropy(h, graph) for h in (homo, *hetero)), preserved)

        heads, moments = fit(
            loss, own.heads, self.optimizer, own.moments, self.personal_epochs, key
        )
        return Private(None, replace(own, heads=heads, moments=moments))

    def surroundings(self, model: Tree, graph: Graph) -> Surroundings:
        """What stays the same through step 2, computed again in each round: it has a node axis."""
        belief = functional.softmax(self.net(model, graph), dim=-1)
        p = functional.softmax(belief, dim=-1) if self.double_softmax else belief
        q = directions(p, graph.real)
        return Surroundings(
            belief, q, propagation(graph.views["plain"], q, graph.real, self.alpha, self.threshold,
                                   self.block),
        )  # fmt: skip

    def outputs(
        self, heads: Tree, around: Surroundings, graph: Graph, key: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Logits of the homophilous head and of the three heterophilous ones."""
        found = self.heads(heads, graph, around.propagate, key)
        message = signed_messages(
            found["message"], around.q, heads["rest"]["message"]["slope"], graph.real,
            self.beta, self.threshold, self.inverted_rescale, self.block,
        )  # fmt: skip
        return found["homo"], found["raw"], found["smooth"], message


def mix_heads(trust: Tensor, homo: Tensor, hetero: Tensor) -> Tensor:
    """HCS Y_ho + (1 - HCS) Y_he."""
    return trust * homo + (1 - trust) * hetero


def homophily(graph: Graph, classes: int, key: Tensor) -> Tensor:
    """HCS: half of the training labels, drawn by the key, are to predict the other half."""
    bits = random_bits(key, graph.ids, 1).squeeze(-1).long()
    draw = torch.where(graph.train > 0, bits, 1 << 40)
    place = draw.argsort(stable=True).argsort()
    seeds = graph.train * (place < graph.train.sum() // 2).to(graph.train.dtype)
    labels = functional.one_hot(graph.y, classes).to(graph.real.dtype)
    spread = propagate_labels(graph.views["gcn"], labels, seeds)
    return accuracy(spread, labels, graph.train - seeds)


def propagate_labels(
    adjacency: Tensor | Sparse, labels: Tensor, seeds: Tensor, steps: int = 10
) -> Tensor:
    """Scores (N, C) from the one-hot labels of the seeds, (N,) zeros and ones."""
    known = seeds.unsqueeze(-1)
    start = labels * known + (1 - known) / labels.shape[-1]
    y = start
    for _ in range(steps):
        y = (matmul(adjacency, y) + start) / 2 + known * start
    return y


def accuracy(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Share of nodes whose class scores highest, a tie being a fair draw; one if there are none."""
    best = (scores >= scores.amax(-1, keepdim=True) - 1e-6).to(scores.dtype)
    right = (best * labels).sum(-1) / best.sum(-1)
    return torch.where(mask.sum() > 0, masked_mean(right, mask), 1.0)
