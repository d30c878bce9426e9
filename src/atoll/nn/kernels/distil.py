"""Parts of the losses on FedTAD's pseudo graphs and of their gradients, as GPU kernels.

The graphs have a hundred nodes, so the launches of torch's operations dominate their cost. Tensors
are float32. The kernels need CUDA and Triton, which every GPU build of torch installs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

AGREE = tl.constexpr(1e-6)
"""Smaller differences of student and teacher count as zero, so that rounding does not train."""


def l1_gaps(student: Tensor, taught: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `fedtad.divergence` with "l1", and the gradient of the student's logits, (B, C)."""
    (teachers, nodes, classes), rows = taught.shape, 8
    slope, parts = student.new_empty(nodes, classes), student.new_empty(triton.cdiv(nodes, rows))
    given = (student.contiguous(), taught.contiguous(), weight.contiguous(), slope, parts)
    wide = triton.next_power_of_2(classes)
    # Process as many teachers at once as the registers hold.
    tiles = {"ROWS": rows, "WIDE": wide, "MANY": max(1, min(16, 4096 // (rows * wide)))}
    _l1_gaps[(len(parts),)](*given, teachers, nodes, classes, **tiles, num_warps=4)
    return parts.sum(), slope


def half_gaps(x: Tensor, weight: Tensor) -> Tensor:
    """Return G of `fedtad._WeightedGaps`, (B, D): G_i = Σ_j w_ij sign(x_i - x_j)."""
    rows, width = x.shape
    half = x.new_empty(rows, width)
    grid, tiles = (triton.cdiv(rows, 4), triton.cdiv(width, 128)), {"ROWS": 4, "WIDE": 128}
    _half_gaps[grid](x.contiguous(), weight.contiguous(), half, rows, width, **tiles, num_warps=4)
    return half


@triton.jit(do_not_specialize=["teachers", "nodes", "classes"])
def _l1_gaps(
    student,
    taught,
    weight,
    slope,
    parts,
    teachers,
    nodes,
    classes,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    MANY: tl.constexpr,
):
    """Process a block of nodes, and all their teachers."""
    node, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    place = node[:, None] * classes + c[None, :]
    there = (node[:, None] < nodes) & (c[None, :] < classes)
    said = tl.load(student + place, mask=there, other=0.0)
    far, way = tl.zeros((ROWS, WIDE), tl.float32), tl.zeros((ROWS, WIDE), tl.float32)
    for first in range(0, teachers, MANY):
        k = first + tl.arange(0, MANY)
        trust = tl.load(
            weight + k[:, None] * nodes + node[None, :],
            mask=(k[:, None] < teachers) & (node[None, :] < nodes),
            other=0.0,
        )[:, :, None]
        places = k[:, None, None].to(tl.int64) * nodes * classes + place[None, :, :]
        are = (k[:, None, None] < teachers) & there[None, :, :]
        gap = said[None, :, :] - tl.load(taught + places, mask=are, other=0.0)
        gap = tl.where((tl.abs(gap) > AGREE) & are, gap, 0.0)
        far += tl.sum(trust * tl.abs(gap), axis=0)
        way += tl.sum(tl.where(gap > 0, trust, tl.where(gap < 0, -trust, 0.0)), axis=0)
    tl.store(slope + place, way / classes, mask=there)
    tl.store(parts + tl.program_id(0), tl.sum(tl.sum(far, axis=1), axis=0) / classes)


@triton.jit(do_not_specialize=["rows"])
def _half_gaps(x, weight, half, rows, width, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Process a block of rows and columns, against all rows."""
    i, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WIDE
    d += tl.arange(0, WIDE)
    place = i.to(tl.int64)[:, None] * width + d[None, :]
    there = (i[:, None] < rows) & (d[None, :] < width)
    own = tl.load(x + place, mask=there, other=0.0)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for first in range(0, rows, 8):
        for more in tl.static_range(8):  # start eight loads at once
            j = first + more
            other = tl.load(x + j * width + d, mask=(d < width) & (j < rows), other=0.0)[None, :]
            by = tl.load(weight + i * rows + j, mask=(i < rows) & (j < rows), other=0.0)[:, None]
            total += tl.where(own > other, by, tl.where(own < other, -by, 0.0))
    tl.store(half + place, total, mask=there)
