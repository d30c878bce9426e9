"""Multi-layer perceptron: a network that sees no edges, to tell what the graph adds.

    H <- dropout(relu(H W + b)),   no activation after the last layer.

Shapes: x (N, D), logits (N, C). Nothing is dropped from the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from atoll.core.graph import Graph, View
from atoll.core.random import fold
from atoll.core.tree import Tree
from atoll.nn import views
from atoll.nn.init import kaiming, kaiming_bias
from atoll.nn.layered import Layered
from atoll.nn.ops import matmul


@dataclass(frozen=True)
class MLP(Layered):
    """Layers of width `hidden`, the last of width `classes`."""

    @property
    def views(self) -> Mapping[str, View]:
        """X alone."""
        return {"x": views.features}

    def init(self, key: Tensor) -> Tree:
        """One weight and one bias per layer."""
        return [
            {
                "weight": kaiming(fold(key, layer, "weight"), n_in, n_out),
                "bias": kaiming_bias(fold(key, layer, "bias"), n_in, n_out),
            }
            for layer, (n_in, n_out) in enumerate(pairwise(self.widths))
        ]

    def _first(self, layer: Tree, graph: Graph) -> Tensor:
        h: Tensor = matmul(graph.views["x"], layer["weight"]) + layer["bias"]
        return h

    def _further(self, layer: Tree, h: Tensor, number: int, graph: Graph) -> Tensor:
        out: Tensor = h @ layer["weight"] + layer["bias"]
        return out
