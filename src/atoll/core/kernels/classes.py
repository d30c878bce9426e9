"""Fused kernels over logits: cross entropy with its gradient, and the counts for scoring.

Logits are (B, N, C) float32, with B clients (or clients of several runs). Labels are (B, N) int64
and masks (B, N) float32. All are contiguous. Sums have a fixed order. Counts are integers, so
their order does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # logits that one program reads at once
SPAN = 1024  # numbers of a mask that one program adds at once


def cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, weighted: bool
) -> tuple[Tensor, Tensor]:
    """Return each client's weighted mean loss, (B,), and the gradient of its logits, (B, N, C).

    `weighted` means that `weights` include class weights. Otherwise they are a mask, and a sum
    below one counts as one.
    """
    blocks, sizes, tiles = _tiles(logits)
    losses, slope = logits.new_empty(len(logits), blocks), logits.new_empty(logits.shape)
    tensors = (logits, labels, weights, losses, slope)
    _cross_entropy[(len(logits), blocks)](*tensors, *sizes, blocks, WEIGHTED=weighted, **tiles)
    return losses.squeeze(1) if blocks == 1 else losses.sum(1), slope


def scores(logits: Tensor, labels: Tensor, masks: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return counts by role, label and prediction, (B, 3, C, C), and mean losses, (B, 3)."""
    blocks, sizes, tiles = _tiles(logits)
    batch, _, classes = logits.shape
    counts = logits.new_zeros(batch, len(masks), classes, classes)
    losses = logits.new_empty(batch, blocks, len(masks))
    tensors = (logits, labels, masks, counts, losses)
    _scores[(batch, blocks)](*tensors, *sizes, blocks, **tiles)
    return counts, losses.squeeze(1) if blocks == 1 else losses.sum(1)


def _tiles(logits: Tensor) -> tuple[int, tuple[int, int], dict[str, int]]:
    """Return the number of row blocks per client, (N, C), and the tile sizes."""
    _, height, classes = logits.shape
    wide = triton.next_power_of_2(classes)
    tall = max(1, min(TILE // wide, triton.next_power_of_2(max(1, height))))
    tiles = {"TALL": tall, "WIDE": wide, "SPAN": SPAN, "num_warps": 8 if wide * tall > 2048 else 4}
    return max(1, triton.cdiv(height, tall)), (height, classes), tiles


_PLAIN = ["height", "blocks"]  # numbers for which no separate kernel is compiled


@triton.jit
def _total(weights, height, SPAN: tl.constexpr):
    """Return the sum of a client's weights."""
    total = tl.zeros((SPAN,), tl.float32)
    for start in range(0, height, SPAN):
        n = start + tl.arange(0, SPAN)
        total += tl.load(weights + n, mask=n < height, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _softmax(logits, labels, row, n, height, classes, WIDE: tl.constexpr):
    """Return logits, exp(logit - max), their sum, one-hot labels and losses of a block of rows."""
    c = tl.arange(0, WIDE)
    inside = (n < height)[:, None] & (c < classes)[None, :]
    place = (row + n)[:, None] * classes + c[None, :]
    found = tl.load(logits + place, mask=inside, other=0.0)
    found = tl.where((c < classes)[None, :], found, -float("inf"))
    below = found - tl.max(found, axis=1)[:, None]
    raised = tl.exp(below)
    total = tl.sum(raised, axis=1)
    true = c[None, :] == tl.load(labels + row + n, mask=n < height, other=0)[:, None]
    loss = tl.log(total) - tl.sum(tl.where(true, below, 0.0), axis=1)
    return found, raised, total, true, loss


@triton.jit(do_not_specialize=_PLAIN)
def _cross_entropy(
    logits,
    labels,
    weights,
    losses,
    slope,
    height,
    classes,
    blocks,
    WEIGHTED: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Process a block of rows of one client."""
    client, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = client * height
    total = _total(weights + row, height, SPAN)
    divisor = tl.where(total > 0, total, 1.0) if WEIGHTED else tl.maximum(total, 1.0)
    n, c = block * TALL + tl.arange(0, TALL), tl.arange(0, WIDE)
    _, raised, among, true, loss = _softmax(logits, labels, row, n, height, classes, WIDE)
    weight = tl.load(weights + row + n, mask=n < height, other=0.0)
    part = tl.sum(loss * weight, axis=0) / divisor
    tl.store(losses + client * blocks + block, part)
    share = tl.div_rn(raised, tl.broadcast_to(among[:, None], raised.shape))
    found = (share - true.to(tl.float32)) * (weight / divisor)[:, None]
    place = (row + n)[:, None] * classes + c[None, :]
    tl.store(slope + place, found, mask=(n < height)[:, None] & (c < classes)[None, :])


@triton.jit(do_not_specialize=_PLAIN)
def _scores(
    logits,
    labels,
    masks,
    counts,
    losses,
    height,
    classes,
    blocks,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Process a block of rows of one client, for every role."""
    client, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, n = client * height, block * TALL + tl.arange(0, TALL)
    found, _, _, _, loss = _softmax(logits, labels, row, n, height, classes, WIDE)
    guess = tl.argmax(found, axis=1)
    label = tl.load(labels + row + n, mask=n < height, other=0)
    for role in tl.static_range(len(masks)):
        mask = tl.load(masks[role] + row + n, mask=n < height, other=0.0)
        divisor = tl.maximum(_total(masks[role] + row, height, SPAN), 1.0)
        place = (client * blocks + block) * len(masks) + role
        tl.store(losses + place, tl.sum(loss * mask, axis=0) / divisor)
        cell = ((client * len(masks) + role) * classes + label) * classes + guess
        tl.atomic_add(counts + cell, mask, mask=mask != 0, sem="relaxed")
