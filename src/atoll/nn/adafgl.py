"""AdaFGL's personal networks: heads that read a graph through a model's predictions about it.

    P = softmax of the model's logits,   S = cosines of the rows of P, zero diagonal
    T = D^-1/2 (α A + (1 - α) S + I) D^-1/2,   X~ = [X, TX, ..., T^k X]
    homophilous     MLP2(X~)
    heterophilous   MLP3(X), MLP3(X~), and `signed_messages` between the outputs of another MLP3(X~)

A head is H <- dropout(PReLU(H W + b)), with one slope and no activation after the last layer.
X~, N x (k+1)F and dense even where X is not, is never made. Its product with W = (W_0, ..., W_k) is
X W_0 + T (X W_1 + T (X W_2 + ...)), exactly; so T meets matrices as wide as the hidden layer and
not as X, and one product with X serves all heads and hops. Nothing is dropped from the input.

Label propagation, without parameters, says how far a graph's labels can be trusted to spread:

    Y <- Â Y / 2 + Y0 / 2 + Y0 on the seeds,   Y0 = one-hot on the seeds, 1/C elsewhere

Shapes: x (N, F), P and all outputs (N, C), labels one-hot (N, C), seeds and masks (N,).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, Matrix, View
from atoll.core.losses import masked_mean
from atoll.core.random import dropout, fold, random_bits
from atoll.core.tree import Tree
from atoll.nn import views
from atoll.nn.adafgl_propagation import directions, propagation, signed_messages
from atoll.nn.init import glorot, zeros
from atoll.nn.ops import matmul

Propagation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Heads:
    """Heads by name, with the number of their layers (at least two); they need the view `x`.

    Attributes:
        features: Width of X.
        classes: Width of every head's output.
        hops: k.
        propagated: Heads that read X and what it becomes; at least one.
        plain: Heads that read X alone.
        hidden: Width of the hidden layers.
        dropout: Share of a hidden layer's entries that is dropped.
    """

    features: int
    classes: int
    hops: int
    propagated: tuple[tuple[str, int], ...]
    plain: tuple[tuple[str, int], ...] = ()
    hidden: int = 64
    dropout: float = 0.5

    def init(self, key: Tensor) -> Tree:
        """All first layers side by side, hop after hop; for each head a slope and the rest.

        Weights have the gain √2 of layers before a ReLU, slopes start at 0.25.
        """
        deep = [self._weight(key, name, (self.hops + 1) * self.features) for name in self._deep]
        flat = [self._weight(key, name, self.features) for name in self._flat]
        hops = zip(*(weight.chunk(self.hops + 1) for weight in deep), strict=True)
        first = torch.cat([weight for hop in hops for weight in hop] + flat, dim=1)
        bias = zeros(key, self.hidden * len(self._deep + self._flat))
        rest = {name: self._fresh(fold(key, name), n) for name, n in self.propagated + self.plain}
        return {"first": {"weight": first, "bias": bias}, "rest": rest}

    @property
    def _deep(self) -> list[str]:
        return [name for name, _ in self.propagated]

    @property
    def _flat(self) -> list[str]:
        return [name for name, _ in self.plain]

    def _weight(self, key: Tensor, name: str, n_in: int) -> Tensor:
        return math.sqrt(2) * glorot(fold(key, name, 0), n_in, self.hidden)

    def _fresh(self, key: Tensor, layers: int) -> Tree:
        widths = [self.hidden] * (layers - 1) + [self.classes]
        made = []
        for number, (n_in, n_out) in enumerate(pairwise(widths), start=1):
            weight = math.sqrt(2) * glorot(fold(key, number), n_in, n_out)
            made.append({"weight": weight, "bias": zeros(key, n_out)})
        return {"slope": zeros(key, 1) + 0.25, "layers": made}

    def __call__(
        self, params: Tree, graph: Graph, propagate: Propagation, key: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Every head's logits; `propagate` is T."""
        first = self._first(params["first"], graph, propagate)
        found = zip(self._deep + self._flat, torch.split(first, self.hidden, dim=1), strict=True)
        return {name: self._rest(name, params["rest"][name], h, graph, key) for name, h in found}

    def _first(self, layer: Tree, graph: Graph, propagate: Propagation) -> Tensor:
        """The first layers of all heads side by side, without their activation."""
        wide = len(self._deep) * self.hidden
        product = matmul(graph.views["x"], layer["weight"])
        widths = [*[wide] * (self.hops + 1), len(self._flat) * self.hidden]
        *terms, h, flat = torch.split(product, widths, dim=1)
        for term in reversed(terms):
            h = term + propagate(h)
        out: Tensor = torch.cat([h, flat], dim=1) + layer["bias"]
        return out

    def _rest(self, name: str, head: Tree, h: Tensor, graph: Graph, key: Tensor | None) -> Tensor:
        for number, layer in enumerate(head["layers"], start=1):
            h = torch.where(h > 0, h, head["slope"] * h)
            h = dropout(h, key, graph.ids, self.dropout, name, number)
            h = h @ layer["weight"] + layer["bias"]
        return h


class Surroundings(NamedTuple):
    """What a model says about a client's graph: P, the directions of its rows, and T."""

    belief: Tensor
    q: Tensor
    propagate: Propagation


@dataclass(frozen=True)
class Adaptive:
    """Hyper-parameters as in `methods/adafgl.py`."""

    features: int
    classes: int
    hidden: int
    dropout: float
    alpha: float
    beta: float
    hops: int
    threshold: float
    double_softmax: bool
    inverted_rescale: bool
    block: int

    def __post_init__(self) -> None:
        for name in ("hops", "block"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a number from 0 to 1")
        if not 0 <= self.threshold < 1:
            raise ConfigError(f"threshold is {self.threshold}; give a number from 0 to below 1")

    @property
    def views(self) -> Mapping[str, View]:
        return {"x": views.features, "plain": views.plain_adjacency}

    @property
    def heads(self) -> Heads:
        """The four perceptrons."""
        return Heads(
            self.features,
            self.classes,
            self.hops,
            propagated=(("homo", 2), ("smooth", 3), ("message", 3)),
            plain=(("raw", 3),),
            hidden=self.hidden,
            dropout=self.dropout,
        )

    def init(self, key: Tensor) -> Tree:
        return self.heads.init(key)

    def surroundings(self, logits: Tensor, graph: Graph) -> Surroundings:
        """What the heads read the graph through; it stays the same while they are trained."""
        belief = functional.softmax(logits, dim=-1)
        p = functional.softmax(belief, dim=-1) if self.double_softmax else belief
        q, plain = directions(p, graph.real), graph.views["plain"]
        propagate = propagation(plain, q, graph.real, self.alpha, self.threshold, self.block)
        return Surroundings(belief, q, propagate)

    def __call__(
        self, params: Tree, around: Surroundings, graph: Graph, key: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Logits of the homophilous head, then of the heterophilous head's three parts."""
        found = self.heads(params, graph, around.propagate, key)
        message = signed_messages(
            found["message"],
            around.q,
            params["rest"]["message"]["slope"],
            graph.real,
            self.beta,
            self.threshold,
            self.inverted_rescale,
            self.block,
        )
        return found["homo"], found["raw"], found["smooth"], message


def homophily(graph: Graph, classes: int, key: Tensor) -> Tensor:
    """How well half of the training labels, drawn by the key, predict the others (view `gcn`)."""
    bits = random_bits(key, graph.ids, 1).squeeze(-1).long()
    place = torch.where(graph.train > 0, bits, 1 << 40).argsort(stable=True).argsort()
    seeds = graph.train * (place < graph.train.sum() // 2).to(graph.train.dtype)
    labels = functional.one_hot(graph.y, classes).to(graph.real.dtype)
    scores = propagate_labels(graph.views["gcn"], labels, seeds)
    return accuracy(scores, labels, graph.train - seeds)


def propagate_labels(adjacency: Matrix, labels: Tensor, seeds: Tensor, steps: int = 10) -> Tensor:
    """Scores, (N, C), from the labels of the seeds."""
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
