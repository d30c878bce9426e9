"""Disentangled graph convolutional network (Ma et al., 2019), as in FedIIH (Yu et al., 2025).

    H <- dropout(leaky_relu(X W + b)),           K factors side by side, each of width `hidden`
    H <- dropout(leaky_relu(route(H)))           in every routing layer
    logits = H W_c + b_c

A routing layer has no parameters. It normalises H in each factor to x̂, starts with u = x̂, and
repeats `iterations` times

    p_st^k = softmax_k <x̂_s^k, u_t^k>            the share of factor k in the edge s -> t
    u_t^k  = normalise(x̂_t^k + Σ_s p_st^k x̂_s^k)

over the neighbours s of t, excluding t itself. `routing` counts layers as in FedIIH. Its count
includes up to two layers, also without parameters, that compute latent means and variances
(`head`).

With two classes the classifier has one output z, and the logits are (0, z). Their cross entropy is
the binary cross entropy of z. `binary=two-logits` has two outputs instead.

Shapes: x (N, D), H (N, K * hidden), logits (N, C), shares p (T, K, E) for T passes. Edge weights
are ignored, except that an edge of weight zero does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from atoll.core.graph import Graph, Sparse, View, sparse_matrix
from atoll.core.hyper import Dropout, Hidden, OneOrMore, check_hypers
from atoll.core.kernels import on_gpu
from atoll.core.method import Embedder
from atoll.core.random import dropout, fold, uniform
from atoll.core.tree import Tree
from atoll.core.vmap.stacks import Context, Dims, Gradients, Vmap, as_batch
from atoll.nn import views
from atoll.nn.init import apply_linear, kaiming, kaiming_bias
from atoll.nn.ops import NoDerivative, bags, matmul

Tensors = tuple[Tensor, ...]

CACHED = 1 << 20  # largest per-node tensor (in numbers) of a routing pass on a CPU


def neighbours(graph: Graph) -> Sparse:
    """Return the binary adjacency A: every edge once, without self-loops."""
    source, target = graph.edges
    size = graph.num_nodes
    place = (target * size + source)[(source != target) & (graph.edge_weight != 0)].unique()
    ones = torch.ones_like(place, dtype=graph.real.dtype)
    return sparse_matrix(place // size, place % size, ones, (size, size), square=True)


@dataclass(frozen=True)
class DisenGCN(Embedder):
    """A network with `factors` factors of width `hidden`. `routing` is FedIIH's layer count."""

    features: int
    classes: int
    hidden: Hidden = 128
    factors: Annotated[OneOrMore, "number of factors of a node's embedding"] = 2
    routing: Annotated[OneOrMore, "number of routing layers"] = 4
    iterations: Annotated[OneOrMore, "steps of one routing layer"] = 6
    dropout: Dropout = 0.35
    binary: Annotated[Literal["one-logit", "two-logits"], "outputs for two classes"] = "one-logit"

    def __post_init__(self) -> None:
        check_hypers(self)

    @property
    def width(self) -> int:
        """The total width of all factors."""
        return self.factors * self.hidden

    @property
    def base_layers(self) -> int:
        """The number of routing layers before the classifier."""
        return max(1, self.routing - 2)

    @property
    def head_layers(self) -> int:
        """The number of routing layers of each head (latent means, and variances)."""
        return 1 if self.routing <= 2 else 2

    @property
    def views(self) -> Mapping[str, View]:
        return {"neighbours": neighbours, "x": views.features}

    def init(self, key: Tensor) -> Tree:
        """Initialise with the ranges of FedIIH's code. All are ±1/sqrt(K * hidden)."""
        wide, outputs = self.width, 1 if self._one_logit else self.classes
        weight = uniform(fold(key, "weight"), (self.features, wide), torch.get_default_dtype())
        bias = kaiming_bias(fold(key, "bias"), wide, wide)
        last = kaiming_bias(fold(key, "classifier", "bias"), wide, outputs)
        return {
            "encoder": {"weight": (weight * 2 - 1) / math.sqrt(wide), "bias": bias},
            "classifier": {"weight": kaiming(fold(key, "classifier"), wide, outputs), "bias": last},
        }

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return the input of the classifier and the heads, (N, K * hidden)."""
        encoder = params["encoder"]
        h = matmul(graph.views["x"], encoder["weight"]) + encoder["bias"]
        h = dropout(functional.leaky_relu(h), key, graph.ids, self.dropout, "project")
        return self._route(h, graph, key, "base", self.base_layers)

    def logits(self, params: Tree, h: Tensor, graph: Graph, key: Tensor | None = None) -> Tensor:
        """Return logits, (N, C), from the output `h` of `embed`."""
        out = apply_linear(params["classifier"], h)
        return torch.cat([torch.zeros_like(out), out], dim=-1) if self._one_logit else out

    def head(self, h: Tensor, graph: Graph, key: Tensor | None, name: str) -> Tensor:
        """Apply more routing layers to the output of `embed`. Dropout depends on the name."""
        return self._route(h, graph, key, name, self.head_layers)

    @property
    def _one_logit(self) -> bool:
        return self.classes == 2 and self.binary == "one-logit"

    def _route(self, h: Tensor, graph: Graph, key: Tensor | None, name: str, layers: int) -> Tensor:
        edges = graph.sparse_view("neighbours")
        for layer in range(layers):
            h = functional.leaky_relu(route(edges, h, self.factors, self.iterations))
            h = dropout(h, key, graph.ids, self.dropout, name, layer)
        return h


MATRIX = ("offsets", "columns", "rows", "values", "t_offsets", "t_columns", "t_order")
"""The tensors of a `Sparse` that routing reads, in the order of its functions' arguments."""


def route(edges: Sparse, x: Tensor, factors: int, iterations: int) -> Tensor:
    """Apply one routing layer to x, (N, K * hidden), without its activation."""
    matrix = [getattr(edges, name) for name in MATRIX]
    out: Tensor = _Route.apply(factors, iterations, x, *matrix)[0]  # type: ignore[no-untyped-call]
    return out


class _Route(Function):
    """All passes of a layer as one operation, which stores only the shares p, (T, K, E)."""

    @staticmethod
    def forward(factors: int, iterations: int, x: Tensor, *matrix: Tensor) -> tuple[Tensor, Tensor]:
        kernels = _kernels(x)
        if kernels is not None:
            u, kept = kernels.route(x.reshape(len(x), factors, -1), matrix, iterations)
            return u.flatten(1), kept
        edges, h = _Edges(matrix, factors), _by_factor(x, factors)
        u = start = h * _scale(h)
        shares = []
        for _ in range(iterations):
            shares.append(torch.softmax(edges.dot(u, start), dim=0).mul_(edges.real))
            u = edges.gather(shares[-1], start).add_(start)
            u.mul_(_scale(u))
        return _side_by_side(u), torch.stack(shares)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[int, int, *Tensors], output: Tensors) -> None:
        _, _, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], *tensors)

    @staticmethod
    def backward(ctx: Context, grad: Tensor, _: Tensor) -> Gradients:
        shares, x, *matrix = ctx.saved_tensors
        by_x = _RouteBack.apply(shares, grad, x, *matrix)  # type: ignore[no-untyped-call]
        return (None, None, by_x, *[None] * len(matrix))

    @staticmethod
    def vmap(
        info: Vmap, in_dims: Dims, factors: int, iterations: int, x: Tensor, *matrix: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        x = as_batch(x, in_dims[2], info.batch_size)
        outs, kept = [], []
        for some, joined in _programs(x, matrix, in_dims[3:]):
            out, shares = _Route.apply(factors, iterations, x[some].flatten(0, 1), *joined)  # type: ignore[no-untyped-call]
            outs.append(out.view_as(x[some]))
            kept.append(shares.view(*shares.shape[:2], len(outs[-1]), -1))
        if len(outs) == 1:  # avoid a copy
            return (outs[0], kept[0]), (0, 2)
        return (torch.cat(outs), torch.cat(kept, dim=2)), (0, 2)


class _RouteBack(NoDerivative):
    """The gradient of `_Route` with respect to x, pass by pass in reverse. Each u is recomputed."""

    @staticmethod
    def forward(shares: Tensor, grad: Tensor, x: Tensor, *matrix: Tensor) -> Tensor:
        kernels, factors = _kernels(x), shares.shape[1]
        if kernels is not None:
            h, by_last = (t.reshape(len(x), factors, -1) for t in (x, grad))
            by_x: Tensor = kernels.route_back(by_last, h, shares, matrix)
            return by_x.flatten(1)
        edges, h = _Edges(matrix, factors), _by_factor(x, factors)
        start_scale = _scale(h)
        start = h * start_scale

        def after(passes: int) -> tuple[Tensor, Tensor]:
            if passes == 0:
                return start, start_scale
            u = edges.gather(shares[passes - 1], start).add_(start)
            scale = _scale(u)
            return u.mul_(scale), scale

        by_start, by_u = torch.zeros_like(start), _by_factor(grad, factors)
        u, scale = after(len(shares))
        for number in reversed(range(len(shares))):
            share = shares[number]
            by_sum = _scale_back(by_u, u, scale)
            by_share = edges.dot(by_sum, start)
            by_score = share * (by_share - (share * by_share).sum(0))
            u, scale = after(number)
            by_u = edges.gather(by_score, start)
            by_start.add_(edges.scatter(share, by_sum)).add_(edges.scatter(by_score, u))
            by_start.add_(by_sum)
        return _side_by_side(_scale_back(by_start.add_(by_u), start, start_scale))

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, shares: Tensor, *args: Tensor) -> tuple[Tensor, int]:
        grad, x = (as_batch(args[i], in_dims[1 + i], info.batch_size) for i in range(2))
        assert in_dims[0] is not None
        matrix, shares = args[2:], shares.movedim(in_dims[0], 2)
        outs = []
        for some, joined in _programs(x, matrix, in_dims[3:]):
            dense = (grad[some].flatten(0, 1), x[some].flatten(0, 1))
            out = _RouteBack.apply(shares[:, :, some].flatten(2), *dense, *joined)  # type: ignore[no-untyped-call]
            outs.append(out.view_as(x[some]))
        return outs[0] if len(outs) == 1 else torch.cat(outs), 0


def _kernels(x: Tensor) -> ModuleType | None:
    """Return the Triton kernels if they can process x, else None."""
    if not on_gpu(x):
        return None
    from atoll.nn.kernels import routing

    return routing


def _programs(x: Tensor, matrix: Tensors, dims: Dims) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield groups of clients to route together, and their adjacencies as block diagonals.

    A GPU processes all clients at once. A CPU processes as many as its cache holds, because
    reads of wide factors from main memory would halve the speed (PubMed, 20 clients).
    """
    size, nodes, entries = x.shape[0], x.shape[1], matrix[1].shape[-1]
    # In the order of `MATRIX`. Values are not indices of nodes or entries.
    steps = (entries, nodes, nodes, 0, entries, nodes, entries)
    count = max(1, CACHED // max(1, x[0].numel())) if x.device.type == "cpu" else size
    for first in range(0, size, count):
        some = slice(first, min(first + count, size))
        joined = []
        for part, dim, step in zip(matrix, dims, steps, strict=True):
            if dim is None:
                joined.append(_copies(part, some.stop - first, step))
            else:
                flat = part.movedim(dim, 0)[some].flatten()
                joined.append(flat - first * step if first else flat)
        yield some, joined


class _Edges:
    """The adjacency repeated for every factor, as blocks. Tensors: (K, N, hidden) and (K, E)."""

    def __init__(self, matrix: Sequence[Tensor], factors: int) -> None:
        offsets, columns, rows, values, t_offsets, t_columns, self.t_order = matrix
        nodes, entries = offsets.shape[0], rows.shape[0]
        by_node = (_copies(index, factors, nodes) for index in (columns, rows, t_columns))
        self.columns, self.rows, self.t_columns = by_node
        self.offsets, self.t_offsets = (_copies(i, factors, entries) for i in (offsets, t_offsets))
        self.real = (values != 0).to(values.dtype)

    def dot(self, targets: Tensor, sources: Tensor) -> Tensor:
        """Return the inner product of the target's and the source's row, for every edge."""
        if self.columns.numel() == 0:
            return targets.new_zeros(targets.shape[0], 0)
        # The gradient of `embedding_bag` by its weights: one kernel without an (E, hidden) tensor.
        out = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            targets.flatten(0, 1), sources.flatten(0, 1), self.columns, self.offsets, self.rows, 0
        )
        return out.view(targets.shape[0], -1)  # type: ignore[no-any-return]

    def gather(self, weight: Tensor, sources: Tensor) -> Tensor:
        """Return each node's weighted sum over the edges that end at it."""
        flat = sources.flatten(0, 1)
        return bags(flat, self.columns, self.offsets, weight.flatten()).view_as(sources)

    def scatter(self, weight: Tensor, targets: Tensor) -> Tensor:
        """Return each node's weighted sum over the edges that start at it."""
        weight = weight.index_select(1, self.t_order).flatten()
        flat = targets.flatten(0, 1)
        return bags(flat, self.t_columns, self.t_offsets, weight).view_as(targets)


def _copies(index: Tensor, count: int, step: int) -> Tensor:
    """Repeat a matrix's index tensor for `count` diagonal blocks, `step` apart."""
    block = torch.arange(count, dtype=index.dtype, device=index.device).unsqueeze(-1)
    return (index + step * block).flatten()


def _by_factor(h: Tensor, factors: int) -> Tensor:
    """Reshape (N, K * hidden) to (K, N, hidden)."""
    return h.reshape(len(h), factors, -1).transpose(0, 1).contiguous()


def _side_by_side(h: Tensor) -> Tensor:
    """Reshape (K, N, hidden) to (N, K * hidden)."""
    return h.transpose(0, 1).flatten(1)


def _scale(h: Tensor) -> Tensor:
    """Return the factors that give rows of h length one. The factor of a zero row is zero."""
    length = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    return torch.where(length > 1e-12, length.reciprocal(), 0.0)


def _scale_back(grad: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient with respect to h, given that with respect to unit = h * _scale(h)."""
    along = (unit * grad).sum(-1, keepdim=True)
    return torch.addcmul(grad, unit, along, value=-1).mul_(scale)
