"""AdaFGL's personal networks: two heads that read a graph through what a model says about it.

    P = softmax of the model's logits,   S = cosines of the rows of P, zero diagonal
    T = D^-1/2 (α A + (1 - α) S + I) D^-1/2,   X~ = [X, TX, ..., T^k X]
    homophilous     MLP2(X~)
    heterophilous   MLP3(X), MLP3(X~), and `signed_messages` between the outputs of another MLP3(X~)

Shapes: x (N, F), P and all outputs (N, C).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, View
from atoll.core.tree import Tree
from atoll.nn import views
from atoll.nn.adafgl_heads import Heads
from atoll.nn.adafgl_propagation import directions, propagation, signed_messages


class Surroundings(NamedTuple):
    """What a model says about a client's graph: P, the directions of its rows, and T."""

    belief: Tensor
    q: Tensor
    propagate: Callable[[Tensor], Tensor]


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
        q = directions(p, graph.real)
        adjacency = graph.views["plain"]
        propagate = propagation(adjacency, q, graph.real, self.alpha, self.threshold, self.block)
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
