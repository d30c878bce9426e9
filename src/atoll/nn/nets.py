"""Standard networks for nodes, and evaluators that score every directed edge.

Shapes: x (N, D), logits (N, C). No network for nodes has dropout on its input, so the product of
adjacency and X is computed once if that saves work. Scores of edges, (E,), are in the order of the
entries of the view `loops` (A + I). Scores of self-loops are not used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, Sparse, View
from atoll.core.hyper import Dropout, Hidden, Layers, OneOrMore
from atoll.core.random import dropout, fold
from atoll.core.tree import Tree
from atoll.nn import views
from atoll.nn.edges import Propagation
from atoll.nn.init import apply_linear, glorot, kaiming, kaiming_bias, linear, zeros
from atoll.nn.ops import at_columns, at_rows, edge_softmax, matmul, row_sum


@dataclass(frozen=True)
class Layered(ABC):
    """A stack of layers, H <- dropout(activation(layer(H))). The last layer returns the logits."""

    features: int
    classes: int
    hidden: Hidden = 64
    layers: Layers = 2
    dropout: Dropout = 0.5

    @property
    def widths(self) -> list[int]:
        """The widths of the input and of every layer's output."""
        return [self.features, *[self.hidden] * (self.layers - 1), self.classes]

    @property
    def reach(self) -> int:
        """The number of hops that a node's logits depend on."""
        return self.layers

    @property
    def embeds(self) -> bool:
        """Whether the network has a hidden layer."""
        return self.layers > 1

    @abstractmethod
    def _first(self, layer: Tree, graph: Graph) -> Tensor:
        """Return the output of the first layer, which reads the graph's features."""

    @abstractmethod
    def _further(self, layer: Tree, h: Tensor, number: int, graph: Graph) -> Tensor:
        """Apply layer `number` to the previous output after activation and dropout."""

    _activation = staticmethod(torch.relu)

    def dropped(self, h: Tensor, number: int, graph: Graph, key: Tensor | None) -> Tensor:
        """Apply activation and dropout to h, the input of layer `number`."""
        noise = key, graph.ids, self.dropout, "dropout", number
        return dropout(h, *noise, after=self._activation)

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return logits, (N, C). A key turns dropout on."""
        h = self._first(params[0], graph)
        for number, layer in enumerate(params[1:], start=1):
            h = self._further(layer, self.dropped(h, number, graph, key), number, graph)
        return h

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return the last layer's input before its activation and dropout, (N, hidden)."""
        return Layered.__call__(self, params[:-1], graph, key)

    def logits(self, params: Tree, h: Tensor, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return logits, (N, C), from the output `h` of `embed`."""
        return self.last(params, self.dropped(h, len(params) - 1, graph, key), graph)

    def read(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return the last layer's input after its activation and dropout, (N, hidden)."""
        return self.dropped(self.embed(params, graph, key), len(params) - 1, graph, key)

    def last(self, params: Tree, h: Tensor, graph: Graph) -> Tensor:
        """Return logits, (N, C), from the output `h` of `read`."""
        return self._further(params[-1], h, len(params) - 1, graph)


@dataclass(frozen=True)
class MLP(Layered):
    """Multi-layer perceptron, H W + b, as a baseline that ignores the graph."""

    @property
    def reach(self) -> int:
        return 0

    @property
    def views(self) -> Mapping[str, View]:
        return {"x": views.features}

    def init(self, key: Tensor) -> Tree:
        widths = enumerate(pairwise(self.widths))
        return [linear(key, n_in, n_out, layer) for layer, (n_in, n_out) in widths]

    def _first(self, layer: Tree, graph: Graph) -> Tensor:
        h: Tensor = matmul(graph.views["x"], layer["weight"]) + layer["bias"]
        return h

    def _further(self, layer: Tree, h: Tensor, number: int, graph: Graph) -> Tensor:
        return apply_linear(layer, h)


@dataclass(frozen=True)
class GCN(Layered):
    """Graph convolutional network (Kipf and Welling, 2017): Â H W + b, Â = D^-1/2 (A + I) D^-1/2.

    With `head=linear` the last layer is H W + b, as in FED-PUB's network after two convolutions.
    """

    head: Annotated[Literal["conv", "linear"], "last layer: convolution or linear"] = "conv"

    def __post_init__(self) -> None:
        if self.head == "linear" and self.layers < 2:
            raise ConfigError("head=linear needs a convolution before it; give layers=2 or more")

    @property
    def views(self) -> Mapping[str, View]:
        return views.first_layer("gcn", views.gcn_adjacency)

    def init(self, key: Tensor) -> Tree:
        params = [
            {"weight": glorot(fold(key, layer), n_in, n_out), "bias": zeros(key, n_out)}
            for layer, (n_in, n_out) in enumerate(pairwise(self.widths))
        ]
        if self.head == "linear":
            params[-1] = linear(fold(key, self.layers - 1), *self.widths[-2:])
        return params

    def _first(self, layer: Tree, graph: Graph) -> Tensor:
        return views.first_product(graph, "gcn", layer["weight"], layer["bias"])

    def _further(self, layer: Tree, h: Tensor, number: int, graph: Graph) -> Tensor:
        return self.convolved(layer, h, number, partial(matmul, graph.views["gcn"]))

    def _is_head(self, number: int) -> bool:
        return self.head == "linear" and number == self.layers - 1

    def on(
        self, propagate: Propagation, params: Tree, graph: Graph, key: Tensor | None = None
    ) -> Tensor:
        """Return logits with `propagate` instead of Â. The graph needs the view `x`."""
        h = propagate(matmul(graph.views["x"], params[0]["weight"]), params[0]["bias"])
        for number, layer in enumerate(params[1:], start=1):
            h = self.convolved(layer, self.dropped(h, number, graph, key), number, propagate)
        return h

    def convolved(self, layer: Tree, h: Tensor, number: int, propagate: Propagation) -> Tensor:
        """Apply layer `number` to the output of `dropped`, with the given propagation."""
        h = matmul(h, layer["weight"])
        out: Tensor = h + layer["bias"] if self._is_head(number) else propagate(h, layer["bias"])
        return out


@dataclass(frozen=True)
class GraphSAGE(Layered):
    """GraphSAGE with the mean aggregator (Hamilton et al., 2017): D^-1 A H W_n + H W_s + b.

    All neighbours are used; none are sampled. As in PyG's `SAGEConv`, the mean ignores edge
    weights, and the mean of a node without neighbours is zero.
    """

    @property
    def views(self) -> Mapping[str, View]:
        return {**views.first_layer("mean", views.mean_adjacency), "x": views.features}

    def init(self, key: Tensor) -> Tree:
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


@dataclass(frozen=True)
class GAT(Layered):
    """Graph attention network (Veličković et al., 2018). Its heads share `hidden` equally.

        ‖_k Σ_j α_ij^k W^k h_j + b,   α_ij = softmax_j leaky_relu(s·W h_j + t·W h_i),

    for heads k with attention vectors s and t, and j over the neighbours of i and i itself. The
    activation is ELU, and the last layer has one head.
    The paper also has dropout on inputs and attention coefficients. PyG's `GATConv`, which
    federated graph learning uses with its defaults, has neither. As there, edge weights are
    ignored, except that an edge of weight zero does not exist.
    """

    heads: Annotated[OneOrMore, "attention heads, which share the width"] = 8

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            sizes = f"hidden = {self.hidden} cannot be divided equally by heads = {self.heads}"
            raise ConfigError(f"GAT: {sizes}; use a multiple")

    @property
    def views(self) -> Mapping[str, View]:
        return {"loop": views.loop_adjacency, "x": views.features}

    def init(self, key: Tensor) -> Tree:
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

    _activation = staticmethod(functional.elu)

    def _further(self, layer: Tree, h: Tensor, number: int, graph: Graph) -> Tensor:
        return _attend(graph, h @ layer["weight"], layer)


def _attend(graph: Graph, h: Tensor, layer: Tree) -> Tensor:
    """Return the attention-weighted means of the neighbours' rows of h, per head, plus the bias."""
    edges = graph.sparse_view("loop")
    num, width = layer["source"].shape
    by_head = h.reshape(-1, num, width)
    source = at_columns(edges, (by_head * layer["source"]).sum(-1))
    target = at_rows(edges, (by_head * layer["target"]).sum(-1))
    attention = edge_softmax(edges, functional.leaky_relu(source + target, 0.2))
    messages = at_columns(edges, h).reshape(-1, num, width) * attention.unsqueeze(-1)
    out: Tensor = row_sum(edges, messages.flatten(1)) + layer["bias"]
    return out


@dataclass(frozen=True)
class SGC:
    """Simple graph convolution (Wu et al., 2019): Â^hops X W + b, one linear layer, no dropout."""

    features: int
    classes: int
    hops: Annotated[OneOrMore, "number of products with the adjacency"] = 2

    @property
    def reach(self) -> int:
        return self.hops

    @property
    def views(self) -> Mapping[str, View]:
        return {self._view: partial(views.hop_features, hops=self.hops)}

    @property
    def _view(self) -> str:
        # The name includes the hops, because two networks of a method may share one dict of views.
        return f"sgc{self.hops}_x"

    def init(self, key: Tensor) -> Tree:
        return [linear(key, self.features, self.classes)]

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return logits, (N, C)."""
        h: Tensor = matmul(graph.views[self._view], params[0]["weight"]) + params[0]["bias"]
        return h


def edge_mask(adjacency: Sparse) -> Tensor:
    """Return one for edges, zero for self-loops and padding, (E,)."""
    real = (adjacency.rows != adjacency.columns) & (adjacency.values != 0)
    return real.to(adjacency.values.dtype)


@dataclass(frozen=True)
class EdgeMLP:
    """Φ(i, j) = MLP([x_i ‖ x_j]), two layers on the raw features (FedATH, Eq. 5)."""

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
        # A layer on [x_i ‖ x_j] is the sum of layers on x_i and on x_j, without an (E, 2D) tensor.
        adjacency, x = graph.sparse_view("loops"), graph.views["x"]
        source = at_columns(adjacency, matmul(x, params["source"]))
        target = at_rows(adjacency, matmul(x, params["target"]))
        return apply_linear(params["out"], torch.relu(source + target + params["bias"])).squeeze(-1)


@dataclass(frozen=True)
class EdgeGNN:
    """Φ(i, j) = MLP([h_i ‖ h_j]), h = GCN(GCN(X W + b)), with batch normalisation (FedATH's code).

    There are no biases right before a normalisation, where they cancel. Their gradient would be
    rounding noise, which Adam would amplify until two machines disagree.
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
        # As in EdgeMLP: a layer on [h_i ‖ h_j] is the sum of layers on h_i and on h_j.
        source, target = first["weight"].split(self.classes)
        e = at_columns(adjacency, h @ source) + at_rows(adjacency, h @ target)
        e = torch.relu(_batch_norm(e, mask, first))
        for layer in rest:
            e = torch.relu(_batch_norm(e @ layer["weight"], mask, layer))
        return apply_linear(params["out"], e).squeeze(-1)


def _batch_norm(e: Tensor, mask: Tensor, layer: Tree) -> Tensor:
    """Normalise over all edges of the graph. Equal edges (or a single edge) give the shift."""
    share = mask.unsqueeze(-1) / mask.sum().clamp(min=1)
    mean = (e * share).sum(0)
    variance = ((e - mean) ** 2 * share).sum(0)
    out: Tensor = (e - mean) * (variance + 1e-5).rsqrt() * layer["scale"] + layer["shift"]
    return out
