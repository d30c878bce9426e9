"""The entries of a graph convolution with weighted edges on a GPU, and their gradient.

    v_e = s_r s_c w_e,   s = (Σ_e w_e over the row)^-1/2,   w_e = 1 for a self-loop, 0 for padding.
    ∂L/∂w_e = s_r s_c g_e - s_r² (Σ v g over row r + Σ v g over column r) / 2,   g_e = ∂L/∂v_e.

A matrix is given as the tensors of a `Sparse` that `edges.MATRIX` names. Tensors are float32,
indices int32. The kernels need CUDA and Triton, which every GPU build of torch installs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LEAST = tl.constexpr(1e-12)  # least degree, because a node of the padding has no entries
FEW = tl.constexpr(16)  # entries of a node that are read at once
MANY = tl.constexpr(512)  # the same for longer rows: the last node of a stack has all padding
NODES = 8  # nodes per program
TILE = 512  # entries per program


def normalised(weight: Tensor, *matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entries v by row and by column, (E,) each, and s, (N,)."""
    weight, offsets, *ends, values, _, t_order = (t.contiguous() for t in (weight, *matrix))
    nodes, entries = len(offsets), len(weight)
    scale, out, t_out = (weight.new_empty(size) for size in (nodes, entries, entries))
    given, grid = (weight, values, *ends), (triton.cdiv(nodes, NODES),)
    _scale[grid](*given, offsets, scale, nodes, entries, NODES=NODES, num_warps=4)
    places, grid = (t_order, scale, out, t_out), (triton.cdiv(entries, TILE),)
    _entries[grid](*given, *places, entries, TILE=TILE, num_warps=4)
    return out, t_out, scale


def normalised_back(grad: Tensor, found: Tensor, scale: Tensor, *matrix: Tensor) -> Tensor:
    """Return the gradient of the edge weights, given that of `found`. Entries are in row order."""
    grad, offsets, *ends, values, t_offsets, t_order = (t.contiguous() for t in (grad, *matrix))
    nodes, entries = len(offsets), len(found)
    by_degree, out = grad.new_empty(nodes), grad.new_empty(entries)
    bags, grid = (offsets, t_offsets, t_order, scale), (triton.cdiv(nodes, NODES),)
    _by_degree[grid](grad, found, *bags, by_degree, nodes, entries, NODES=NODES, num_warps=4)
    given, grid = (grad, values, *ends, scale, by_degree, out), (triton.cdiv(entries, TILE),)
    _entries_back[grid](*given, entries, TILE=TILE, num_warps=4)
    return out


@triton.jit
def _weight(weight, values, columns, rows, entry, there):
    """Return the weights of a block of entries, and their ends."""
    row = tl.load(rows + entry, mask=there, other=0)
    column = tl.load(columns + entry, mask=there, other=0)
    given = tl.load(weight + entry, mask=there, other=0.0)
    is_real = tl.load(values + entry, mask=there, other=0.0) != 0
    return tl.where(is_real, tl.where(row != column, given, 1.0), 0.0), row, column


@triton.jit
def _terms(one, other, columns, rows, place, end, KIND: tl.constexpr):
    """Return terms of entries, by KIND: weights (0), products (1), products at `columns` (2)."""
    there = place < end[:, None]
    if KIND == 0:
        found, _, _ = _weight(one, other, columns, rows, place, there)
    else:
        if KIND == 2:
            place = tl.load(columns + place, mask=there, other=0)
        found = tl.load(one + place, mask=there, other=0.0)
        found *= tl.load(other + place, mask=there, other=0.0)
    return found


@triton.jit
def _sums(one, other, columns, rows, offsets, node, nodes, entries, KIND: tl.constexpr):
    """Sum the terms of the entries of a block of nodes."""
    first = tl.load(offsets + node, mask=node < nodes, other=entries)
    end = tl.load(offsets + node + 1, mask=node + 1 < nodes, other=entries)
    place = first[:, None] + tl.arange(0, FEW)[None, :]
    total = tl.sum(_terms(one, other, columns, rows, place, end, KIND), axis=1)
    done, longest = FEW, tl.max(end - first, axis=0)
    while done < longest:
        more = first[:, None] + done + tl.arange(0, MANY)[None, :]
        total += tl.sum(_terms(one, other, columns, rows, more, end, KIND), axis=1)
        done += MANY
    return total


@triton.jit(do_not_specialize=["nodes", "entries"])
def _scale(weight, values, columns, rows, offsets, scale, nodes, entries, NODES: tl.constexpr):
    """Process a block of nodes."""
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    degree = _sums(weight, values, columns, rows, offsets, node, nodes, entries, 0)
    tl.store(scale + node, 1.0 / tl.sqrt(tl.maximum(degree, LEAST)), mask=node < nodes)


@triton.jit
def _scaled(weight, values, columns, rows, scale, entry, there):
    found, row, column = _weight(weight, values, columns, rows, entry, there)
    found *= tl.load(scale + row, mask=there, other=0.0)
    return found * tl.load(scale + column, mask=there, other=0.0)


@triton.jit(do_not_specialize=["entries"])
def _entries(
    weight, values, columns, rows, t_order, scale, out, t_out, entries, TILE: tl.constexpr
):
    """Process a block of entries by row, and as many by column."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = place < entries
    by_row = _scaled(weight, values, columns, rows, scale, place, there)
    entry = tl.load(t_order + place, mask=there, other=0)
    by_column = _scaled(weight, values, columns, rows, scale, entry, there)
    tl.store(out + place, by_row, mask=there)
    tl.store(t_out + place, by_column, mask=there)


@triton.jit(do_not_specialize=["nodes", "entries"])
def _by_degree(
    grad, found, offsets, t_offsets, t_order, scale, out, nodes, entries, NODES: tl.constexpr
):
    """Compute the gradient of the degrees of a block of nodes."""
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    total = _sums(grad, found, t_order, t_order, offsets, node, nodes, entries, 1)
    total += _sums(grad, found, t_order, t_order, t_offsets, node, nodes, entries, 2)
    s = tl.load(scale + node, mask=node < nodes, other=0.0)
    tl.store(out + node, -0.5 * s * s * total, mask=node < nodes)


@triton.jit(do_not_specialize=["entries"])
def _entries_back(grad, values, columns, rows, scale, by_degree, out, entries, TILE: tl.constexpr):
    """Process a block of entries by row."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = place < entries
    found, row, column = _weight(grad, values, columns, rows, place, there)
    both = tl.load(scale + row, mask=there, other=0.0)
    both *= tl.load(scale + column, mask=there, other=0.0)
    found = both * found + tl.load(by_degree + row, mask=there, other=0.0)
    is_real = tl.load(values + place, mask=there, other=0.0) != 0
    tl.store(out + place, tl.where(is_real & (row != column), found, 0.0), mask=there)
