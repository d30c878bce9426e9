"""Sparse products on a GPU: sums over bags of rows, and inner products of pairs of rows.

A bag is the entries of one row of a sparse matrix. Torch's `embedding_bag` gives one thread a whole
bag, and the padding of a stacked matrix is one bag of thousands of entries. Here a program
processes one bag, or two if there are few columns. It reads several entries of a bag at once, skips
entries of weight zero (padding), and always sums in the same order.

Tensors are float32 and contiguous, indices int32. The kernels need CUDA and Triton, which every GPU
build of torch installs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 64  # largest number of columns per program
AT_ONCE = 8  # entries of a bag that are read at once
UNROLLED = tl.constexpr(4)  # factor of `AT_ONCE` for longer bags
AHEAD = 512  # entries that a program checks for padding at once
NARROW = 16  # up to this number of columns, a program processes two bags
TILE = 2048  # numbers that one program reads at once, in the other kernels


def bags(
    dense: Tensor,
    index: Tensor,
    offsets: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    shared: bool = False,
) -> Tensor:
    """Compute `ops.bags` on a GPU. Add a bias, (B, columns), to the rows of each of B equal blocks.

    Microseconds for Cora, ten clients, one seed and ten seeds, on an H200: X W with 64 columns
    5.7 and 37, its transpose 14.7 and 106, A H 6.2 and 22 (with 7 columns 4.3 and 13). More bags
    or warps per program are slower. With `shared`, all blocks read the same dense matrix.
    """
    rows, columns, entries = offsets.shape[0], dense.shape[1], index.shape[0]
    out = dense.new_empty(rows, columns)
    wide = min(COLUMNS, triton.next_power_of_2(columns))
    together, warps = (2, 4) if wide <= NARROW else (1, 2)
    grid = (triton.cdiv(rows, together), triton.cdiv(columns, wide))
    height = rows if bias is None else rows // len(bias)
    some = (dense if part is None else part for part in (weight, bias))
    tensors = (dense, index.contiguous(), offsets.contiguous(), *some, out)
    sizes = (rows, entries, columns, height, dense.shape[0])
    kinds = {"WEIGHTED": weight is not None, "BIASED": bias is not None, "SHARED": shared}
    tiles = {"ROWS": together, "AT_ONCE": AT_ONCE, "WIDE": wide, "AHEAD": AHEAD}
    _bags[grid](*tensors, *sizes, **kinds, **tiles, num_warps=warps)
    return out


def column_sums(x: Tensor) -> Tensor:
    """Sum x, (B, N, columns), over the rows of each block. Shape (B, columns)."""
    blocks, height, columns = x.shape
    out = x.new_empty(blocks, columns)
    wide = min(16, triton.next_power_of_2(columns))
    grid = (blocks, triton.cdiv(columns, wide))
    _column_sums[grid](x, out, height, columns, TALL=TILE // wide, WIDE=wide, num_warps=4)
    return out


def entry_dots(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the inner product of a[row] and b[column] for each entry, (E,)."""
    entries, width = rows.shape[0], a.shape[1]
    out = a.new_empty(entries)
    wide = min(COLUMNS, triton.next_power_of_2(width))
    at_once = max(1, 2 * TILE // wide)
    tensors = (a, b, rows.contiguous(), columns.contiguous(), out)
    tiles = {"WIDE": wide, "AT_ONCE": at_once, "num_warps": 4}
    _entry_dots[(triton.cdiv(entries, at_once),)](*tensors, entries, width, **tiles)
    return out


@triton.jit
def _terms(
    dense,
    index,
    weight,
    place,
    end,
    d,
    columns,
    height,
    WEIGHTED: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Return the products of a block of entries with their rows, (ROWS, AT_ONCE, WIDE)."""
    there = place < end[:, None]
    row = tl.load(index + place, mask=there, other=0)
    if SHARED:
        row = row % height
    places = dense + row.to(tl.int64)[:, :, None] * columns + d[None, None, :]
    found = tl.load(places, mask=there[:, :, None] & (d[None, None, :] < columns), other=0.0)
    if WEIGHTED:
        found *= tl.load(weight + place, mask=there, other=0.0)[:, :, None]
    return found


@triton.jit(do_not_specialize=["rows", "entries", "block_height", "dense_height"])
def _bags(
    dense,
    index,
    offsets,
    weight,
    bias,
    out,
    rows,
    entries,
    columns,
    block_height,
    dense_height,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Process a block of bags and of columns."""
    bag = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    e = tl.arange(0, AT_ONCE)
    first = tl.load(offsets + bag, mask=bag < rows, other=entries)
    end = tl.load(offsets + bag + 1, mask=bag + 1 < rows, other=entries)
    start = first[:, None] + e[None, :]
    total = _terms(dense, index, weight, start, end, d, columns, dense_height, WEIGHTED, SHARED)
    longest = tl.max(end - first, axis=0)
    entry, looked = AT_ONCE, AT_ONCE
    while entry < longest:
        if WEIGHTED and entry >= looked:
            place = first[:, None] + entry + tl.arange(0, AHEAD)[None, :]
            seen = tl.load(weight + place, mask=place < end[:, None], other=0.0)
            looked = entry + AHEAD
            if tl.max(tl.max(tl.abs(seen), axis=1), axis=0) == 0:  # padding
                entry = looked
        if entry < looked or not WEIGHTED:
            for more in tl.static_range(UNROLLED):
                place = start + entry + more * AT_ONCE
                total += _terms(
                    dense, index, weight, place, end, d, columns, dense_height, WEIGHTED, SHARED
                )
            entry += UNROLLED * AT_ONCE
    found = tl.sum(total, axis=1)
    inside = (bag[:, None] < rows) & (d[None, :] < columns)
    if BIASED:
        places = bias + (bag // block_height)[:, None] * columns + d[None, :]
        found += tl.load(places, mask=inside, other=0.0)
    tl.store(out + bag.to(tl.int64)[:, None] * columns + d[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["height"])
def _column_sums(x, out, height, columns, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Process a block of columns of one block of rows."""
    block = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    total = tl.zeros((TALL, WIDE), tl.float32)
    for start in range(0, height, TALL):
        n = start + tl.arange(0, TALL)
        inside = (n[:, None] < height) & (d[None, :] < columns)
        places = x + (block * height + n)[:, None] * columns + d[None, :]
        total += tl.load(places, mask=inside, other=0.0)
    tl.store(out + block * columns + d, tl.sum(total, axis=0), mask=d < columns)


@triton.jit(do_not_specialize=["entries"])
def _entry_dots(
    a, b, rows, columns, out, entries, width, WIDE: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Process a block of entries, along their whole rows."""
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
