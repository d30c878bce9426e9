"""Graph isomorphism networks for nodes and for graphs (Xu et al., 2019).

    H <- dropout(relu(relu((A + (1 + ε) I) H W_1 + b_1) W_2 + b_2)),   ε = 0, not trained,

`layers` times. `GIN` continues with H W + b, for nodes. `GraphGIN` is GCFL's network (Xie et al.,
2021): it starts from X W_pre + b_pre, pools H over each graph, and continues with
dropout(relu(H W_post + b_post)) W + b. Its layers before and after the convolutions fit a client's
own features and classes and are private.

There is no batch normalisation. Shapes: x (N, D), logits (N, C); a graph's logits are at its root.
There is no dropout on the input, so (A + I) X is computed once. Unlike PyG's `GINConv`, the sum is
weighted if the data have edge weights. Without edge weights both are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from atoll.core.graph import Graph, Sparse, View
from atoll.core.hyper import Dropout, Hidden, Layers
from atoll.core.method import Embedder
from atoll.core.random import dropout, dropout_mask, fold
from atoll.core.task import GRAPHS
from atoll.core.tree import Tree, inside_transform, tree_map
from atoll.core.vmap.stacks import Context, Gradients, call
from atoll.nn import views
from atoll.nn.dense import dense_layer, evened, raw_product, rows_to_even
from atoll.nn.init import apply_linear, linear
from atoll.nn.ops import at_columns, bags, both_ways, by_row, matmul, row_max, tall_matmul


@dataclass(frozen=True)
class GIN(Embedder):
    """A network of `layers` convolutions of width `hidden` and a linear layer."""

    features: int
    classes: int
    hidden: Hidden = 64
    layers: Layers = 2
    dropout: Dropout = 0.5

    @property
    def views(self) -> Mapping[str, View]:
        return views.first_layer("sum", views.sum_adjacency)

    def init(self, key: Tensor) -> Tree:
        widths = [self.features, *[self.hidden] * (self.layers - 1)]
        convolutions = _convolutions(key, widths, self.hidden)
        return [*convolutions, linear(fold(key, self.layers), self.hidden, self.classes)]

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return the input of the last, linear layer, (N, hidden)."""
        first, *rest = params[:-1]
        h = _perceptron(first, views.first_product(graph, "sum", first["inner"]["weight"]))
        return _convolved(rest, h, graph, key, self.dropout)

    def logits(self, params: Tree, h: Tensor, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return the logits, (N, C): the linear layer applied to the output `h` of `embed`."""
        out: Tensor = matmul(h, params[-1]["weight"]) + params[-1]["bias"]
        return out


@dataclass(frozen=True)
class GraphGIN(Embedder):
    """GCFL's network: private linear layers around shared convolutions and a pooling of graphs."""

    features: int
    classes: int
    hidden: Hidden = 64
    layers: Layers = 3
    dropout: Dropout = 0.5
    pool: Annotated[Literal["sum", "mean", "max"], "pooling of a graph's nodes"] = "sum"

    task: ClassVar[str] = GRAPHS.name
    private: ClassVar[tuple[str, ...]] = ("pre", "post", "readout")

    @property
    def views(self) -> Mapping[str, View]:
        pool = partial(views.pool, mean=self.pool == "mean")
        return {"sum": views.sum_adjacency, "sum_x1": views.sum_features_and_ones, "pool": pool}

    def init(self, key: Tensor) -> Tree:
        """Initialise the convolutions, which can be shared, and the private layers around them."""
        wide, classes = self.hidden, self.classes
        shapes = {"pre": (self.features, wide), "post": (wide, wide), "readout": (wide, classes)}
        around = {name: linear(fold(key, name), *shape) for name, shape in shapes.items()}
        return {"convolutions": _convolutions(key, [wide] * self.layers, wide), **around}

    def init_private(self, key: Tensor, graph: Graph) -> Tree:
        """Initialise the private layers, the first as if only the client's features existed."""
        fresh = {name: part for name, part in self.init(key).items() if name in self.private}
        if graph.has_features is None:
            return fresh
        # The range is 1/sqrt(width). Columns that only other clients have stay zero.
        own = graph.has_features
        widen = math.sqrt(self.features) / own.sum().clamp(min=1).sqrt()
        fresh["pre"] = tree_map(lambda leaf: leaf * widen, fresh["pre"])
        fresh["pre"]["weight"] = fresh["pre"]["weight"] * own.unsqueeze(-1)
        return fresh

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return one row per graph, (G, hidden), before the last activation and dropout."""
        first, *rest = params["convolutions"]
        # (A + I) (X W_pre + b_pre) W_1, multiplied from the right, where the matrices are small.
        before = torch.cat([params["pre"]["weight"], params["pre"]["bias"].unsqueeze(0)])
        before = before @ first["inner"]["weight"]
        # Up to the first dropout, a node's numbers depend only on its row.
        h = by_row(partial(_first, first, before), graph.views["sum_x1"])
        h = _convolved(rest, h, graph, key, self.dropout)
        pool = graph.sparse_view("pool")
        h = row_max(pool, at_columns(pool, h)) if self.pool == "max" else matmul(pool, h)
        return apply_linear(params["post"], graph.at_roots(h))

    def logits(self, params: Tree, h: Tensor, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return logits from the output `h` of `embed`. A graph's are at its root, (N, C)."""
        ids = graph.at_roots(graph.ids)
        h = dropout(h, key, ids, self.dropout, "dropout", self.layers, after=torch.relu)
        logits = apply_linear(params["readout"], h)
        if graph.has_classes is not None:
            logits = torch.where(graph.has_classes > 0, logits, torch.full_like(logits, -1e30))
        return graph.from_roots(logits)


def _first(layer: Tree, weight: Tensor, x: Tensor | Sparse) -> Tensor:
    """Apply the first convolution to rows that are already summed over neighbours."""
    if isinstance(x, Tensor) and not x.is_cuda:
        return _rectified(x, {**layer["inner"], "weight": weight}, layer["outer"])
    return _perceptron(layer, matmul(x, weight))


def _rectified(h: Tensor, *layers: Tree) -> Tensor:
    """Apply linear layers with ReLUs on a CPU. A large layer with its ReLU is one kernel."""
    out = evened(h)
    for layer in layers:
        out = dense_layer(out, layer["weight"], layer["bias"], relu=True)
    return out[: len(h)]


def _perceptron(layer: Tree, h: Tensor) -> Tensor:
    """Apply the rest of a convolution, after its first product and the sum over neighbours."""
    h, outer = torch.relu_(h + layer["inner"]["bias"]), layer["outer"]
    if h.is_cuda:
        return torch.relu_(tall_matmul(h, outer["weight"]) + outer["bias"])
    return _rectified(h, outer)


def _convolved(layers: Tree, h: Tensor, graph: Graph, key: Tensor | None, rate: float) -> Tensor:
    """Apply dropout to the first convolution's output h, then the other convolutions."""
    adjacency = graph.sparse_view("sum")
    h = dropout(h, key, graph.ids, rate, "dropout", 0)
    for number, layer in enumerate(layers, start=1):
        inner, outer = layer["inner"], layer["outer"]
        # `_Convolution` has no gradient with respect to the entries of the adjacency.
        if not (h.is_cuda or inside_transform() or adjacency.values.requires_grad):
            mask, scale = dropout_mask(h, key, graph.ids, rate, "dropout", number)
            parts = (part[name] for part in (inner, outer) for name in ("weight", "bias"))
            h, *_ = call(_Convolution, *both_ways(adjacency), h, *parts, mask, scale)
            continue
        if h.is_cuda:
            h = _perceptron(layer, matmul(adjacency, tall_matmul(h, inner["weight"])))
        else:
            h = _rectified(matmul(adjacency, h), inner, outer)
        h = dropout(h, key, graph.ids, rate, "dropout", number)
    return h


class _Convolution(Function):
    """A convolution with its dropout on a CPU, as one step of autograd.

    It overwrites its own intermediate results and pads rows where that needs no copy, so a round of
    GCFL+ takes 0.30 instead of 0.33 s. The arguments are the adjacency (`both_ways`), h, weight and
    bias of both layers, and dropout's mask and scale. It has no second derivative.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        offsets, columns, values, _, _, _, h, inner, inner_bias, outer, outer_bias, mask, _ = args
        more = rows_to_even(len(h), h.dtype)
        ends = torch.cat([offsets, offsets.new_full((more,), len(columns))]) if more else offsets
        sums = bags(h, columns, ends, values)
        middle = raw_product(sums, inner, inner_bias, relu=True)
        out = raw_product(middle, outer, outer_bias, relu=True)[: len(h)]
        return out if mask is None else out.mul_(mask), sums, middle

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, _, _, *transposed, _, inner, _, outer, _, _, scale = inputs
        ctx.save_for_backward(*transposed, inner, outer, *output)
        ctx.rest = (scale,)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        t_offsets, t_columns, t_values, inner, outer, out, sums, middle = ctx.saved_tensors
        (scale,) = ctx.rest
        slope = torch.ops.aten.threshold_backward.grad_input
        rows = len(out)
        # An output is zero if dropout or the ReLU made it zero.
        by_outer = torch.empty_like(middle)
        slope(grads[0], out, 0, grad_input=by_outer[:rows])
        by_outer[rows:] = 0
        by_inner = raw_product(by_outer, (outer * scale).mT)
        slope(by_inner, middle, 0, grad_input=by_inner)
        by_h = bags(raw_product(by_inner, inner.mT), t_columns, t_offsets, t_values)
        by_layers = (
            raw_product(sums.mT, by_inner),
            by_inner.sum(0),
            raw_product(middle.mT, by_outer).mul_(scale),
            by_outer.sum(0).mul_(scale),
        )
        return (*[None] * 6, by_h, *by_layers, None, None)


def _convolutions(key: Tensor, widths: list[int], hidden: int) -> list[Tree]:
    return [
        {
            "inner": linear(fold(key, layer, "inner"), width, hidden),
            "outer": linear(fold(key, layer, "outer"), hidden, hidden),
        }
        for layer, width in enumerate(widths)
    ]
