"""GraphSAGE with the mean aggregator (Hamilton, Ying and Leskovec, 2017).

    H <- dropout(relu(D^-1 A H W_n + H W_s + b)),   no activation after the last layer.

Shapes: x (N, D), logits (N, C). All neighbours are used, none sampled, and nothing is dropped from
the input, so that D^-1 A X is computed once. As in PyG's `SAGEConv`, the mean does not know edge
weights, and a node without neighbours has the mean zero.
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
class GraphSAGE(Layered):
    """Layers of width `hidden`, the last of width `classes`."""

    @property
    def views(self) -> Mapping[str, View]:
        """The mean over neighbours, applied to features once."""
        return {"mean": views.mean_adjacency, "mean_x": views.mean_features, "x": views.features}

    def init(self, key: Tensor) -> Tree:
        """Two weights and a bias per layer."""
        return [
            {
                "neighbour": kaiming(fold(key, layer, "neighbour"), n_in, n_out),
                "self": kaiming(fold(key, layer, "self"), n_in, n_out),
                "bias": kaiming_bias(fold(key, layer, "bias"), n_in, n_out),
            }
            for layer, (n_in, n_out) in enumerate(pairwise(self.widths))
        ]

    def _first(self, layer: Tree, graph: Graph) -> Tensor:
        h: Tensor = views.first_product(graph, "mean", layer["neighbour"]) + layer["bias"]
        return h + matmul(graph.views["x"], layer["self"])

    def _further(self, layer: Tree, h: Tensor, number: int, graph: Graph) -> Tensor:
        mean = matmul(graph.views["mean"], matmul(h, layer["neighbour"]))
        out: Tensor = mean + matmul(h, layer["self"]) + layer["bias"]
        return out
