"""Several perceptrons on one graph: each reads X, or X beside what it becomes when propagated.

    H <- dropout(PReLU(H W + b)),   no activation after the last layer; one slope for each head
    first layer  X W + b   or   [X, TX, ..., T^k X] W + b

The concatenation, N x (k+1)F and dense even where X is not, is never made. Its product with
W = (W_0, ..., W_k) is X W_0 + T (X W_1 + T (X W_2 + ...)), exactly; so T meets matrices as wide as
the hidden layer and not as X, and one product with X serves all heads and hops.

Shapes: x (N, F), logits (N, C) for every head. Nothing is dropped from the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from atoll.core.graph import Graph
from atoll.core.random import dropout, fold
from atoll.core.tree import Tree
from atoll.nn.init import glorot, zeros
from atoll.nn.ops import matmul


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
        made = [
            {
                "weight": math.sqrt(2) * glorot(fold(key, number), n_in, n_out),
                "bias": zeros(key, n_out),
            }
            for number, (n_in, n_out) in enumerate(pairwise(widths), start=1)
        ]
        return {"slope": zeros(key, 1) + 0.25, "layers": made}

    def __call__(
        self,
        params: Tree,
        graph: Graph,
        propagate: Callable[[Tensor], Tensor],
        key: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Every head's logits; `propagate` is T."""
        first = self._first(params["first"], graph, propagate)
        found = zip(self._deep + self._flat, torch.split(first, self.hidden, dim=1), strict=True)
        return {name: self._rest(name, params["rest"][name], h, graph, key) for name, h in found}

    def _first(self, layer: Tree, graph: Graph, propagate: Callable[[Tensor], Tensor]) -> Tensor:
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
