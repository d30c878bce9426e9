"""A routing pass of `disengcn` in one kernel on a GPU: every neighbour is read once.

Made of torch's operations a pass reads every neighbour's row three times forwards and six times
backwards, which is all that it costs. Here one program works for one node: it keeps the node's own
row in registers and walks along its edges.

Per-node tensors are (N, K, hidden) and contiguous, per-edge tensors (K, E), all float32. Only for
CUDA, and only where Triton is installed, which every GPU build of torch brings along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NOWHERE = tl.constexpr(1e-12)  # length below which a row has no direction


class Adjacency(NamedTuple):
    """Edges by their targets, and again by their sources; padding is left out by the ends."""

    starts: Tensor
    ends: Tensor
    sources: Tensor
    by_source_starts: Tensor
    by_source_ends: Tensor
    targets: Tensor
    order: Tensor

    @staticmethod
    def of(matrix: Sequence[Tensor]) -> Adjacency:
        """From the tensors of a `Sparse` that `disengcn.MATRIX` names."""
        offsets, columns, _, values, t_offsets, t_columns, t_order = matrix
        real = (values != 0).to(torch.int32)
        by_target = (offsets, _ends(offsets, real), columns)
        t_ends = _ends(t_offsets, real.index_select(0, t_order))
        return Adjacency(*by_target, t_offsets, t_ends, t_columns, t_order)


def _ends(starts: Tensor, real: Tensor) -> Tensor:
    """Where the real entries of each row end; those that are padding stand last in a row."""
    before = torch.cat([real.new_zeros(1), real.cumsum(0, dtype=torch.int32)])
    nexts = torch.cat([starts[1:], starts.new_full((1,), real.shape[0])])
    return starts + before.index_select(0, nexts) - before.index_select(0, starts)


def route(start: Tensor, adjacency: Adjacency, iterations: int) -> tuple[Tensor, Tensor]:
    """All passes: the last u, (N, K, hidden), and the shares of every pass, (T, K, E)."""
    entries = adjacency.sources.shape[0]
    shares = start.new_zeros(iterations, start.shape[1], entries)  # padding keeps its zeros
    u = start
    for share in shares:
        u, _ = _pass(start, u, share, adjacency, known=False)
    return u, shares


def _pass(
    start: Tensor, u: Tensor, share: Tensor, adjacency: Adjacency, known: bool
) -> tuple[Tensor, Tensor]:
    """One pass from u: the next u, and the scale that makes its rows unit vectors."""
    after, scale = torch.empty_like(start), start.new_empty(start.shape[:2])
    edges, entries = adjacency[:3], adjacency.sources.shape[0]
    tensors = (start, u, after, scale, share, *edges)
    _forward[(len(start),)](*tensors, entries, KNOWN=known, **_sizes(start))
    return after, scale


def route_back(grad: Tensor, start: Tensor, shares: Tensor, adjacency: Adjacency) -> Tensor:
    """The gradient by `start`, from that by the last u."""
    entries, sizes = adjacency.sources.shape[0], _sizes(start)
    by_start, by_score = torch.zeros_like(start), torch.zeros_like(shares[0])
    by_u = grad.contiguous()
    u, scale = _pass(start, start, shares[-1], adjacency, known=True)
    for number in reversed(range(len(shares))):
        by_sum, by_u_before, u_before = (torch.empty_like(start) for _ in range(3))
        scale_before, share = torch.empty_like(scale), shares[number]
        before = (by_u_before, u_before, scale_before)
        per_edge = (share, shares[max(number - 1, 0)], by_score, *adjacency[:3])
        tensors = (start, u, scale, by_u, by_sum, *before, by_start, *per_edge)
        _backward[(len(start),)](*tensors, entries, FIRST=number == 0, **sizes)
        per_edge = (share, by_score, *adjacency[3:])
        _to_sources[(len(start),)](by_sum, u_before, by_start, *per_edge, entries, **sizes)
        by_u, u, scale = by_u_before, u_before, scale_before
    return by_start.add_(by_u)


def _sizes(start: Tensor) -> dict[str, int]:
    _, factors, hidden = start.shape
    k_wide, h_wide = triton.next_power_of_2(factors), triton.next_power_of_2(hidden)
    warps = 8 if k_wide * h_wide > 2048 else 4
    return {"K": factors, "H": hidden, "K_WIDE": k_wide, "H_WIDE": h_wide, "num_warps": warps}


_PLAIN = ["entries"]  # numbers for which no kernel of their own is compiled


@triton.jit
def _place(node, K: tl.constexpr, H: tl.constexpr, K_WIDE: tl.constexpr, H_WIDE: tl.constexpr):
    """Where the row of a node lies, (K_WIDE, H_WIDE), and which of that is there."""
    k, j = tl.arange(0, K_WIDE), tl.arange(0, H_WIDE)
    place = node.to(tl.int64) * (K * H) + k[:, None] * H + j[None, :]
    return place, (k[:, None] < K) & (j[None, :] < H)


@triton.jit
def _row(rows, node, K: tl.constexpr, H: tl.constexpr, K_WIDE: tl.constexpr, H_WIDE: tl.constexpr):
    """The row of a node, zero where nothing is there."""
    place, there = _place(node, K, H, K_WIDE, H_WIDE)
    return tl.load(rows + place, mask=there, other=0.0)


@triton.jit
def _at_edge(numbers, edge, entries, K: tl.constexpr, K_WIDE: tl.constexpr):
    """A number of each factor at an edge."""
    k = tl.arange(0, K_WIDE)
    return tl.load(numbers + k.to(tl.int64) * entries + edge, mask=k < K, other=0.0)


@triton.jit
def _keep_at_edge(numbers, edge, entries, found, K: tl.constexpr, K_WIDE: tl.constexpr):
    k = tl.arange(0, K_WIDE)
    tl.store(numbers + k.to(tl.int64) * entries + edge, found, mask=k < K)


@triton.jit
def _unit(total):
    """The factor that makes rows unit vectors; zero for a row without a direction."""
    length = tl.sqrt(tl.sum(total * total, axis=1))
    return tl.where(length > NOWHERE, 1.0 / length, 0.0)


@triton.jit(do_not_specialize=_PLAIN)
def _forward(
    start,
    u,
    after,
    scale,
    share,
    starts,
    ends,
    sources,
    entries,
    KNOWN: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    K_WIDE: tl.constexpr,
    H_WIDE: tl.constexpr,
):
    """With p = softmax_k <x̂_s, u_t>, or a known p:  u <- normalise(x̂_t + Σ_s p x̂_s)."""
    node = tl.program_id(0)
    place, there = _place(node, K, H, K_WIDE, H_WIDE)
    k = tl.arange(0, K_WIDE)
    mine = _row(u, node, K, H, K_WIDE, H_WIDE)
    total = _row(start, node, K, H, K_WIDE, H_WIDE)
    for edge in range(tl.load(starts + node), tl.load(ends + node)):
        row = _row(start, tl.load(sources + edge), K, H, K_WIDE, H_WIDE)
        if KNOWN:
            p = _at_edge(share, edge, entries, K, K_WIDE)
        else:
            score = tl.where(k < K, tl.sum(mine * row, axis=1), -float("inf"))
            raised = tl.exp(score - tl.max(score, axis=0))
            p = raised / tl.sum(raised, axis=0)
            _keep_at_edge(share, edge, entries, p, K, K_WIDE)
        total += p[:, None] * row
    unit = _unit(total)
    tl.store(after + place, total * unit[:, None], mask=there)
    tl.store(scale + node * K + k, unit, mask=k < K)


@triton.jit(do_not_specialize=_PLAIN)
def _backward(
    start,
    u,
    scale,
    by_u,
    by_sum,
    by_u_before,
    u_before,
    scale_before,
    by_start,
    share,
    share_before,
    by_score,
    starts,
    ends,
    sources,
    entries,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    K_WIDE: tl.constexpr,
    H_WIDE: tl.constexpr,
):
    """One pass back, at its targets; on the way the u that it began with is made again."""
    node = tl.program_id(0)
    place, there = _place(node, K, H, K_WIDE, H_WIDE)
    k = tl.arange(0, K_WIDE)
    unit = _row(u, node, K, H, K_WIDE, H_WIDE)
    grad = _row(by_u, node, K, H, K_WIDE, H_WIDE)
    own_scale = tl.load(scale + node * K + k, mask=k < K, other=0.0)
    by_total = (grad - unit * tl.sum(unit * grad, axis=1)[:, None]) * own_scale[:, None]
    tl.store(by_sum + place, by_total, mask=there)
    own = _row(by_start, node, K, H, K_WIDE, H_WIDE)
    tl.store(by_start + place, own + by_total, mask=there)
    total = _row(start, node, K, H, K_WIDE, H_WIDE)
    mine = tl.zeros_like(total)
    for edge in range(tl.load(starts + node), tl.load(ends + node)):
        row = _row(start, tl.load(sources + edge), K, H, K_WIDE, H_WIDE)
        p = _at_edge(share, edge, entries, K, K_WIDE)
        by_p = tl.sum(by_total * row, axis=1)
        slope = p * (by_p - tl.sum(p * by_p, axis=0))
        _keep_at_edge(by_score, edge, entries, slope, K, K_WIDE)
        mine += slope[:, None] * row
        if not FIRST:
            total += _at_edge(share_before, edge, entries, K, K_WIDE)[:, None] * row
    tl.store(by_u_before + place, mine, mask=there)
    if FIRST:
        tl.store(u_before + place, total, mask=there)
    else:
        before = _unit(total)
        tl.store(u_before + place, total * before[:, None], mask=there)
        tl.store(scale_before + node * K + k, before, mask=k < K)


@triton.jit(do_not_specialize=_PLAIN)
def _to_sources(
    by_sum,
    u_before,
    by_start,
    share,
    by_score,
    starts,
    ends,
    targets,
    order,
    entries,
    K: tl.constexpr,
    H: tl.constexpr,
    K_WIDE: tl.constexpr,
    H_WIDE: tl.constexpr,
):
    """One pass back, at its sources: always summed in the same order, hence not by atomics."""
    node = tl.program_id(0)
    place, there = _place(node, K, H, K_WIDE, H_WIDE)
    total = _row(by_start, node, K, H, K_WIDE, H_WIDE)
    for number in range(tl.load(starts + node), tl.load(ends + node)):
        target, edge = tl.load(targets + number), tl.load(order + number)
        p = _at_edge(share, edge, entries, K, K_WIDE)
        slope = _at_edge(by_score, edge, entries, K, K_WIDE)
        total += p[:, None] * _row(by_sum, target, K, H, K_WIDE, H_WIDE)
        total += slope[:, None] * _row(u_before, target, K, H, K_WIDE, H_WIDE)
    tl.store(by_start + place, total, mask=there)
