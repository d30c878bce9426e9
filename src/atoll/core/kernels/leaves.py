"""Kernels that process all leaves of a tree in one launch: an Adam step, a pull, and a check.

Leaves are (B, ...) float32 and contiguous, with B clients (or clients of several runs). A program
processes a block of one client's part of one leaf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of a leaf per program of Adam
CHECKED = 4096  # numbers of a leaf per program of `finite`


def adam(
    settings: tuple[float, ...], steps: Tensor, lists: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Make one Adam step. Return the step counts, (B,), and new parameters, means and squares.

    `settings` are lr, weight_decay, beta1, beta2 and eps. `lists` are parameters, gradients, means
    and squares. `steps` are the counts before this step. Inputs are not overwritten.
    """
    lr, decay, beta1, beta2, eps = settings
    clients, given = steps.numel(), [tuple(leaf.contiguous() for leaf in part) for part in lists]
    new = [tuple(torch.empty_like(leaf) for leaf in given[0]) for _ in range(3)]
    sizes = tuple(leaf.numel() // clients for leaf in given[0])
    grid = (clients * sum(triton.cdiv(size, BLOCK) for size in sizes),)
    # If a beta is zero, its powers are zero as well.
    logs = (math.log(beta) if beta else -1e30 for beta in (beta1, beta2))
    numbers = (lr, *logs, decay, beta1, 1 - beta1, beta2, 1 - beta2, eps)
    counted = torch.empty_like(steps, memory_format=torch.contiguous_format)
    _adam[grid](
        *given, *new, steps.contiguous(), counted, sizes, clients, *numbers, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip
    return counted, new


def pull(
    mu: float,
    axes: int,
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    starts: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return g + mu (w - start) for every leaf, where leaves begin with `axes` axes of clients.

    If all clients have the same start, it is an expanded view. The kernel reads it without a copy.
    """
    shape = grads[0].shape[:axes]
    shared = all(start.stride(axes - 1) == 0 for start in starts)
    if shared:
        starts = [start.select(axes - 1, 0) for start in starts]
    given = [tuple(leaf.contiguous() for leaf in part) for part in (grads, params, starts)]
    new = tuple(torch.empty_like(leaf) for leaf in given[0])
    clients = math.prod(shape)
    sizes = tuple(leaf.numel() // clients for leaf in given[0])
    grid = (clients * sum(triton.cdiv(size, BLOCK) for size in sizes),)
    each = shape[-1] if shared else 1
    _pull[grid](*given, new, sizes, clients, each, mu, BLOCK=BLOCK, num_warps=4)
    return new


def finite(leaves: Sequence[Tensor]) -> Tensor:
    """Return a flag per leaf and client, leaf by leaf: whether the client's part is finite."""
    some = tuple(leaf.contiguous() for leaf in leaves)
    rows = tuple(len(leaf) for leaf in some)
    sizes = tuple(leaf.numel() // len(leaf) for leaf in some)
    found = torch.ones(sum(rows), dtype=torch.uint8, device=some[0].device)
    programs = (r * triton.cdiv(s, CHECKED) for r, s in zip(rows, sizes, strict=True))
    _finite[(sum(programs),)](some, found, rows, sizes, BLOCK=CHECKED, num_warps=4)
    return found.view(torch.bool)


@triton.jit(do_not_specialize=["clients"])
def _adam(
    values,
    grads,
    means,
    squares,
    new_values,
    new_means,
    new_squares,
    steps,
    new_steps,
    sizes,
    clients,
    lr: tl.float64,
    log_beta1: tl.float64,
    log_beta2: tl.float64,
    decay: tl.float32,
    beta1: tl.float32,
    rest1: tl.float32,
    beta2: tl.float32,
    rest2: tl.float32,
    eps: tl.float32,
    BLOCK: tl.constexpr,
):
    """Process a block of one client's part of one leaf."""
    program, first = tl.program_id(0), 0
    for leaf in tl.static_range(len(values)):
        chunks = tl.cdiv(sizes[leaf], BLOCK)
        mine = program - first
        if (mine >= 0) & (mine < clients * chunks):
            client = mine // chunks
            # Double precision only for powers of numbers near one.
            count = tl.load(steps + client).to(tl.float64) + 1
            rate = (lr / (1 - tl.exp(count * log_beta1))).to(tl.float32)
            bias = tl.sqrt(1 - tl.exp(count * log_beta2)).to(tl.float32)
            if leaf == 0:
                tl.store(new_steps + client, count.to(tl.float32), mask=mine % chunks == 0)
            n = (mine % chunks) * BLOCK + tl.arange(0, BLOCK)
            there, place = n < sizes[leaf], client.to(tl.int64) * sizes[leaf] + n
            p = tl.load(values[leaf] + place, mask=there, other=0.0)
            g = tl.load(grads[leaf] + place, mask=there, other=0.0) + p * decay
            m = beta1 * tl.load(means[leaf] + place, mask=there, other=0.0) + rest1 * g
            v = beta2 * tl.load(squares[leaf] + place, mask=there, other=0.0) + rest2 * g * g
            size = tl.div_rn(tl.sqrt_rn(v), tl.broadcast_to(bias, v.shape)) + eps
            tl.store(new_values[leaf] + place, p - tl.div_rn(rate * m, size), mask=there)
            tl.store(new_means[leaf] + place, m, mask=there)
            tl.store(new_squares[leaf] + place, v, mask=there)
        first += clients * chunks


@triton.jit(do_not_specialize=["clients", "each"])
def _pull(grads, values, starts, new, sizes, clients, each, mu: tl.float32, BLOCK: tl.constexpr):
    """Process a block of one client's part of one leaf. `each` clients in a row share a start."""
    program, first = tl.program_id(0), 0
    for leaf in tl.static_range(len(values)):
        chunks = tl.cdiv(sizes[leaf], BLOCK)
        mine = program - first
        if (mine >= 0) & (mine < clients * chunks):
            client = mine // chunks
            n = (mine % chunks) * BLOCK + tl.arange(0, BLOCK)
            there, place = n < sizes[leaf], client.to(tl.int64) * sizes[leaf] + n
            start = (client // each).to(tl.int64) * sizes[leaf] + n
            w = tl.load(values[leaf] + place, mask=there, other=0.0)
            away = w - tl.load(starts[leaf] + start, mask=there, other=0.0)
            g = tl.load(grads[leaf] + place, mask=there, other=0.0)
            tl.store(new[leaf] + place, g + mu * away, mask=there)
        first += clients * chunks


@triton.jit
def _finite(leaves, found, rows, sizes, BLOCK: tl.constexpr):
    """Process a block of one client's part of one leaf. `found` is initialised with ones."""
    program, first, place = tl.program_id(0), 0, 0
    for leaf in tl.static_range(len(leaves)):
        chunks = tl.cdiv(sizes[leaf], BLOCK)
        mine = program - first
        if (mine >= 0) & (mine < rows[leaf] * chunks):
            row = mine // chunks
            n = (mine % chunks) * BLOCK + tl.arange(0, BLOCK)
            places = leaves[leaf] + row.to(tl.int64) * sizes[leaf] + n
            numbers = tl.load(places, mask=n < sizes[leaf], other=0.0)
            bad = tl.max((tl.abs(numbers) < float("inf")).to(tl.int32) ^ 1, axis=0)
            tl.store(found + place + row, tl.zeros_like(bad).to(tl.uint8), mask=bad != 0)
        first += rows[leaf] * chunks
        place += rows[leaf]
