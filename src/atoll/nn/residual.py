"""Residual networks that keep a node apart from its neighbours, and one beside a GCN.

Shapes: x (N, D), logits (N, C).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.graph import Graph, View
from atoll.core.hyper import Dropout, Hidden, Layers
from atoll.core.method import Embedder
from atoll.core.random import dropout, fold
from atoll.core.tree import Tree
from atoll.nn import views
from atoll.nn.init import apply_linear, kaiming, kaiming_bias, linear
from atoll.nn.nets import GCN
from atoll.nn.ops import matmul


@dataclass(frozen=True)
class Residual(Embedder):
    """Residual blocks with separate weights for a node and its neighbours (Platonov et al., 2023).

        h_0 = X W + b;   h_l = h_l-1 + relu(u W_s + D^-1 A u W_n + b_1) W_2 + b_2,   u = norm(h_l-1)

    The logits are norm(h_L) W + b. With `jump` they read the mean of h_0, ..., h_L instead (jumping
    knowledge, Xu et al., 2018). Dropout acts on h_0 and inside of the blocks. The normalisation has
    no weights, because a linear map follows each one.
    """

    features: int
    classes: int
    hidden: Hidden = 64
    layers: Layers = 2
    dropout: Dropout = 0.5
    norm: Annotated[Literal["layer", "none"], "normalisation of a block's input"] = "layer"
    jump: Annotated[bool, "whether the logits read every block's output, not only the last"] = False

    @property
    def reach(self) -> int:
        """How many hops away the logits of a node look."""
        return self.layers

    @property
    def views(self) -> Mapping[str, View]:
        return {"mean": views.mean_adjacency, "x": views.features}

    def init(self, key: Tensor) -> Tree:
        wide = self.hidden
        blocks = [
            {
                "self": kaiming(fold(key, block, "self"), 2 * wide, wide)[:wide],
                "neighbour": kaiming(fold(key, block, "neighbour"), 2 * wide, wide)[:wide],
                "bias": kaiming_bias(fold(key, block, "bias"), 2 * wide, wide),
                "out": linear(fold(key, block, "out"), wide, wide),
            }
            for block in range(self.layers)
        ]
        first = linear(fold(key, "first"), self.features, wide)
        return [first, *blocks, linear(fold(key, "last"), wide, self.classes)]

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """The normalised output of the last block, (N, hidden)."""
        h = matmul(graph.views["x"], params[0]["weight"]) + params[0]["bias"]
        h = dropout(h, key, graph.ids, self.dropout, "residual", 0, after=torch.relu)
        outputs = [h]
        for number, block in enumerate(params[1:-1], start=1):
            u = self._normalised(h)
            mean = matmul(graph.views["mean"], matmul(u, block["neighbour"]))
            inner = mean + matmul(u, block["self"]) + block["bias"]
            noise = key, graph.ids, self.dropout, "residual", number
            h = h + apply_linear(block["out"], dropout(inner, *noise, after=torch.relu))
            outputs.append(h)
        last = torch.stack(outputs).mean(0) if self.jump else h
        return self._normalised(last)

    def logits(self, params: Tree, h: Tensor, graph: Graph, key: Tensor | None = None) -> Tensor:
        """The last layer on the output of `embed`, (N, C)."""
        return apply_linear(params[-1], h)

    def _normalised(self, h: Tensor) -> Tensor:
        return functional.layer_norm(h, h.shape[-1:]) if self.norm == "layer" else h


@dataclass(frozen=True)
class Duo:
    """A GCN and a residual network side by side, whose probabilities are averaged."""

    features: int
    classes: int
    hidden: Hidden = 64
    layers: Layers = 2
    dropout: Dropout = 0.5

    @property
    def branches(self) -> tuple[GCN, Residual]:
        """The two networks, in the order of their parameters."""
        sizes = self.features, self.classes, self.hidden, self.layers, self.dropout
        return GCN(*sizes), Residual(*sizes)

    @property
    def reach(self) -> int:
        """How many hops away the logits of a node look."""
        return self.layers

    @property
    def views(self) -> Mapping[str, View]:
        return {name: view for net in self.branches for name, view in net.views.items()}

    def init(self, key: Tensor) -> Tree:
        return [net.init(fold(key, place)) for place, net in enumerate(self.branches)]

    def each(self, params: Tree, graph: Graph, key: Tensor | None = None) -> list[Tensor]:
        """The logits of each branch, (N, C)."""
        keys = [None if key is None else fold(key, "branch", place) for place in range(2)]
        branches = zip(self.branches, params, keys, strict=True)
        return [net(own, graph, noise) for net, own, noise in branches]

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """The logarithm of the mean probabilities, (N, C)."""
        return torch.stack(
            [functional.log_softmax(one, -1) for one in self.each(params, graph, key)]
        ).logsumexp(0)
