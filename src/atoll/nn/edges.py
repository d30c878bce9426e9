"""Edge evaluators, which give every directed edge a score, and graphs weighted by such scores.

    mlp   Φ(i, j) = MLP([x_i ‖ x_j])                            on the raw features (FedATH, Eq. 5)
    gnn   Φ(i, j) = MLP([h_i ‖ h_j]),  h = GCN(GCN(X W + b))    as in FedATH's public code

Scores, (E,), stand in the order of the entries of the view `loops` (A + I); those of self-loops are
not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from atoll.core.graph import Graph, Sparse, View
from atoll.core.random import dropout, fold
from atoll.core.tree import Tree
from atoll.nn import views
from atoll.nn.init import apply_linear, glorot, kaiming, kaiming_bias, linear, zeros
from atoll.nn.ops import at_columns, at_rows, matmul, row_sum, with_values


def edge_mask(adjacency: Sparse) -> Tensor:
    """One for edges, zero for self-loops and padding, (E,)."""
    real = (adjacency.rows != adjacency.columns) & (adjacency.values != 0)
    return real.to(adjacency.values.dtype)


def weighted_gcn(adjacency: Sparse, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Multiplication by D^-1/2 (A∘w + I) D^-1/2 with D_i = 1 + Σ_j w_ij; gradients flow through D.

    The adjacency is the view `loops`; self-loops keep weight one.
    """
    edge = edge_mask(adjacency)
    matrix = with_values(adjacency, edge * weight + (1 - edge))
    scale = row_sum(adjacency, matrix.values.unsqueeze(-1)).clamp(min=1e-12).rsqrt()
    # Scaling the nodes before and after is cheaper than scaling every entry.
    return lambda h: scale * matmul(matrix, scale * h)


@dataclass(frozen=True)
class EdgeMLP:
    """Two layers on the concatenated raw features of source and target."""

    features: int
    hidden: int = 64

    @property
    def views(self) -> Mapping[str, View]:
        return {"loops": views.loop_adjacency, "x": views.features}

    def init(self, key: Tensor) -> Tree:
        width = 2 * self.features
        return {
            "source": kaiming(fold(key, "source"), width, self.hidden)[: self.features],
            "target": kaiming(fold(key, "target"), width, self.hidden)[: self.features],
            "bias": kaiming_bias(fold(key, "bias"), width, self.hidden),
            "out": linear(fold(key, "out"), self.hidden, 1),
        }

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        # A layer on [x_i ‖ x_j] is the sum of a layer on x_i and one on x_j: no (E, 2D) tensor.
        adjacency, x = graph.sparse_view("loops"), graph.views["x"]
        source = at_columns(adjacency, matmul(x, params["source"]))
        target = at_rows(adjacency, matmul(x, params["target"]))
        return apply_linear(params["out"], torch.relu(source + target + params["bias"])).squeeze(-1)


@dataclass(frozen=True)
class EdgeGNN:
    """Linear, two graph convolutions, then an MLP with batch normalisation on [h_i ‖ h_j].

    Biases right before a normalisation cancel. They are left out: their gradient is rounding noise,
    which Adam would blow up until two machines disagree.
    """

    features: int
    classes: int
    hidden: int = 512
    dropout: float = 0.5

    @property
    def views(self) -> Mapping[str, View]:
        return {"loops": views.loop_adjacency, "x": views.features, "gcn": views.gcn_adjacency}

    def init(self, key: Tensor) -> Tree:
        wide, narrow = self.hidden, self.classes
        widths = [2 * narrow, narrow, max(1, narrow // 2)]
        return {
            "first": linear(fold(key, "first"), self.features, wide),
            "gcn": [
                {"weight": glorot(fold(key, "gcn", 0), wide, wide), "bias": zeros(key, wide)},
                {"weight": glorot(fold(key, "gcn", 1), wide, narrow)},
            ],
            "mlp": [
                {
                    "weight": kaiming(fold(key, "mlp", i), n_in, n_out),
                    "scale": zeros(key, n_out) + 1,
                    "shift": zeros(key, n_out),
                }
                for i, (n_in, n_out) in enumerate(pairwise(widths))
            ],
            "out": linear(fold(key, "out"), widths[-1], 1),
        }

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        keys = [None if key is None else fold(key, "scorer", i) for i in range(2)]
        adjacency, gcn = graph.sparse_view("loops"), graph.views["gcn"]
        mask = edge_mask(adjacency)
        h = matmul(graph.views["x"], params["first"]["weight"]) + params["first"]["bias"]
        h = dropout(h, keys[0], graph.ids, self.dropout)
        one, two = params["gcn"]
        h = torch.relu(matmul(gcn, h @ one["weight"]) + one["bias"])
        h = dropout(h, keys[1], graph.ids, self.dropout)
        h = matmul(gcn, h @ two["weight"])
        first, *rest = params["mlp"]
        # As in EdgeMLP: a layer on [h_i ‖ h_j] is the sum of one on h_i and one on h_j.
        source, target = first["weight"].split(self.classes)
        e = at_columns(adjacency, h @ source) + at_rows(adjacency, h @ target)
        e = torch.relu(_batch_norm(e, mask, first))
        for layer in rest:
            e = torch.relu(_batch_norm(e @ layer["weight"], mask, layer))
        return apply_linear(params["out"], e).squeeze(-1)


def _batch_norm(e: Tensor, mask: Tensor, layer: Tree) -> Tensor:
    """Normalise over the graph's edges, which are all there in training and in prediction.

    With one edge, or equal ones, the variance is zero and the result is the shift.
    """
    share = mask.unsqueeze(-1) / mask.sum().clamp(min=1)
    mean = (e * share).sum(0)
    variance = ((e - mean) ** 2 * share).sum(0)
    out: Tensor = (e - mean) * (variance + 1e-5).rsqrt() * layer["scale"] + layer["shift"]
    return out
