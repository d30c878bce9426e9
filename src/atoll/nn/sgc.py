"""Simple graph convolution (Wu et al., 2019).

    logits = Â^K X W + b,   Â = D^-1/2 (A + I) D^-1/2.

Shapes: x (N, D), logits (N, C). A linear classifier of features that are smoothed once, before
training; there is no hidden layer, and so nothing to drop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from torch import Tensor

from atoll.core.graph import Graph, View
from atoll.core.hyper import OneOrMore
from atoll.core.random import fold
from atoll.core.tree import Tree
from atoll.nn import views
from atoll.nn.init import kaiming, kaiming_bias
from atoll.nn.ops import matmul


@dataclass(frozen=True)
class SGC:
    """One linear layer on the features of `hops` steps."""

    features: int
    classes: int
    hops: Annotated[OneOrMore, "products with the adjacency"] = 2

    @property
    def views(self) -> Mapping[str, View]:
        """Â^K X, and no edges at all."""
        return {self._view: partial(views.hop_features, hops=self.hops)}

    @property
    def _view(self) -> str:
        # The name tells the hops: a method may hold two networks whose views share one dict.
        return f"sgc{self.hops}_x"

    def init(self, key: Tensor) -> Tree:
        """One weight and one bias."""
        return [
            {
                "weight": kaiming(fold(key, "weight"), self.features, self.classes),
                "bias": kaiming_bias(fold(key, "bias"), self.features, self.classes),
            }
        ]

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Logits, (N, C)."""
        h: Tensor = matmul(graph.views[self._view], params[0]["weight"]) + params[0]["bias"]
        return h
