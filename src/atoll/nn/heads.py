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
    """Heads by name, with the number of their layers; they need the view `x`.

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
        """A slope of 0.25 and the layers for each head; gain √2 as for layers before a ReLU."""
        wide = (self.hops + 1) * self.features
        heads = [(name, layers, wide) for name, layers in self.propagated]
        heads += [(name, layers, self.features) for name, layers in self.plain]
        return {
            name: self._fresh(fold(key, name), [n_in, *[self.hidden] * (layers - 1), self.classes])
            for name, layers, n_in in heads
        }

    def _fresh(self, key: Tensor, widths: list[int]) -> Tree:
        layers = [
            {
                "weight": math.sqrt(2) * glorot(fold(key, number), n_in, n_out),
                "bias": zeros(key, n_out),
            }
            for number, (n_in, n_out) in enumerate(pairwise(widths))
        ]
        return {"slope": zeros(key, 1) + 0.25, "layers": layers}

    def __call__(
        self,
        params: Tree,
        graph: Graph,
        propagate: Callable[[Tensor], Tensor],
        key: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Every head's logits; `propagate` is T."""
        return {
            name: self._rest(name, params[name], h, graph, key)
            for name, h in self._first(params, graph, propagate).items()
        }

    def _first(
        self, params: Tree, graph: Graph, propagate: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        deep, flat = ([name for name, _ in heads] for heads in (self.propagated, self.plain))
        weight = {name: params[name]["layers"][0]["weight"] for name in (*deep, *flat)}
        by_hop = zip(*(weight[name].chunk(self.hops + 1) for name in deep), strict=True)
        blocks = [torch.cat(hop, dim=1) for hop in by_hop] + [weight[name] for name in flat]
        widths = [block.shape[1] for block in blocks]
        parts = matmul(graph.views["x"], torch.cat(blocks, dim=1)).split(widths, dim=1)
        terms, rest = parts[: self.hops + 1], parts[self.hops + 1 :]
        h = terms[-1]
        for term in reversed(terms[:-1]):
            h = term + propagate(h)
        found = zip(weight, (*h.chunk(len(deep), dim=1), *rest), strict=True)
        return {name: part + params[name]["layers"][0]["bias"] for name, part in found}

    def _rest(
        self, name: str, head: Tree, h: Tensor, graph: Graph, key: Tensor | None
    ) -> Tensor:
        for number, layer in enumerate(head["layers"][1:], start=1):
            h = torch.where(h > 0, h, head["slope"] * h)
            h = dropout(h, key, graph.ids, self.dropout, name, number)
            h = h @ layer["weight"] + layer["bias"]
        return h
