"""Graph convolutional network (Kipf and Welling, 2017).

    H <- dropout(relu(Â H W + b)),   Â = D^-1/2 (A + I) D^-1/2,   no activation after the last
    layer.

With `head=linear` the last layer is H W + b, as in FED-PUB's network after two convolutions.

Shapes: x (N, D), logits (N, C). Nothing is dropped from the input, so that Â X is computed once
where that saves work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Literal

from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, View
from atoll.core.random import fold
from atoll.core.tree import Tree
from atoll.nn import views
from atoll.nn.init import glorot, linear, zeros
from atoll.nn.layered import Layered
from atoll.nn.ops import matmul

Propagation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GCN(Layered):
    """Layers of width `hidden`, the last of width `classes`."""

    head: Annotated[Literal["conv", "linear"], "last layer: convolution or linear"] = "conv"

    def __post_init__(self) -> None:
        if self.head == "linear" and self.layers < 2:
            raise ConfigError("head=linear needs a convolution before it; give layers=2 or more")

    @property
    def views(self) -> Mapping[str, View]:
        return {
            "gcn": views.gcn_adjacency,
            "gcn_x": views.gcn_features,
            "x": partial(views.features_unless, "gcn_x"),
        }

    def init(self, key: Tensor) -> Tree:
        params = [
            {"weight": glorot(fold(key, layer), n_in, n_out), "bias": zeros(key, n_out)}
            for layer, (n_in, n_out) in enumerate(pairwise(self.widths))
        ]
        if self.head == "linear":
            params[-1] = linear(fold(key, self.layers - 1), *self.widths[-2:])
        return params

    def _first(self, layer: Tree, graph: Graph) -> Tensor:
        h: Tensor = views.first_product(graph, "gcn", layer["weight"]) + layer["bias"]
        return h

    def _further(self, layer: Tree, h: Tensor, number: int, graph: Graph) -> Tensor:
        return self._convolved(layer, h, number, lambda h: matmul(graph.views["gcn"], h))

    def on(
        self, propagate: Propagation, params: Tree, graph: Graph, key: Tensor | None = None
    ) -> Tensor:
        """Logits with another propagation in place of Â, one that may be learned (view `x`)."""
        h: Tensor = propagate(matmul(graph.views["x"], params[0]["weight"])) + params[0]["bias"]
        for number, layer in enumerate(params[1:], start=1):
            h = self.onward(layer, h, number, propagate, graph, key)
        return h

    def onward(
        self,
        layer: Tree,
        h: Tensor,
        number: int,
        propagate: Propagation,
        graph: Graph,
        key: Tensor | None,
    ) -> Tensor:
        """Activation and dropout of h, then layer `number` with the given propagation."""
        return self._convolved(layer, self._dropped(h, number, graph, key), number, propagate)

    def _convolved(self, layer: Tree, h: Tensor, number: int, propagate: Propagation) -> Tensor:
        h = matmul(h, layer["weight"])
        is_head = self.head == "linear" and number == self.layers - 1
        out: Tensor = (h if is_head else propagate(h)) + layer["bias"]
        return out
