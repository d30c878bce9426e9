"""The normalised adjacency of a small graph in one GPU kernel.

Torch's operations need a hundred launches for it, two of them sorts. These cost more than all other
work on a pseudo graph of a hundred nodes. Here every entry finds its position by counting the
entries before it, which is cheap for few entries and needs no second launch.

The kernel needs CUDA and Triton, which every GPU build of torch installs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atoll.core.graph import Sparse

FEW = 4096
"""Largest number of edges plus nodes for this kernel. Beyond it, sorting is faster."""


def gcn(edges: Tensor, weight: Tensor, nodes: int) -> Sparse:
    """Compute `views.gcn_adjacency` of a graph with these edges."""
    count = edges.shape[1]
    entries = count + nodes
    index = torch.empty(6, entries, dtype=torch.int32, device=weight.device)
    values = weight.new_empty(2, entries)
    given = (edges.contiguous(), weight.contiguous(), *index, *values)
    _gcn[(triton.cdiv(entries, 4),)](*given, count, nodes, SOME=4, MANY=256, num_warps=4)
    offsets, columns, rows, t_offsets, t_columns, t_order = index
    by_row = {"offsets": offsets[:nodes], "columns": columns, "rows": rows, "values": values[0]}
    by_column = {"t_columns": t_columns, "t_order": t_order, "t_values": values[1]}
    return Sparse(**by_row, t_offsets=t_offsets[:nodes], **by_column)


@triton.jit
def _ends(edges, number, count, total):
    """Return source and target of a block of entries, and a mask. Self-loops follow the edges."""
    inside = number < count
    source = tl.load(edges + number, mask=inside, other=0).to(tl.int32)
    target = tl.load(edges + count + number, mask=inside, other=0).to(tl.int32)
    node = number - count
    return tl.where(inside, source, node), tl.where(inside, target, node), number < total


@triton.jit
def _before(first, second, number, other_first, other_second, other_number, nodes):
    """Whether each other entry precedes each own entry, (SOME, MANY)."""
    own, other = first * nodes + second, other_first * nodes + other_second
    earlier = other_number[None, :] < number[:, None]
    return (other[None, :] < own[:, None]) | ((other[None, :] == own[:, None]) & earlier)


@triton.jit(do_not_specialize=["count", "nodes"])
def _gcn(
    edges,
    weight,
    offsets,
    columns,
    rows,
    t_offsets,
    t_columns,
    t_order,
    values,
    t_values,
    count,
    nodes,
    SOME: tl.constexpr,
    MANY: tl.constexpr,
):
    """Process a block of entries, and as many nodes."""
    number, total = tl.program_id(0) * SOME + tl.arange(0, SOME), count + nodes
    source, target, here = _ends(edges, number, count, total)
    # The degrees of both ends, and the last self-loop of the data at each end.
    at_source, at_target = tl.zeros((SOME, MANY), tl.float32), tl.zeros((SOME, MANY), tl.float32)
    loops_s, loops_t = tl.full((SOME, MANY), -1, tl.int32), tl.full((SOME, MANY), -1, tl.int32)
    for first in range(0, count, MANY):
        other = first + tl.arange(0, MANY)
        s, t, _ = _ends(edges, other, count, count)
        w = tl.load(weight + other, mask=other < count, other=0.0)
        apart = tl.where(s != t, w, 0.0)[None, :]
        loop = tl.where((s == t) & (w != 0), other, -1)[None, :]
        at_source += tl.where(t[None, :] == source[:, None], apart, 0.0)
        at_target += tl.where(t[None, :] == target[:, None], apart, 0.0)
        loops_s = tl.maximum(loops_s, tl.where(t[None, :] == source[:, None], loop, -1))
        loops_t = tl.maximum(loops_t, tl.where(t[None, :] == target[:, None], loop, -1))
    loop_source, loop_target = tl.max(loops_s, axis=1), tl.max(loops_t, axis=1)
    own_source = tl.load(weight + loop_source, mask=loop_source >= 0, other=1.0)
    own_target = tl.load(weight + loop_target, mask=loop_target >= 0, other=1.0)
    by_source = tl.sum(at_source, axis=1) + own_source
    by_target = tl.sum(at_target, axis=1) + own_target
    plain = tl.load(weight + number, mask=(number < count) & (source != target), other=0.0)
    value = tl.where(number < count, plain, own_target)
    value *= tl.where(by_source > 0, 1.0 / tl.sqrt(tl.where(by_source > 0, by_source, 1.0)), 0.0)
    value *= tl.where(by_target > 0, 1.0 / tl.sqrt(tl.where(by_target > 0, by_target, 1.0)), 0.0)
    # The position of each entry by row and by column; for a node, the number of entries before.
    before, t_before = tl.zeros((SOME, MANY), tl.int32), tl.zeros((SOME, MANY), tl.int32)
    above, t_above = tl.zeros((SOME, MANY), tl.int32), tl.zeros((SOME, MANY), tl.int32)
    for first in range(0, total, MANY):
        other = first + tl.arange(0, MANY)
        s, t, is_there = _ends(edges, other, count, total)
        is_there = is_there[None, :]
        before += (_before(target, source, number, t, s, other, nodes) & is_there).to(tl.int32)
        t_before += (_before(source, target, number, s, t, other, nodes) & is_there).to(tl.int32)
        above += ((t[None, :] < number[:, None]) & is_there).to(tl.int32)
        t_above += ((s[None, :] < number[:, None]) & is_there).to(tl.int32)
    place, t_place = tl.sum(before, axis=1), tl.sum(t_before, axis=1)
    tl.store(columns + place, source, mask=here)
    tl.store(rows + place, target, mask=here)
    tl.store(values + place, value, mask=here)
    tl.store(t_columns + t_place, target, mask=here)
    tl.store(t_order + t_place, place, mask=here)
    tl.store(t_values + t_place, value, mask=here)
    tl.store(offsets + number, tl.sum(above, axis=1), mask=number < nodes)
    tl.store(t_offsets + number, tl.sum(t_above, axis=1), mask=number < nodes)
