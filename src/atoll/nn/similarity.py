"""Who resembles whom: propagation along cosines of predictions, and messages with a sign.

    S_ij = <q_i, q_j> for i != j, S_ii = 0,   q_i a unit vector for each node (`directions`)

S is N x N and is never stored. A product S H is Q (Q^T H) - H, which is O(N C D); where S must be
seen entry by entry (`threshold`, `signed_messages`) it is made some rows at a time (`by_rows`).
Rows of padding are zero in Q, so that they resemble nobody.

Shapes: directions q (N, C), h (N, D), real (N,).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from atoll.core.graph import Sparse
from atoll.nn.ops import matmul

TINY = 1e-12
"""Least divisor: a client of one node has nobody to be compared with."""


def directions(p: Tensor, real: Tensor) -> Tensor:
    """Rows of unit length; zero for padding."""
    return functional.normalize(p, dim=-1) * real.unsqueeze(-1)


def similar_sum(q: Tensor, h: Tensor, threshold: float = 0.0, block: int = 1024) -> Tensor:
    """S H; with a threshold S has ones where a cosine is above it, and zeros elsewhere."""
    if not threshold:
        return q @ (q.T @ h) - (q * q).sum(-1, keepdim=True) * h
    return by_rows(partial(_similar_rows, threshold), (q,), (q, h), block)


def propagation(
    adjacency: Tensor | Sparse,
    q: Tensor,
    real: Tensor,
    alpha: float,
    threshold: float = 0.0,
    block: int = 1024,
) -> Callable[[Tensor], Tensor]:
    """T: h -> D^-1/2 (alpha A + (1 - alpha) S + I) D^-1/2 h, with D the row sums."""

    def unscaled(h: Tensor) -> Tensor:
        similar = similar_sum(q, h, threshold, block)
        return alpha * matmul(adjacency, h) + (1 - alpha) * similar + h

    degree = unscaled(real.unsqueeze(-1))
    scale = torch.where(degree > 0, degree, torch.inf).rsqrt()
    return lambda h: scale * unscaled(scale * h)


def signed_messages(
    h: Tensor,
    q: Tensor,
    slope: Tensor,
    real: Tensor,
    beta: float,
    threshold: float = 0.0,
    inverted: bool = False,
    block: int = 1024,
) -> Tensor:
    """What alike nodes say minus what unlike nodes say, (N, C), from logits h (N, C).

        X = beta S(q) + (1 - beta) S(softmax h), with mean m and maximum M over all pairs
        R = (X - m) / (M - m) above the mean, (X - m) / m below it, one on the diagonal
        (softmax(PReLU(R) h) - softmax(PReLU(-R) h) + h) / 2

    `inverted` takes -X / m below the mean: zero for the least alike, -1 just below the mean.
    """
    rows = (q, directions(functional.softmax(h, dim=-1), real))
    pairs = partial(_pair_rows, beta, threshold)
    seen = by_rows(partial(_sum_and_max, pairs), rows, rows, block)
    mean, top = seen[:, 0].sum() / real.sum() ** 2, seen[:, 1].amax()
    whole = (*rows, h * real.unsqueeze(-1), mean, top)
    alike, unlike = by_rows(partial(_both_sides, pairs, inverted), rows, whole, block).chunk(2, -1)
    # PReLU(R) h and PReLU(-R) h from the positive and the negative part of R; R_ii = 1.
    positive = alike - slope * unlike + h
    negative = unlike - slope * (alike + h)
    return (functional.softmax(positive, -1) - functional.softmax(negative, -1) + h) / 2


def by_rows(
    function: Callable[..., Tensor],
    rows: tuple[Tensor, ...],
    whole: tuple[Tensor, ...],
    block: int,
) -> Tensor:
    """function(start, *rows, *whole), (N, D), for `block` rows at a time.

    The function's own N x N numbers exist for one block only: a derivative makes them again.
    """
    size = rows[0].shape[0]
    if size <= block:
        return function(0, *rows, *whole)
    parts = []
    for start in range(0, size, block):
        some = [part[start : start + block] for part in rows]
        parts.append(_Again.apply(partial(function, start), *some, *whole))  # type: ignore[no-untyped-call]
    return torch.cat(parts)


class _Again(Function):
    """A function that keeps its inputs alone and is evaluated again to be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return function(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.function = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        pull = torch.func.vjp(ctx.function, *ctx.saved_tensors)[1]
        return None, *pull(grad)


def _cosines(start: int, rows: Tensor, q: Tensor, threshold: float) -> Tensor:
    """Rows of S from number `start` on."""
    s = rows @ q.T
    s = (s > threshold).to(s.dtype) if threshold else s
    return torch.where(_own(start, s), torch.zeros_like(s), s)


def _own(start: int, block: Tensor) -> Tensor:
    """Where a block of rows crosses the diagonal."""
    numbers = torch.arange(block.shape[1], device=block.device)
    return numbers[start : start + block.shape[0]].unsqueeze(1) == numbers


def _similar_rows(threshold: float, start: int, rows: Tensor, q: Tensor, h: Tensor) -> Tensor:
    return _cosines(start, rows, q, threshold) @ h


def _pair_rows(beta: float, threshold: float, start: int, *parts: Tensor) -> Tensor:
    """Rows of X, from rows of both kinds of directions and then all of both."""
    given_rows, own_rows, given, own = parts
    x = (1 - beta) * _cosines(start, own_rows, own, 0.0)
    return x + beta * _cosines(start, given_rows, given, threshold) if beta else x


def _sum_and_max(pairs: Callable[..., Tensor], start: int, *parts: Tensor) -> Tensor:
    x = pairs(start, *parts)
    return torch.stack([x.sum(1), x.amax(1)], dim=1)


def _both_sides(pairs: Callable[..., Tensor], inverted: bool, start: int, *parts: Tensor) -> Tensor:
    """The positive part of R times h, and minus its negative part times h, side by side."""
    *directed, h, mean, top = parts
    x = pairs(start, *directed)
    alike = torch.relu(x - mean) / (top - mean).clamp(min=TINY)
    below = torch.where(x > mean, torch.zeros_like(x), x) if inverted else torch.relu(mean - x)
    unlike = torch.where(_own(start, x), torch.zeros_like(x), below / mean.clamp(min=TINY))
    return torch.cat([alike @ h, unlike @ h], dim=1)
