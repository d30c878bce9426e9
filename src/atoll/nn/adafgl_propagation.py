"""AdaFGL: propagation along cosines of predictions, and messages with a sign.

    S_ij = <q_i, q_j> for i != j, S_ii = 0,   q_i a unit vector for each node (`directions`)

S is N x N and is never stored. A product S H is Q (Q^T H) - H, which is O(N C D); where S must be
seen entry by entry (`threshold`, `signed_messages`) it is made some rows at a time (`by_rows`).
Rows of padding are zero in Q, so that they resemble nobody.

Shapes: directions q (N, C), h (N, D), real (N,).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from atoll.core.graph import Matrix
from atoll.core.vmap.stacks import Context, Gradients
from atoll.nn.ops import matmul

LEAST = 1e-6
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
    adjacency: Matrix,
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

    Only relu(X - m) is ever N x N: what is below the mean is what remains of X - m, and X h is
    cheap. `inverted` takes -X / m below the mean: zero for the least alike, -1 near the mean.
    """
    h = h * real.unsqueeze(-1)
    rows = (q, directions(functional.softmax(h, dim=-1), real))

    def times_x(values: Tensor) -> Tensor:
        own = (1 - beta) * similar_sum(rows[1], values)
        return own + beta * similar_sum(q, values, threshold, block) if beta else own

    nodes = real.sum()
    mean = (times_x(real.unsqueeze(-1)).sum() / nodes**2).clamp(min=0) * (nodes > 1)
    top = _maximum(rows, beta, threshold, block)
    function = partial(_above, beta, threshold, inverted)
    above = by_rows(function, rows, (*rows, h, mean), block)
    # A node is as alike to itself as can be; R has its own number for that.
    alike = above[:, : h.shape[1]] - torch.relu(1 - mean) * h
    if inverted:
        unlike = times_x(h) - alike - mean * (above[:, h.shape[1] :] - h)
    else:
        unlike = alike - times_x(h) + mean * (h.sum(0) - h)
    alike, unlike = alike / (top - mean).clamp(min=LEAST), unlike / mean.clamp(min=LEAST)
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


class _FunctionContext(Context, Protocol):
    function: Callable[..., Tensor]


class _Again(Function):
    """A function that keeps its inputs alone and is evaluated again to be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return function(*inputs)

    @staticmethod
    def setup_context(
        ctx: _FunctionContext,
        inputs: tuple[Callable[..., Tensor], *tuple[Tensor, ...]],
        output: Tensor,
    ) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: _FunctionContext, grad: Tensor) -> Gradients:
        pull = torch.func.vjp(ctx.function, *ctx.saved_tensors)[1]
        return None, *pull(grad)


def _similar_rows(threshold: float, start: int, rows: Tensor, q: Tensor, h: Tensor) -> Tensor:
    alike = (rows @ q.T > threshold).to(h.dtype)
    return torch.where(_own(start, alike), torch.zeros_like(alike), alike) @ h


def _own(start: int, block: Tensor) -> Tensor:
    """Where a block of rows crosses the diagonal."""
    numbers = torch.arange(block.shape[1], device=block.device)
    return numbers[start : start + block.shape[0]].unsqueeze(1) == numbers


def _pairs(beta: float, threshold: float, *parts: Tensor) -> Tensor:
    """Rows of X and of its diagonal, from rows of both kinds of directions and all of both."""
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


def _above(beta: float, threshold: float, inverted: bool, start: int, *parts: Tensor) -> Tensor:
    """relu(X - m) h; if `inverted`, beside it the sum of h over all pairs above the mean."""
    *directed, h, mean = parts
    over = torch.relu(_pairs(beta, threshold, *directed) - mean)
    found = over @ h
    return torch.cat([found, (over > 0).to(h.dtype) @ h], dim=1) if inverted else found


def _maximum(rows: tuple[Tensor, Tensor], beta: float, threshold: float, block: int) -> Tensor:
    """The largest entry of X; found without derivatives, which one pair then has alone."""
    given, own = (part.detach() for part in rows)
    function = partial(_row_maximum, beta, threshold)
    found = by_rows(function, (given, own), (given, own), block)
    row = found[:, 0].argmax()
    best = found.index_select(0, row.unsqueeze(0)).squeeze(0)
    pair = torch.stack([row, best[1].long()])
    # Not by `prod`, whose derivative counts zeros and makes a GPU wait for their number.
    one, other = rows[1].index_select(0, pair).unbind()
    alike = (1 - beta) * (one * other).sum()
    return alike + (best[0] - alike).detach()


def _row_maximum(beta: float, threshold: float, start: int, *parts: Tensor) -> Tensor:
    """The largest entry of each row of X and where it stands."""
    x = _pairs(beta, threshold, *parts)
    value, column = torch.where(_own(start, x), torch.zeros_like(x), x).max(dim=1)
    return torch.stack([value, column.to(value.dtype)], dim=1)
