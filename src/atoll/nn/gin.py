"""Graph isomorphism network for nodes (Xu et al., 2019).

    H <- dropout(relu(relu((A + (1 + ε) I) H W_1 + b_1) W_2 + b_2)),   ε = 0, not trained,

`layers` times, then H W + b. The convolutions are GCFL's (Xie et al., 2021): each has two linear
layers and no batch normalisation. Shapes: x (N, D), logits (N, C). Nothing is dropped from the
input, so that (A + I) X is computed once. Unlike PyG's `GINConv`, the sum is weighted where the
data has edge weights; without them both are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.graph import Graph, View
from atoll.core.random import dropout, fold
from atoll.core.tree import Tree
from atoll.nn import views
from atoll.nn.init import kaiming, kaiming_bias
from atoll.nn.ops import matmul


@dataclass(frozen=True)
class GIN:
    """`layers` convolutions of width `hidden`, then a linear layer of width `classes`."""

    features: int
    classes: int
    hidden: int = 64
    layers: int = 2
    dropout: float = 0.5

    @property
    def views(self) -> Mapping[str, View]:
        """The sum over neighbourhoods, applied to features once."""
        return {"sum": views.sum_adjacency, "sum_x": views.sum_features}

    def init(self, key: Tensor) -> Tree:
        """Two linear layers per convolution, and the last one."""
        widths = [self.features, *[self.hidden] * (self.layers - 1)]
        convolutions = [
            {
                "inner": _linear(fold(key, layer, "inner"), width, self.hidden),
                "outer": _linear(fold(key, layer, "outer"), self.hidden, self.hidden),
            }
            for layer, width in enumerate(widths)
        ]
        return [*convolutions, _linear(fold(key, self.layers), self.hidden, self.classes)]

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Logits, (N, C); a key turns dropout on."""
        adjacency = graph.views["sum"]
        *convolutions, last = params
        h = matmul(graph.views["sum_x"], convolutions[0]["inner"]["weight"])
        for number, layer in enumerate(convolutions):
            if number:
                h = matmul(adjacency, h @ layer["inner"]["weight"])
            h = torch.relu(h + layer["inner"]["bias"])
            h = torch.relu(h @ layer["outer"]["weight"] + layer["outer"]["bias"])
            h = dropout(h, key, graph.ids, self.dropout, "dropout", number)
        logits: Tensor = h @ last["weight"] + last["bias"]
        return logits


def _linear(key: Tensor, n_in: int, n_out: int) -> dict[str, Tensor]:
    return {
        "weight": kaiming(fold(key, "weight"), n_in, n_out),
        "bias": kaiming_bias(fold(key, "bias"), n_in, n_out),
    }
