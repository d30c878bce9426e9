"""AdaFGL's personal networks: MLP heads on features that edges and similar predictions propagate.

    P = softmax of the model's logits,   q_i = P_i / |P_i|,   S_ij = <q_i, q_j>, zero diagonal.
    T = D^-1/2 (α A + (1 - α) S + I) D^-1/2,   X~ = [X, TX, ..., T^k X].
    homophilous     MLP2(X~), where MLP2 has two layers and MLP3 three
    heterophilous   MLP3(X), MLP3(X~), and `signed_messages` between the outputs of another MLP3(X~)

A head is H <- dropout(PReLU(H W + b)), with one slope and no activation after the last layer. X~ is
N x (k+1)F and dense, so it is never stored. Its product with W = (W_0, ..., W_k) is exactly
X W_0 + T (X W_1 + T (X W_2 + ...)). T therefore multiplies matrices of the hidden width, not of X's
width, and one product with X serves all heads and hops. There is no dropout on the input.

S is N x N and is never stored. A product S H is Q (Q^T H) - H, which is O(N C D). If single entries
of S are needed (`threshold`, `signed_messages`), S is computed in blocks of rows (`by_rows`).
Rows of padding are zero in Q, so their cosines are zero.

Label propagation, which has no parameters, measures how well a graph's labels spread:

    Y <- Â Y / 2 + Y0 / 2 + Y0 on the seeds,   Y0 = one-hot on the seeds, 1/C elsewhere.

Shapes: x (N, F), h (N, D), P, q, outputs and one-hot labels (N, C), seeds and masks (N,).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from atoll.core.graph import Graph, Matrix, Sparse, View
from atoll.core.losses import masked_mean
from atoll.core.random import dropout, fold, random_bits
from atoll.core.tree import Tree, inside_transform
from atoll.core.vmap.stacks import (
    Context,
    Dims,
    Gradients,
    Stacked,
    Vmap,
    batched,
    call,
    current_batch,
)
from atoll.nn import views
from atoll.nn.init import apply_linear, glorot, zeros
from atoll.nn.ops import at_columns, at_rows, bags, both_ways, matmul, with_values

Propagation = Callable[[Tensor], Tensor]
Tensors = tuple[Tensor, ...]

LEAST = 1e-6  # least divisor, because a client of one node has no pairs


@dataclass(frozen=True)
class Heads:
    """MLP heads by name, each with its number of layers (at least two). They read the view `x`."""

    features: int
    classes: int
    hops: int  # k of X~
    propagated: Mapping[str, int]  # at least one; they read X~
    plain: Mapping[str, int]  # they read only X
    hidden: int = 64
    dropout: float = 0.5

    def init(self, key: Tensor) -> Tree:
        """Initialise the heads: their first layers, concatenated by hop, and their other layers."""
        deep_width = (self.hops + 1) * self.features
        deep = [_weight(fold(key, name, 0), deep_width, self.hidden) for name in self.propagated]
        flat = [_weight(fold(key, name, 0), self.features, self.hidden) for name in self.plain]
        hops = zip(*(weight.chunk(self.hops + 1) for weight in deep), strict=True)
        first = torch.cat([weight for hop in hops for weight in hop] + flat, dim=1)
        every = {**self.propagated, **self.plain}
        rest = {}
        for name, count in every.items():
            own, widths = fold(key, name), pairwise([self.hidden] * (count - 1) + [self.classes])
            layers = [
                {"weight": _weight(fold(own, number), n_in, n_out), "bias": zeros(key, n_out)}
                for number, (n_in, n_out) in enumerate(widths, start=1)
            ]
            rest[name] = {"slope": zeros(key, 1) + 0.25, "layers": layers}
        bias = zeros(key, self.hidden * len(every))
        return {"first": {"weight": first, "bias": bias}, "rest": rest}

    def __call__(
        self, params: Tree, graph: Graph, propagate: Propagation, key: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the logits of every head. `propagate` is T."""
        product = matmul(graph.views["x"], params["first"]["weight"])
        deep, flat = (len(names) * self.hidden for names in (self.propagated, self.plain))
        *terms, h, rest = torch.split(product, [*[deep] * (self.hops + 1), flat], dim=1)
        for term in reversed(terms):
            h = term + propagate(h)
        found: dict[str, Tensor] = {}
        # Add the biases before joining, because the derivative would copy both parts once more.
        biases = params["first"]["bias"].split([deep, flat])
        for names, part, bias in zip((self.propagated, self.plain), (h, rest), biases, strict=True):
            own = torch.split(part + bias, [self.hidden] * len(names), dim=1)
            found.update(zip(names, own, strict=True))
        for name, head in params["rest"].items():
            for number, layer in enumerate(head["layers"], start=1):
                prelu = functional.prelu if h.is_cuda else partial(call, _PReLU)
                h = prelu(found[name], head["slope"])
                h = dropout(h, key, graph.ids, self.dropout, name, number)
                found[name] = apply_linear(layer, h)
        return found


class _PReLU(Function):
    """PReLU of h, (..., N, D), with slope (..., 1), five times faster than torch's on a CPU."""

    @staticmethod
    def forward(h: Tensor, slope: Tensor) -> Tensor:
        return torch.lerp(torch.relu(h), h, slope.unsqueeze(-1))

    @staticmethod
    def setup_context(ctx: Context, inputs: Tensors, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        h, slope = ctx.saved_tensors
        above = torch.ops.aten.threshold_backward(grad, h, 0)
        by_slope = (grad * h.clamp(max=0)).sum((-2, -1)).unsqueeze(-1)
        return torch.lerp(above, grad, slope.unsqueeze(-1)), by_slope

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, *args: Tensor) -> tuple[Tensor, int]:
        return call(_PReLU, *batched(info, in_dims, *args)), 0


def _weight(key: Tensor, n_in: int, n_out: int) -> Tensor:
    """Return a weight with gain √2, for layers before a ReLU."""
    return math.sqrt(2) * glorot(key, n_in, n_out)


@dataclass(frozen=True)
class Adaptive:
    """The networks of AdaFGL's step 2. `methods/adafgl.py` explains the hyper-parameters."""

    features: int
    classes: int
    hidden: int
    dropout: float
    alpha: float
    beta: float
    hops: int
    threshold: float
    double_softmax: bool
    inverted_rescale: bool
    block: int

    @property
    def views(self) -> Mapping[str, View]:
        return {"x": views.features, "plain": views.plain_adjacency}

    @property
    def heads(self) -> Heads:
        """The four MLP heads: homophilous, smoothed features, messages and raw features."""
        deep, flat = {"homo": 2, "smooth": 3, "message": 3}, {"raw": 3}
        shape = (self.features, self.classes, self.hops)
        return Heads(*shape, deep, flat, self.hidden, self.dropout)

    def init(self, key: Tensor) -> Tree:
        return self.heads.init(key)

    def surroundings(self, logits: Tensor, graph: Graph) -> Surroundings:
        """Return P, S and T, given the model's logits. They are constant while heads train."""
        belief = row_softmax(logits)
        p = row_softmax(belief) if self.double_softmax else belief
        similar = Similarity(directions(p, graph.real), self.threshold, self.block)
        propagate = propagation(graph.views["plain"], similar, graph.real, self.alpha)
        return Surroundings(belief, similar, propagate)

    def __call__(
        self, params: Tree, around: Surroundings, graph: Graph, key: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return logits of the homophilous head and of the three heterophilous ones, in a tuple."""
        found = self.heads(params, graph, around.propagate, key)
        slope = params["rest"]["message"]["slope"]
        options = (slope, graph.real, self.beta, self.inverted_rescale)
        message = signed_messages(found["message"], around.similar, *options)
        return found["homo"], found["raw"], found["smooth"], message


def directions(p: Tensor, real: Tensor) -> Tensor:
    """Normalise rows to unit length. Padding is zero."""
    return functional.normalize(p, dim=-1) * real.unsqueeze(-1)


class Similarity(NamedTuple):
    """The matrix S. With a threshold, entries are one if the cosine is above it, else zero."""

    q: Tensor
    threshold: float = 0.0
    block: int = 1024

    def times(self, h: Tensor) -> Tensor:
        """Return S H."""
        q = self.q
        if not self.threshold:
            return q @ (q.T @ h) - (q * q).sum(-1, keepdim=True) * h

        def similar_rows(start: int, rows: Tensor, q: Tensor, h: Tensor) -> Tensor:
            alike = (rows @ q.T > self.threshold).to(h.dtype)
            return _without_own(start, alike) @ h

        return by_rows(similar_rows, (q,), (q, h), self.block)


class Surroundings(NamedTuple):
    """P, S and T of a client's graph, which depend on the model's predictions."""

    belief: Tensor
    similar: Similarity
    propagate: Propagation


def propagation(plain: Matrix, similar: Similarity, real: Tensor, alpha: float) -> Propagation:
    """Return T: h -> D^-1/2 (alpha A + (1 - alpha) S + I) D^-1/2 h, with D the row sums."""

    def unscaled(h: Tensor) -> Tensor:
        return alpha * matmul(plain, h) + (1 - alpha) * similar.times(h) + h

    degree = unscaled(real.unsqueeze(-1))
    scale = torch.where(degree > 0, degree, torch.inf).rsqrt()
    if similar.threshold or not isinstance(plain, Sparse) or plain.dense is not None:
        return lambda h: scale * unscaled(scale * h)
    # All factors are in the matrices, so a product passes over h three times instead of nine.
    weight = alpha * at_rows(plain, scale) * at_columns(plain, scale)
    edges = with_values(plain, weight.squeeze(-1) * plain.values)
    q = math.sqrt(1 - alpha) * scale * similar.q
    own = scale.square() - q.square().sum(-1, keepdim=True)

    def propagate(h: Tensor) -> Tensor:
        if h.is_cuda or (current_batch() is None and inside_transform()):
            return torch.addcmul(matmul(edges, h) + q @ (q.T @ h), own, h)
        found: Tensor = call(_Propagated, h, q, own, *both_ways(edges))
        return found

    return propagate


class _Propagated(Stacked):
    """A h + Q Qᵀ h + diag(own) h as one CPU operation, differentiable only in h.

    Shapes: h (..., N, D), q (..., N, C), own (..., N, 1), then the matrix and its transpose.
    """

    @staticmethod
    def forward(h: Tensor, q: Tensor, own: Tensor, *edges: Tensor) -> Tensor:
        offsets, columns, values = (part.flatten() for part in edges[:3])
        many, q, own = (part.reshape(-1, *part.shape[-2:]) for part in (h, q, own))
        out = bags(many.flatten(0, 1), columns, offsets, values).view_as(many)
        return out.baddbmm_(q, q.mT @ many).addcmul_(own, many).view(h.shape)

    @staticmethod
    def setup_context(ctx: Context, inputs: Tensors, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        q, own, *edges = ctx.saved_tensors
        return call(_Propagated, grad, q, own, *edges[3:], *edges[:3]), *[None] * 8


def row_softmax(h: Tensor) -> Tensor:
    """Return the softmax of rows. For short rows on a CPU it is five times faster than torch's."""
    if h.is_cuda:
        return functional.softmax(h, dim=-1)
    raised = torch.exp(h - h.detach().amax(-1, keepdim=True))
    return raised / raised.sum(-1, keepdim=True)


def signed_messages(
    h: Tensor, similar: Similarity, slope: Tensor, real: Tensor, beta: float, inverted: bool = False
) -> Tensor:
    """Return messages of similar minus those of dissimilar nodes, (N, C), from logits h (N, C).

        X = beta S + (1 - beta) S(softmax h), with mean m and maximum M over all pairs of nodes.
        R = (X - m) / (M - m) above the mean, (X - m) / m below it, one on the diagonal.
        (softmax(PReLU(R) h) - softmax(PReLU(-R) h) + h) / 2

    Here X is not the feature matrix. Only relu(X - m) is ever N x N, because the part below the
    mean is the rest of X - m, and X h is cheap. `inverted` uses -X / m below the mean: zero for
    the least similar, -1 near the mean.
    """
    h = h * real.unsqueeze(-1)
    q, threshold, block = similar
    rows = (q, directions(row_softmax(h), real))

    def times_x(values: Tensor) -> Tensor:
        own = (1 - beta) * Similarity(rows[1]).times(values)
        return own + beta * similar.times(values) if beta else own

    nodes = real.sum()
    mean = (times_x(real.unsqueeze(-1)).sum() / nodes**2).clamp(min=0) * (nodes > 1)
    top = _maximum(rows, beta, threshold, block)

    def above_mean(start: int, *parts: Tensor) -> Tensor:
        """Return relu(X - m) h. If `inverted`, append the sum of h over pairs above the mean."""
        *directed, h, mean = parts
        over = torch.relu(_pairs(beta, threshold, *directed) - mean)
        found = matmul(over, h)
        return torch.cat([found, (over > 0).to(h.dtype) @ h], dim=1) if inverted else found

    above = by_rows(above_mean, rows, (*rows, h, mean), block)
    # A node has maximal similarity with itself, but R has its own value for that.
    alike = above[:, : h.shape[1]] - torch.relu(1 - mean) * h
    if inverted:
        unlike = times_x(h) - alike - mean * (above[:, h.shape[1] :] - h)
    else:
        unlike = alike - times_x(h) + mean * (h.sum(0) - h)
    alike, unlike = alike / (top - mean).clamp(min=LEAST), unlike / mean.clamp(min=LEAST)
    # PReLU(R) h and PReLU(-R) h, from the positive and the negative part of R. R_ii = 1.
    positive = alike - slope * unlike + h
    negative = unlike - slope * (alike + h)
    return (row_softmax(positive) - row_softmax(negative) + h) / 2


def by_rows(function: Callable[..., Tensor], rows: Tensors, whole: Tensors, block: int) -> Tensor:
    """Return function(start, *rows, *whole) for all blocks of rows, (N, D).

    With several blocks, the backward pass evaluates the function again instead of storing N x N
    numbers.
    """
    if len(rows[0]) <= block:
        return function(0, *rows, *whole)
    parts = []
    for start in range(0, len(rows[0]), block):
        some = [part[start : start + block] for part in rows]
        parts.append(_Again.apply(partial(function, start), *some, *whole))  # type: ignore[no-untyped-call]
    return torch.cat(parts)


class _FunctionContext(Context, Protocol):
    function: Callable[..., Tensor]


class _Again(Function):
    """A function that stores only its inputs. The backward pass evaluates it again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return function(*inputs)

    @staticmethod
    def setup_context(
        ctx: _FunctionContext, inputs: tuple[Callable[..., Tensor], *Tensors], output: Tensor
    ) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: _FunctionContext, grad: Tensor) -> Gradients:
        pull = torch.func.vjp(ctx.function, *ctx.saved_tensors)[1]
        return None, *pull(grad)


def _without_own(start: int, block: Tensor) -> Tensor:
    """Set the diagonal of the whole matrix to zero, in place, in a block of rows from `start`."""
    block.diagonal(start).zero_()
    return block


def _pairs(beta: float, threshold: float, *parts: Tensor) -> Tensor:
    """Return rows of X (`signed_messages`) with its diagonal.

    `parts` are these rows of P's and of h's directions, then all rows of both.
    """
    given_rows, own_rows, given, own = parts
    if not beta:
        return own_rows @ own.T
    if threshold:
        alike = (given_rows @ given.T > threshold).to(own.dtype)
        return beta * alike + (1 - beta) * (own_rows @ own.T)
    weights = (math.sqrt(beta), math.sqrt(1 - beta))
    left, right = (
        torch.cat([w * part for w, part in zip(weights, both, strict=True)], dim=1)
        for both in ((given_rows, own_rows), (given, own))
    )
    return left @ right.T


def _maximum(rows: tuple[Tensor, Tensor], beta: float, threshold: float, block: int) -> Tensor:
    """Return the largest entry of X (`signed_messages`) off its diagonal.

    The search has no derivatives. Only the pair that it finds has a gradient.
    """

    def row_maximum(start: int, *parts: Tensor) -> Tensor:
        """Return the largest entry of each row of X, (N, 1)."""
        return _without_own(start, _pairs(beta, threshold, *parts)).amax(-1, keepdim=True)

    fixed = tuple(part.detach() for part in rows)
    found = by_rows(row_maximum, fixed, fixed, block).squeeze(-1)
    row = found.argmax()
    some = [part.index_select(0, row.unsqueeze(0)) for part in fixed]
    # Compute that row again, because only its index is known.
    nodes = torch.arange(len(found), device=row.device)
    again = _pairs(beta, threshold, *some, *fixed).squeeze(0) * (nodes != row)
    pair, best = torch.stack([row, again.argmax()]), found.amax()
    # Not `prod`, whose derivative counts zeros and makes a GPU wait for the count.
    one, other = rows[1].index_select(0, pair).unbind()
    alike = (1 - beta) * (one * other).sum()
    return alike + (best - alike).detach()


def homophily(graph: Graph, classes: int, key: Tensor) -> Tensor:
    """Return the accuracy with which half of the training labels predict the others.

    The key draws the half, and its labels propagate along the view `gcn`.
    """
    bits = random_bits(key, graph.ids, 1).squeeze(-1).long()
    place = torch.where(graph.train > 0, bits, 1 << 40).argsort(stable=True).argsort()
    seeds = graph.train * (place < graph.train.sum() // 2).to(graph.train.dtype)
    labels = functional.one_hot(graph.y, classes).to(graph.real.dtype)
    scores = propagate_labels(graph.views["gcn"], labels, seeds)
    return accuracy(scores, labels, graph.train - seeds)


def propagate_labels(adjacency: Matrix, labels: Tensor, seeds: Tensor, steps: int = 10) -> Tensor:
    """Propagate the labels of the seeds. Return scores, (N, C)."""
    known = seeds.unsqueeze(-1)
    start = labels * known + (1 - known) / labels.shape[-1]
    y = start
    for _ in range(steps):
        y = (matmul(adjacency, y) + start) / 2 + known * start
    return y


def accuracy(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return the share of the nodes in `mask` whose true class has the highest score.

    If k classes tie and the true class is one of them, the node counts 1/k. Without nodes, it is 1.
    """
    best = (scores >= scores.amax(-1, keepdim=True) - 1e-6).to(scores.dtype)
    right = (best * labels).sum(-1) / best.sum(-1)
    return torch.where(mask.sum() > 0, masked_mean(right, mask), 1.0)
