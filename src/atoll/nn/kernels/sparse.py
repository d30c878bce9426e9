"""Sparse products on a GPU: sums over bags of rows, and inner products of pairs of rows.

Torch's `embedding_bag` gives a thread a whole bag, and the padding of a stacked matrix is one bag
of thousands. Here a program reads many entries of its bag at once, steps over padding, and always
sums in the same order.

Tensors are float32 and contiguous, indices int32. Only for CUDA, and only where Triton is
installed, which every GPU build of torch brings along.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 64  # most columns that one program works on

TILE = 1024  # numbers that one program reads at once


def bags(dense: Tensor, index: Tensor, offsets: Tensor, weight: Tensor | None) -> Tensor:
    """As `ops.bags`: out[r] = sum over the entries e of bag r of weight[e] * dense[index[e]]."""
    rows, columns, entries = offsets.shape[0], dense.shape[1], index.shape[0]
    out = dense.new_empty(rows, columns)
    wide = min(COLUMNS, triton.next_power_of_2(columns))
    # As many entries at once as a usual bag has, but few enough for the registers.
    usual = triton.next_power_of_2(max(4, entries // max(1, rows)))
    at_once = max(1, min(TILE // wide, usual))
    grid, warps = (rows, triton.cdiv(columns, wide)), max(1, min(4, wide * at_once // 256))
    tensors = (dense, index.contiguous(), offsets.contiguous(), dense if weight is None else weight)
    tiles = {"WIDE": wide, "AT_ONCE": at_once, "AHEAD": max(256, at_once), "num_warps": warps}
    _bags[grid](*tensors, out, rows, entries, columns, WEIGHTED=weight is not None, **tiles)
    return out


def entry_dots(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """For each entry the inner product of a[row] and b[column]."""
    entries, width = rows.shape[0], a.shape[1]
    out = a.new_empty(entries)
    wide = min(COLUMNS, triton.next_power_of_2(width))
    at_once = max(1, 2 * TILE // wide)
    tensors = (a, b, rows.contiguous(), columns.contiguous(), out)
    tiles = {"WIDE": wide, "AT_ONCE": at_once, "num_warps": 4}
    _entry_dots[(triton.cdiv(entries, at_once),)](*tensors, entries, width, **tiles)
    return out


@triton.jit(do_not_specialize=["rows", "entries"])
def _bags(
    dense,
    index,
    offsets,
    weight,
    out,
    rows,
    entries,
    columns,
    WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One bag, and some of the columns."""
    bag = tl.program_id(0)
    d = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    e = tl.arange(0, AT_ONCE)
    first = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1, mask=bag + 1 < rows, other=entries)
    total = tl.zeros((AT_ONCE, WIDE), tl.float32)
    for block in range(first, end, AHEAD):
        block_end = tl.minimum(block + AHEAD, end)
        if WEIGHTED:
            ahead = block + tl.arange(0, AHEAD)
            seen = tl.load(weight + ahead, mask=ahead < block_end, other=0.0)
            if tl.max(tl.abs(seen), axis=0) == 0:  # padding
                block_end = block
        for entry in range(block, block_end, AT_ONCE):
            there = entry + e < block_end
            row = tl.load(index + entry + e, mask=there, other=0).to(tl.int64)
            places = dense + row[:, None] * columns + d[None, :]
            found = tl.load(places, mask=there[:, None] & (d[None, :] < columns), other=0.0)
            if WEIGHTED:
                found *= tl.load(weight + entry + e, mask=there, other=0.0)[:, None]
            total += found
    tl.store(out + bag.to(tl.int64) * columns + d, tl.sum(total, axis=0), mask=d < columns)


@triton.jit(do_not_specialize=["entries"])
def _entry_dots(
    a, b, rows, columns, out, entries, width, WIDE: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Some entries, along their whole rows."""
    entry = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    there = entry < entries
    left = tl.load(rows + entry, mask=there, other=0).to(tl.int64)[:, None] * width
    right = tl.load(columns + entry, mask=there, other=0).to(tl.int64)[:, None] * width
    total = tl.zeros((AT_ONCE, WIDE), tl.float32)
    for start in range(0, width, WIDE):
        d = start + tl.arange(0, WIDE)[None, :]
        inside = there[:, None] & (d < width)
        total += tl.load(a + left + d, mask=inside, other=0.0) * tl.load(
            b + right + d, mask=inside, other=0.0
        )
    tl.store(out + entry, tl.sum(total, axis=1), mask=there)
