"""Residual networks that separate a node from its neighbours, and their ensemble with a GCN.

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
from atoll.nn.normalise import normalised
from atoll.nn.ops import matmul


@dataclass(frozen=True)
class Residual(Embedder):
    """Residual blocks with separate weights for a node and its neighbours (Platonov et al., 2023).

        h_0 = relu(X W + b);   u = norm(h_l-1)
        h_l = h_l-1 + relu(u W_s + D^-1 A u W_n + b),   l = 1, ..., L

    The logits are norm(h_L) W + b. With `jump`, the mean of h_0, ..., h_L replaces h_L (jumping
    knowledge, Xu et al., 2018). Dropout acts on h_0 and after the ReLU of each block. The
    normalisation has no weights, because a linear map follows each one.
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
        """The number of hops that a node's logits depend on."""
        return self.layers

    @property
    def views(self) -> Mapping[str, View]:
        return {"mean": views.mean_adjacency, "x": views.features}

    def init(self, key: Tensor) -> Tree:
        wide = self.hidden
        # The range of a linear map of a node and its mean neighbour, `linear(key, 2 * wide, wide)`.
        blocks = [
            {
                "weight": kaiming(fold(key, block, "weight"), 2 * wide, wide).reshape(wide, -1),
                "bias": kaiming_bias(fold(key, block, "bias"), 2 * wide, wide),
            }
            for block in range(self.layers)
        ]
        first = linear(fold(key, "first"), self.features, wide)
        return [first, *blocks, linear(fold(key, "last"), wide, self.classes)]

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return the normalised input of the last layer, (N, hidden)."""
        h = matmul(graph.views["x"], params[0]["weight"], params[0]["bias"])
        h = dropout(h, key, graph.ids, self.dropout, "residual", 0, after=torch.relu)
        outputs = [h]
        for number, block in enumerate(params[1:-1], start=1):
            # One product with both matrices, W_s and W_n. The bias joins the sparse product.
            own, neighbours = matmul(self._normalised(h), block["weight"]).chunk(2, -1)
            inner = own + matmul(graph.views["mean"], neighbours, block["bias"])
            noise = key, graph.ids, self.dropout, "residual", number
            h = h + dropout(inner, *noise, after=torch.relu)
            outputs.append(h)
        last = torch.stack(outputs).mean(0) if self.jump else h
        return self._normalised(last)

    def logits(self, params: Tree, h: Tensor, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return logits, (N, C), from the output `h` of `embed`."""
        return apply_linear(params[-1], h)

    def _normalised(self, h: Tensor) -> Tensor:
        return normalised(h) if self.norm == "layer" else h


@dataclass(frozen=True)
class Duo(Embedder):
    """A GCN and a residual network of half its width, whose probabilities are averaged."""

    features: int
    classes: int
    hidden: Hidden = 64
    layers: Annotated[Layers, "layers of the GCN, and blocks of the residual network"] = 2
    dropout: Dropout = 0.5

    @property
    def branches(self) -> tuple[GCN, Residual]:
        """The two networks, in the order of their parameters."""
        shape, rest = (self.features, self.classes), (self.layers, self.dropout)
        return GCN(*shape, self.hidden, *rest), Residual(*shape, max(1, self.hidden // 2), *rest)

    @property
    def width(self) -> int:
        """The width of the embedding."""
        return self.hidden + max(1, self.hidden // 2)

    @property
    def embeds(self) -> bool:
        """Whether both networks have a hidden layer."""
        return self.layers > 1

    @property
    def reach(self) -> int:
        """The number of hops that a node's logits depend on."""
        return self.layers

    @property
    def views(self) -> Mapping[str, View]:
        gcn, residual = self.branches
        return {**gcn.views, **residual.views}

    @property
    def _nets(self) -> tuple[Embedder, ...]:
        return self.branches

    def init(self, key: Tensor) -> Tree:
        gcn, residual = self.branches
        return [gcn.init(fold(key, 0)), residual.init(fold(key, 1))]

    def each(self, params: Tree, graph: Graph, key: Tensor | None = None) -> list[Tensor]:
        """Return the logits of each branch, (N, C)."""
        parts = zip(self._nets, params, _keys(key), strict=True)
        return [net(own, graph, noise) for net, own, noise in parts]

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return the logarithm of the mean probabilities, up to a constant, (N, C)."""
        return _log_mean(self.each(params, graph, key))

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Concatenate the embeddings of both branches, (N, hidden + hidden // 2)."""
        parts = zip(self._nets, params, _keys(key), strict=True)
        return torch.cat([net.embed(own, graph, noise) for net, own, noise in parts], -1)

    def logits(self, params: Tree, h: Tensor, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return logits as in a call, (N, C), from the output `h` of `embed`."""
        cut = h[..., : self.hidden], h[..., self.hidden :]
        parts = zip(self._nets, params, cut, _keys(key), strict=True)
        return _log_mean([net.logits(own, x, graph, noise) for net, own, x, noise in parts])


def _keys(key: Tensor | None) -> list[Tensor | None]:
    return [None if key is None else fold(key, "branch", place) for place in range(2)]


def _log_mean(logits: list[Tensor]) -> Tensor:
    return torch.logaddexp(*(functional.log_softmax(one, -1) for one in logits))
