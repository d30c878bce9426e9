"""Graph attention network (Veličković et al., 2018).

    H <- dropout(elu(‖_k Σ_j α_ij^k W^k h_j + b)),   α_ij = softmax_j leaky_relu(s·W h_j + t·W h_i),

j over the neighbours of i and i itself; `heads` heads side by side, one head and no activation in
the last layer. Shapes: x (N, D), logits (N, C).

The paper also drops inputs and attention coefficients; federated graph learning uses PyG's
`GATConv` with its defaults, which drops neither, and so do we. As there, weights of edges are not
read, except that an edge of weight zero is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from torch import Tensor
from torch.nn import functional

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, Sparse, View
from atoll.core.hyper import OneOrMore
from atoll.core.random import fold
from atoll.core.tree import Tree
from atoll.nn import views
from atoll.nn.init import glorot, zeros
from atoll.nn.layered import Layered
from atoll.nn.ops import at_columns, at_rows, edge_softmax, matmul, row_sum


@dataclass(frozen=True)
class GAT(Layered):
    """Layers of width `hidden`, which `heads` heads share equally; the last of width `classes`."""

    heads: Annotated[OneOrMore, "attention heads, which share the width"] = 8

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(
                f"GAT: hidden = {self.hidden} cannot be shared equally by heads = {self.heads}; "
                "use a multiple"
            )

    @property
    def views(self) -> Mapping[str, View]:
        """The neighbourhoods that are attended to, and X."""
        return {"loop": views.loop_adjacency, "x": views.features}

    def init(self, key: Tensor) -> Tree:
        """A weight, two attention vectors per head and a bias per layer."""
        shapes = zip(pairwise(self.widths), [*[self.heads] * (self.layers - 1), 1], strict=True)
        return [
            {
                "weight": glorot(fold(key, layer, "weight"), n_in, n_out),
                "source": glorot(fold(key, layer, "source"), num, n_out // num),
                "target": glorot(fold(key, layer, "target"), num, n_out // num),
                "bias": zeros(key, n_out),
            }
            for layer, ((n_in, n_out), num) in enumerate(shapes)
        ]

    def _first(self, layer: Tree, graph: Graph) -> Tensor:
        return _attend(graph, matmul(graph.views["x"], layer["weight"]), layer)

    def _activation(self, h: Tensor) -> Tensor:
        return functional.elu(h)

    def _further(self, layer: Tree, h: Tensor, number: int, graph: Graph) -> Tensor:
        return _attend(graph, h @ layer["weight"], layer)


def _attend(graph: Graph, h: Tensor, layer: Tree) -> Tensor:
    """Each node's mean of its neighbours' rows of h, (N, H * D), weighted by attention per head."""
    edges = graph.views["loop"]
    assert isinstance(edges, Sparse)
    num, width = layer["source"].shape
    by_head = h.reshape(-1, num, width)
    sent = at_columns(edges, (by_head * layer["source"]).sum(-1))
    asked = at_rows(edges, (by_head * layer["target"]).sum(-1))
    attention = edge_softmax(edges, functional.leaky_relu(sent + asked, 0.2))
    messages = at_columns(edges, h).reshape(-1, num, width) * attention.unsqueeze(-1)
    out: Tensor = row_sum(edges, messages.flatten(1)) + layer["bias"]
    return out
