"""Parts of FedTAD: similarities of nodes and neighbours, a generator of features, and losses.

Similarity in features and in position (Eqs. 3 to 5), as views with options bound by `partial`:

    T = A D^-1,  h_i = [x_i ‖ T_ii, (T²)_ii, ..., (T^p)_ii]     return probabilities of walks
    similarity_i = mean over neighbours j of cos(h_i, h_j)

The generator computes features from noise and a label, as in FedTAD's code:

    x̂ = W4 tanh(W3 tanh(W2 tanh(W1 [z ‖ e_label])))      widths 64, 128, 256, features

Losses on pseudo graphs compare the outputs of a student and K teachers, and keep generated nodes
apart.

Shapes for B generated nodes: noise z (B, noise), labels (B,), x̂ (B, features).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from atoll.core.graph import Graph, Sparse, runs, sparse_matrix, sum_at
from atoll.core.kernels import on_gpu
from atoll.core.random import fold, make_key, normal, uniform
from atoll.core.tree import Tree, inside_transform
from atoll.core.vmap.stacks import Context, Dims, Gradients, Vmap, as_batch
from atoll.nn.init import apply_linear, kaiming, kaiming_bias
from atoll.nn.ops import matmul
from atoll.nn.views import row_lengths, sparse_features

Tensors = tuple[Tensor, ...]

BLOCK = 1 << 22  # largest block of columns of T^q in memory (in numbers)


def walk_returns(graph: Graph, length: int) -> Tensor:
    """Return the probability that a walk of 1, ..., `length` steps ends at its start, (N, length).

    The walk matrix T = A D^-1 is similar to the symmetric S = D^-1/2 A D^-1/2, so their powers have
    the same diagonals. Half the powers of S suffice: (T^(a+b))_ii = Σ_j (S^a)_ij (S^b)_ij.
    """
    walk, nodes = _walk_matrix(graph), torch.arange(graph.num_nodes, device=graph.y.device)
    blocks = [graph.real.new_zeros(0, length)]
    for block in torch.split(nodes, max(1, BLOCK // max(1, len(nodes)))):
        columns = graph.real.new_zeros(len(nodes), len(block))
        columns[block, torch.arange(len(block), device=nodes.device)] = 1
        powers = [columns]
        for _ in range((length + 1) // 2):
            powers.append(matmul(walk, powers[-1]))
        halves = [(step // 2, step - step // 2) for step in range(1, length + 1)]
        blocks.append(torch.stack([(powers[a] * powers[b]).sum(0) for a, b in halves], dim=1))
    return torch.cat(blocks)


def _walk_matrix(graph: Graph) -> Sparse:
    """Return D^-1/2 A D^-1/2 of the undirected graph. Rows of isolated nodes are zero."""
    there = graph.edges[:, graph.edge_weight != 0]
    source, target = torch.unique(torch.cat([there, there.flip(0)], dim=1), dim=1)
    ones = torch.ones(source.shape[0], dtype=graph.real.dtype, device=graph.real.device)
    degree = torch.zeros_like(graph.real).index_add(0, target, ones).clamp(min=1)
    values = (degree[source] * degree[target]).rsqrt()
    return sparse_matrix(target, source, values, (graph.num_nodes, graph.num_nodes), square=True)


def neighbour_similarity(graph: Graph, length: int) -> Tensor:
    """Return each training node's mean cosine with its neighbours, (N,), and zero for others."""
    total, count = _summed_cosines(graph, walk_returns(graph, length))
    return total / count.clamp(min=1)


def visited_similarity(graph: Graph, length: int) -> Tensor:
    """Return the similarity of FedTAD's public code, (N,). See `atoll methods fedtad`.

    The code multiplies T element by element, so only its diagonal remains, and walks jump almost
    uniformly over the whole graph. Instead of return probabilities it uses the numbers of the
    nodes that walks of 1, ..., `length` nodes visit. A node is its own neighbour, with similarity
    one. Numbers follow the ids, so that the draw does not depend on a node's position.
    """
    size, by_id = graph.num_nodes, torch.argsort(graph.ids)
    start = torch.arange(size, device=graph.y.device)
    degree = 1 + sum_at(graph.edges[1], graph.edge_weight, size)
    stay = torch.exp(1 / degree[by_id])
    stay = stay / (stay + size - 1)
    columns = []
    for walk in range(1, length + 1):
        at = start
        for step in range(walk):
            columns.append(at)
            key = fold(make_key(0, graph.y.device), "visited", walk, step)
            moves, jump = uniform(key, (2, size), graph.real.dtype)
            other = (jump * (size - 1)).long()
            other = other + (other >= at)  # any node except this one
            at = torch.where((moves < stay[at]) | (size == 1), at, other)
    visited = torch.stack(columns, dim=1)[torch.argsort(by_id)].to(graph.real.dtype)
    total, count = _summed_cosines(graph, visited)
    return (1 + total) / (1 + count)


def _summed_cosines(graph: Graph, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of cosines over each training node's neighbours, and their number, (N,).

    The columns `position` follow the features in h_i.
    """
    x = graph.x if isinstance(graph.x, Sparse) else sparse_features(graph.x)
    source, target = graph.edges
    counted = (graph.train[target] > 0) & (source != target) & (graph.edge_weight != 0)
    edges = graph.edges[:, counted]
    squares = sum_at(x.rows.long(), x.values.square(), x.shape[0])
    norm = squares.add(position.square().sum(1)).sqrt().clamp(min=1e-12)
    dots = _row_dots(x, edges) + (position[edges[0]] * position[edges[1]]).sum(1)
    cosines = dots / (norm[edges[0]] * norm[edges[1]])
    ones, size = torch.ones_like(cosines), graph.num_nodes
    return sum_at(edges[1], cosines, size), sum_at(edges[1], ones, size)


def _row_dots(x: Sparse, edges: Tensor) -> Tensor:
    """Return x_source · x_target for every edge. Targets are dense blocks, sources sparse rows."""
    starts, counts = x.offsets.long(), row_lengths(x)
    out = x.values.new_zeros(edges.shape[1])
    for block in torch.split(torch.argsort(edges[1]), max(1, BLOCK // max(1, x.shape[1]))):
        nodes, place = torch.unique(edges[1, block], return_inverse=True)
        entry, _, owner = runs(starts[nodes], counts[nodes])
        dense = x.values.new_zeros(len(nodes), x.shape[1])
        dense[owner, x.columns.long()[entry]] = x.values[entry]
        entry, _, owner = runs(starts[edges[0, block]], counts[edges[0, block]])
        terms = x.values[entry] * dense[place[owner], x.columns.long()[entry]]
        out[block] = sum_at(owner, terms, len(block))
    return out


def nearest_neighbours(x: Tensor, count: int, by: str) -> tuple[Tensor, Tensor]:
    """Return edges, (2, E), to each row from its `count` most similar rows, and their weights.

    A row may be its own neighbour. Weights are one, or zero for a duplicate edge (`_both_ways`).
    `by` is "dot" (FedTAD, Eq. 7), or "cosine" (FedTAD's code), which also adds every edge's reverse
    and all self-loops. The result has no gradient.
    """
    unit = functional.normalize(x.detach(), dim=1) if by == "cosine" else x.detach()
    alike = unit @ unit.T
    picks = alike.topk(min(count, x.shape[0]), dim=1, sorted=not x.is_cuda).indices
    if by == "cosine" and not x.is_cuda:
        chosen = torch.zeros_like(alike).scatter_(1, picks, 1.0)
        chosen = torch.maximum(chosen, chosen.T).fill_diagonal_(1.0)
        edges = chosen.nonzero().T.flip(0)
        return edges, edges.new_ones(edges.shape[1], dtype=x.dtype)
    rows = torch.arange(len(picks), device=picks.device).unsqueeze(1).expand_as(picks)
    picked = picks if x.is_cuda else picks.sort(1).values  # a GPU sorts entries later anyway
    edges = torch.stack([picked, rows]).flatten(1)
    weight = edges.new_ones(edges.shape[1], dtype=x.dtype)
    return _both_ways(picks, edges, weight) if by == "cosine" else (edges, weight)


def _both_ways(picks: Tensor, edges: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return edges, reverses and self-loops, and their weights.

    Duplicates get weight zero, because their removal would make a GPU wait.
    """
    source, target = edges
    nodes = torch.arange(len(picks), device=picks.device).unsqueeze(1)
    # The reverse of source -> target exists already if target is among source's picks.
    new = (picks[source] != target.unsqueeze(1)).all(1)
    more = torch.cat([edges.flip(0), nodes.T.expand(2, -1)], dim=1)
    repeated = torch.cat([new, (picks != nodes).all(1)]).to(weight.dtype)
    return torch.cat([edges, more], 1), torch.cat([weight, repeated])


@dataclass(frozen=True)
class Generator:
    """The generator of node features. The embedding of a label has one dimension per class."""

    features: int
    classes: int
    noise: int = 32
    widths: tuple[int, ...] = (64, 128, 256)

    def init(self, key: Tensor) -> Tree:
        widths = [self.noise + self.classes, *self.widths, self.features]
        shape = (self.classes, self.classes)
        layers = []
        for layer, sizes in enumerate(pairwise(widths)):
            bias = kaiming_bias(fold(key, "bias", layer), *sizes)
            layers.append({"weight": kaiming(fold(key, "weight", layer), *sizes), "bias": bias})
        labels = normal(fold(key, "labels"), shape, torch.get_default_dtype())
        return {"labels": labels, "layers": layers}

    def __call__(self, params: Tree, noise: Tensor, labels: Tensor) -> Tensor:
        h = torch.cat([noise, params["labels"][labels]], dim=1)
        *hidden, last = params["layers"]
        for layer in hidden:
            h = torch.tanh(_linear(layer, h))
        return _linear(last, h)


def _linear(layer: Tree, h: Tensor) -> Tensor:
    """Return h W + b. A GPU adds b in the same kernel."""
    return torch.addmm(layer["bias"], h, layer["weight"]) if h.is_cuda else apply_linear(layer, h)


def divergence(student: Tensor, taught: Tensor, weight: Tensor, reading: str) -> Tensor:
    """Return Σ_k Σ_i weight_ki D(student_i, taught_ki) for node i and teacher k.

    Arguments are logits, (B, C) and (K, B, C), and the loss weights, (K, B). `reading` "kl" means
    D = KL(student ‖ taught), and "l1" the mean absolute difference of logits.
    """
    if reading == "l1":
        if on_gpu(student) and not taught.requires_grad and not inside_transform():
            found: Tensor = _L1Gaps.apply(student, taught, weight)[0]  # type: ignore[no-untyped-call]
            return found
        gap = student - taught
        # If both agree (a single client), the sign of a rounding error must not train.
        gap = torch.where(gap.abs() > 1e-6, gap, 0 * gap)
        return (weight * gap.abs().mean(-1)).sum()
    log_p, log_q = functional.log_softmax(student, -1), functional.log_softmax(taught, -1)
    return (weight * (log_p.exp() * (log_p - log_q)).sum(-1)).sum()


def mean_cosine(x: Tensor) -> Tensor:
    """Return the mean cosine of all pairs of B rows, each row with itself included, in O(B D)."""
    return functional.normalize(x, dim=1).mean(0).square().sum()


def mode_seeking(noise: Tensor, x: Tensor) -> Tensor:
    """Return exp(-mean_ij ‖z_i - z_j‖² ‖x_i - x_j‖_1). Each norm is divided by its dimension."""
    squares = noise.square().sum(1)
    z_apart = (squares.unsqueeze(1) + squares - 2 * noise @ noise.T).clamp(min=0)
    total, _ = _WeightedGaps.apply(x, z_apart / noise.shape[1])  # type: ignore[no-untyped-call]
    loss: Tensor = torch.exp(-total / (x.shape[1] * len(x) ** 2))
    return loss


class _WithSlope(Function):
    """A function whose second output is its gradient, or half of it, for the backward pass."""

    @staticmethod
    def setup_context(ctx: Context, inputs: Tensors, output: Tensors) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])


class _L1Gaps(_WithSlope):
    """`divergence` with "l1" on a GPU, differentiable only in the student's logits."""

    @staticmethod
    def forward(student: Tensor, taught: Tensor, weight: Tensor) -> Tensors:
        from atoll.nn.kernels import distil

        return distil.l1_gaps(student, taught, weight)

    @staticmethod
    def backward(ctx: Context, grad: Tensor, _: Tensor) -> Gradients:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


class _WeightedGaps(_WithSlope):
    """Σ_ij w_ij ‖x_i - x_j‖_1 for a symmetric w, in a quarter of the time of `cdist`.

    With s_ij = sign(x_i - x_j), half its gradient is G_i = Σ_j w_ij s_ij. Because s is
    antisymmetric, the sum itself is 2 Σ_i <x_i, G_i>. One pass over the pairs gives both.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensors:
        if on_gpu(x):
            from atoll.nn.kernels import distil

            half = distil.half_gaps(x, weight)
        else:
            half = _half_in_blocks(x, weight) if x.is_cuda else _half_by_row(x, weight)
        return 2 * (x * half).sum(), half

    @staticmethod
    def backward(ctx: Context, grad: Tensor, _: Tensor) -> Gradients:
        (half,) = ctx.saved_tensors
        return 2 * grad * half, None

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, *args: Tensor) -> tuple[Tensors, tuple[int, int]]:
        pairs = zip(args, in_dims, strict=True)
        many = [as_batch(leaf, axis, info.batch_size) for leaf, axis in pairs]
        found = [_WeightedGaps.apply(*one) for one in zip(*many, strict=True)]  # type: ignore[no-untyped-call]
        return tuple(torch.stack(part) for part in zip(*found, strict=True)), (0, 0)


def _half_by_row(x: Tensor, weight: Tensor) -> Tensor:
    """Return G of `_WeightedGaps`, row by row. Previous rows stay in the CPU's cache."""
    half, signs = torch.zeros_like(x), torch.empty_like(x)
    for row in range(1, len(x)):
        gaps, by = torch.sub(x[row], x[:row], out=signs[:row]).sign_(), weight[row, :row]
        half[row] += by @ gaps
        half[:row].addcmul_(gaps, by.unsqueeze(1), value=-1)
    return half


def _half_in_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Return G of `_WeightedGaps` with few kernels, for blocks of rows that fit into 256 MB."""
    rows = max(1, (1 << 26) // max(1, x.numel()))
    parts = zip(torch.split(x, rows), torch.split(weight, rows), strict=True)
    blocks = [by.unsqueeze(1) @ (part.unsqueeze(1) - x).sign_() for part, by in parts]
    return torch.cat(blocks).squeeze(1)
