"""ReLU and dropout in one kernel. Masks are bit-identical to those of `core.random` on a CPU.

Tensors are (B, N, D) float32, with B clients (or clients of several runs). Keys are (B,) int64.
Rows are (B, N) int32, the ids of the nodes. All are contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # numbers per program


def dropped(
    h: Tensor, keys: Tensor, rows: Tensor, salt: int | None, share: int, relu: bool
) -> Tensor:
    """Zero a fraction `share` / 2^16 of the entries of h, or of relu(h), and rescale the rest."""
    batch, height, width = h.shape
    wide = min(64, triton.next_power_of_2(width))
    grid = (batch, triton.cdiv(height, TILE // wide), triton.cdiv(width, wide))
    out, scale = torch.empty_like(h), 1.0 / (1.0 - share / 2**16)
    numbers = (salt or 0, share - 2**15, scale)
    tiles = {"SALTED": salt is not None, "RELU": relu, "TALL": TILE // wide, "WIDE": wide}
    _dropped[grid](h, keys, rows, out, height, width, *numbers, **tiles, num_warps=4)
    return out


def passed_back(grad: Tensor, out: Tensor, share: int) -> Tensor:
    """Return the gradient of h in `dropped` with ReLU, given the result `out` and its gradient."""
    found, scale = torch.empty_like(grad), 1.0 / (1.0 - share / 2**16)
    grid = (triton.cdiv(grad.numel(), TILE),)
    _passed_back[grid](grad, out, found, grad.numel(), scale, BLOCK=TILE, num_warps=4)
    return found


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _mix32(z):
    z = (z ^ (z >> 16)) * 0x7FEB352D
    z = (z ^ (z >> 15)) * 0x846CA68B
    return z ^ (z >> 16)


@triton.jit(do_not_specialize=["height", "salt", "least"])
def _dropped(
    h,
    keys,
    rows,
    out,
    height,
    width,
    salt: tl.int64,
    least: tl.int32,
    scale: tl.float32,
    SALTED: tl.constexpr,
    RELU: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Process a block of rows and columns of one client."""
    client = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TALL + tl.arange(0, TALL)
    d = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    key = tl.load(keys + client)
    if SALTED:
        key = _mix64((key ^ salt).to(tl.uint64, bitcast=True) * 0x94D049BB133111EB)
    else:
        key = key.to(tl.uint64, bitcast=True)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    row = tl.load(rows + client * height + n, mask=n < height, other=0)
    by_row = _mix32(row.to(tl.uint32, bitcast=True) ^ low)
    by_column = _mix32((d >> 1).to(tl.uint32) + high)
    bits = _mix32(by_row[:, None] + by_column[None, :])
    # One hash decides about two entries, with 16 bits each.
    half = tl.where((d & 1)[None, :] == 1, bits >> 16, bits & 0xFFFF)
    kept = half.to(tl.int16).to(tl.int32) >= least
    inside = (n < height)[:, None] & (d < width)[None, :]
    place = (client * height + n)[:, None] * width + d[None, :]
    found = tl.load(h + place, mask=inside, other=0.0)
    if RELU:
        found = tl.where(found < 0, 0.0, found)
    # Multiply instead of selecting, so that a non-finite number stays non-finite and is detected.
    tl.store(out + place, found * tl.where(kept, scale, 0.0), mask=inside)


@triton.jit
def _passed_back(grad, out, found, size, scale: tl.float32, BLOCK: tl.constexpr):
    """Rescale the gradient where the result is positive, else set it to zero."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = n < size
    slope = tl.load(grad + n, mask=there, other=0.0) * scale
    above = tl.load(out + n, mask=there, other=0.0) > 0
    tl.store(found + n, tl.where(above, slope, 0.0), mask=there)
