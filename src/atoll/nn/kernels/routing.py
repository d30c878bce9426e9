"""All routing passes of a layer of `disengcn` in one GPU kernel, and their gradient in two.

With torch's operations a pass reads every neighbour's row three times in the forward direction and
six times backwards, and these reads dominate its cost. Here one program processes one node, because
a pass does not depend on other nodes' results of earlier passes. It keeps the node's own row in
registers and reads several neighbours at a time, because single reads would wait for memory.

N nodes, K factors, T passes and E entries: per-node tensors are (N, K, hidden) and contiguous,
per-edge tensors (T, K, E), all float32. The kernels need CUDA and Triton, which every GPU build of
torch installs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NOWHERE = tl.constexpr(1e-12)  # length below which a row has no direction
FEW = 32
"""Largest number of entries of a node that a small program processes.

Many small programs run at once on one multiprocessor, while one large program fills it. But a small
program would take as long for the few nodes with many neighbours as for all other nodes together.
"""


def route(x: Tensor, matrix: Sequence[Tensor], iterations: int) -> tuple[Tensor, Tensor]:
    """Run all passes. Return the last u, (N, K, hidden), and the shares p of all passes, (T, K, E).

    The matrix is given as the tensors of a `Sparse` that `disengcn.MATRIX` names.
    """
    offsets, columns, _, values, *_ = matrix
    start, _ = _units(x)
    # Padding stays zero.
    shares, last = x.new_zeros(iterations, x.shape[1], len(columns)), torch.empty_like(start)
    edges, counts = (offsets, columns, values), (len(columns), iterations)
    _launch(_forward, x, start, last, shares, *edges, *counts)
    return last, shares


def route_back(grad: Tensor, x: Tensor, shares: Tensor, matrix: Sequence[Tensor]) -> Tensor:
    """Return the gradient of x, given the gradient of the last u."""
    offsets, columns, _, values, t_offsets, t_columns, t_order = matrix
    start, scale = _units(x)
    own, out, by_score = torch.empty_like(start), torch.empty_like(start), torch.zeros_like(shares)
    by_sum, before = start.new_empty(2, len(shares), *start.shape)
    per_edge, counts = (shares, by_score), (len(columns), len(shares))
    edges, by_source = (offsets, columns, values), (t_offsets, t_columns, t_order, values)
    _launch(_backward, x, start, grad.contiguous(), by_sum, before, own, *per_edge, *edges, *counts)
    per_node = (start, scale, by_sum, before, own, out)
    _launch(_to_sources, x, *per_node, *per_edge, *by_source, *counts)
    return out


def _units(x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise rows to length one. Return the rows and their scale factors, (N, K)."""
    x = x.contiguous()
    unit, scale = torch.empty_like(x), x.new_empty(x.shape[:2])
    sizes = _sizes(x, 1)
    del sizes["EDGES"]
    _normalise[(len(x),)](x, unit, scale, **sizes)
    return unit, scale


def _launch(kernel: Any, x: Tensor, *args: Tensor | int) -> None:
    """Run small programs for nodes with few entries, then large programs for the others."""
    kernel[(len(x),)](*args, LEAST=-1, MOST=FEW, **_sizes(x, 1024))
    kernel[(len(x),)](*args, LEAST=FEW, MOST=1 << 30, **_sizes(x, 8192))


def _sizes(x: Tensor, tile: int) -> dict[str, int]:
    """Sizes of programs that hold about `tile` numbers of neighbours' rows at once."""
    _, factors, hidden = x.shape
    k_wide, h_wide = triton.next_power_of_2(factors), triton.next_power_of_2(hidden)
    edges = max(1, tile // (k_wide * h_wide))
    warps = max(1, min(8, edges * k_wide * h_wide // 1024))
    wide = {"K_WIDE": k_wide, "H_WIDE": h_wide, "EDGES": edges, "num_warps": warps}
    return {"K": factors, "H": hidden, **wide}


_PLAIN = ["entries", "passes"]  # numbers for which no separate kernel is compiled


@triton.jit
def _place(node, K: tl.constexpr, H: tl.constexpr, K_WIDE: tl.constexpr, H_WIDE: tl.constexpr):
    """Addresses of a node's row, (K_WIDE, H_WIDE), and a mask of the valid ones."""
    k, j = tl.arange(0, K_WIDE), tl.arange(0, H_WIDE)
    place = node.to(tl.int64) * (K * H) + k[:, None] * H + j[None, :]
    return place, (k[:, None] < K) & (j[None, :] < H)


@triton.jit
def _rows(
    rows, nodes, are, K: tl.constexpr, H: tl.constexpr, K_WIDE: tl.constexpr, H_WIDE: tl.constexpr
):
    """Load the rows of a block of nodes, (EDGES, K_WIDE, H_WIDE), with zeros for masked nodes."""
    place, there = _place(nodes[:, None, None], K, H, K_WIDE, H_WIDE)
    return tl.load(rows + place, mask=there & are[:, None, None], other=0.0)


@triton.jit
def _at_edges(edge, are, number, entries, K: tl.constexpr, K_WIDE: tl.constexpr):
    """Addresses of the numbers of a block of edges in a pass, (EDGES, K_WIDE), and a mask."""
    k = tl.arange(0, K_WIDE)
    place = (number * K + k).to(tl.int64)[None, :] * entries + edge[:, None]
    return place, (k < K)[None, :] & are[:, None]


@triton.jit
def _span(starts, node, entries):
    """Return the first entry of a node and the end of its entries."""
    after = node + 1 < tl.num_programs(0)
    return tl.load(starts + node), tl.load(starts + node + 1, mask=after, other=entries)


@triton.jit
def _unit(total):
    """Return the factors that give rows length one. The factor of a zero row is zero."""
    length = tl.sqrt(tl.sum(total * total, axis=1))
    return tl.where(length > NOWHERE, 1.0 / length, 0.0)


@triton.jit
def _across(grad, unit, scale):
    """Return the gradient of a row, given the gradient of `unit`, the row times `scale`."""
    return (grad - unit * tl.sum(unit * grad, axis=1)[:, None]) * scale[:, None]


@triton.jit
def _normalise(
    x, unit, scale, K: tl.constexpr, H: tl.constexpr, K_WIDE: tl.constexpr, H_WIDE: tl.constexpr
):
    node = tl.program_id(0)
    place, there = _place(node, K, H, K_WIDE, H_WIDE)
    k = tl.arange(0, K_WIDE)
    row = tl.load(x + place, mask=there, other=0.0)
    by = _unit(row)
    tl.store(unit + place, row * by[:, None], mask=there)
    tl.store(scale + node * K + k, by, mask=k < K)


@triton.jit(do_not_specialize=_PLAIN)
def _forward(
    start,
    last,
    share,
    starts,
    sources,
    values,
    entries,
    passes,
    K: tl.constexpr,
    H: tl.constexpr,
    K_WIDE: tl.constexpr,
    H_WIDE: tl.constexpr,
    EDGES: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """Compute p = softmax_k <x̂_s, u_t> and u_t <- normalise(x̂_t + Σ_s p x̂_s) in each pass."""
    node = tl.program_id(0)
    place, there = _place(node, K, H, K_WIDE, H_WIDE)
    k = tl.arange(0, K_WIDE)
    own = tl.load(start + place, mask=there, other=0.0)
    begin, end = _span(starts, node, entries)
    # Padding is at the end of a row, and mostly in rows without other entries.
    end = tl.where(tl.load(values + begin, mask=begin < end, other=0.0) != 0, end, begin)
    if (end - begin <= LEAST) | (end - begin > MOST):
        return
    u = own
    for number in range(passes):
        total = tl.zeros((EDGES, K_WIDE, H_WIDE), tl.float32)
        for first in range(begin, end, EDGES):
            edge = first + tl.arange(0, EDGES)
            source = tl.load(sources + edge, mask=edge < end, other=0)
            are = tl.load(values + edge, mask=edge < end, other=0.0) != 0
            row = _rows(start, source, are, K, H, K_WIDE, H_WIDE)
            score = tl.sum(u[None, :, :] * row, axis=2)
            score = tl.where((k < K)[None, :], score, -float("inf"))
            raised = tl.exp(score - tl.max(score, axis=1)[:, None])
            p = raised / tl.sum(raised, axis=1)[:, None]
            at, is_there = _at_edges(edge, are, number, entries, K, K_WIDE)
            tl.store(share + at, p, mask=is_there)
            total += p[:, :, None] * row
        u = own + tl.sum(total, axis=0)
        u = u * _unit(u)[:, None]
    tl.store(last + place, u, mask=there)


@triton.jit(do_not_specialize=_PLAIN)
def _backward(
    start,
    by_last,
    by_sum,
    before,
    by_own,
    share,
    by_score,
    starts,
    sources,
    values,
    entries,
    passes,
    K: tl.constexpr,
    H: tl.constexpr,
    K_WIDE: tl.constexpr,
    H_WIDE: tl.constexpr,
    EDGES: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """Compute gradients at the targets, from the last pass to the first. Recompute each u."""
    node, nodes = tl.program_id(0), tl.num_programs(0)
    place, there = _place(node, K, H, K_WIDE, H_WIDE)
    own = tl.load(start + place, mask=there, other=0.0)
    grad = tl.load(by_last + place, mask=there, other=0.0)
    begin, end = _span(starts, node, entries)
    end = tl.where(tl.load(values + begin, mask=begin < end, other=0.0) != 0, end, begin)
    if (end - begin <= LEAST) | (end - begin > MOST):
        return
    summed, by_total = tl.zeros_like(own), tl.zeros_like(own)
    # The first iteration only computes the last u.
    for back in range(passes + 1):
        number = passes - back
        total = tl.zeros((EDGES, K_WIDE, H_WIDE), tl.float32)
        by_u = tl.zeros((EDGES, K_WIDE, H_WIDE), tl.float32)
        for first in range(begin, end, EDGES):
            edge = first + tl.arange(0, EDGES)
            source = tl.load(sources + edge, mask=edge < end, other=0)
            are = tl.load(values + edge, mask=edge < end, other=0.0) != 0
            row = _rows(start, source, are, K, H, K_WIDE, H_WIDE)
            at, is_there = _at_edges(edge, are & (number > 0), number - 1, entries, K, K_WIDE)
            total += tl.load(share + at, mask=is_there, other=0.0)[:, :, None] * row
            at, is_there = _at_edges(edge, are & (back > 0), number, entries, K, K_WIDE)
            p = tl.load(share + at, mask=is_there, other=0.0)
            by_p = tl.sum(by_total[None, :, :] * row, axis=2)
            slope = p * (by_p - tl.sum(p * by_p, axis=1)[:, None])
            tl.store(by_score + at, slope, mask=is_there)
            by_u += slope[:, :, None] * row
        u = own + tl.sum(total, axis=0)
        scale = tl.where(number > 0, _unit(u), 1.0)  # the first u is a unit vector already
        u = u * scale[:, None]
        if back > 0:
            grad = tl.sum(by_u, axis=0)
            tl.store(before + nodes.to(tl.int64) * (number * K * H) + place, u, mask=there)
        if number > 0:
            by_total = _across(grad, u, scale)
            summed += by_total
            after = nodes.to(tl.int64) * ((number - 1) * K * H)
            tl.store(by_sum + after + place, by_total, mask=there)
    tl.store(by_own + place, summed + grad, mask=there)


@triton.jit(do_not_specialize=_PLAIN)
def _to_sources(
    start,
    scale,
    by_sum,
    before,
    by_own,
    out,
    share,
    by_score,
    starts,
    targets,
    order,
    values,
    entries,
    passes,
    K: tl.constexpr,
    H: tl.constexpr,
    K_WIDE: tl.constexpr,
    H_WIDE: tl.constexpr,
    EDGES: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """Sum the gradients of all passes at the sources, in a fixed order without atomics."""
    node, nodes = tl.program_id(0), tl.num_programs(0)
    place, there = _place(node, K, H, K_WIDE, H_WIDE)
    k = tl.arange(0, K_WIDE)
    begin, end = _span(starts, node, entries)
    entry = tl.load(order + begin, mask=begin < end, other=0)
    end = tl.where(tl.load(values + entry, mask=begin < end, other=0.0) != 0, end, begin)
    if (end - begin <= LEAST) | (end - begin > MOST):
        return
    total = tl.zeros((EDGES, K_WIDE, H_WIDE), tl.float32)
    for first in range(begin, end, EDGES):
        edge = first + tl.arange(0, EDGES)
        are = edge < end
        target = tl.load(targets + edge, mask=are, other=0)
        edge = tl.load(order + edge, mask=are, other=0)
        for number in range(passes):
            at, is_there = _at_edges(edge, are, number, entries, K, K_WIDE)
            p = tl.load(share + at, mask=is_there, other=0.0)
            slope = tl.load(by_score + at, mask=is_there, other=0.0)
            of_pass = nodes.to(tl.int64) * (number * K * H)
            total += p[:, :, None] * _rows(by_sum + of_pass, target, are, K, H, K_WIDE, H_WIDE)
            total += slope[:, :, None] * _rows(before + of_pass, target, are, K, H, K_WIDE, H_WIDE)
    grad = tl.load(by_own + place, mask=there, other=0.0) + tl.sum(total, axis=0)
    by = tl.load(scale + node * K + k, mask=k < K, other=0.0)
    unit = tl.load(start + place, mask=there, other=0.0)
    tl.store(out + place, _across(grad, unit, by), mask=there)
