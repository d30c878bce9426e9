"""Mini-batches of whole graphs: which training graphs a step sees, and the graph that they make.

For clients that own many small graphs (`Graph.root`). No edge is ever cut, because a batch holds a
small graph whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from atoll.core.graph import Distinct, Graph, Matrix, Sparse, lists_nodes, runs
from atoll.core.random import fold


def minibatches(graph: Graph, key: Tensor) -> Iterator[tuple[Graph, Tensor]]:
    """The training graphs, `batch_size` at a time, in an order drawn by the key; a key for each."""
    roots = graph.train.nonzero().squeeze(1)
    # Ranks of hashes of ids: how the nodes are numbered does not change who is with whom.
    draw = fold(fold(key, "order"), graph.ids[roots])
    # All of them are put into this order at once; then a batch is a slice of everything.
    drawn = whole_graphs(graph, roots[torch.argsort(draw, stable=True)], for_slices=True)
    batches = _slices(drawn, graph.batch_size)
    for number, batch in enumerate(batches):
        yield batch, key if len(batches) == 1 else fold(key, "batch", number)


def held_out(graph: Graph) -> Graph:
    """The validation and test graphs alone."""
    assert graph.roots is not None
    return whole_graphs(graph, graph.roots[graph.at_roots(graph.val + graph.test) > 0])


def whole_graphs(graph: Graph, roots: Tensor, *, for_slices: bool = False) -> Graph:
    """The small graphs with the given roots, in this order, as a graph of their own.

    With `for_slices` it is what `_slices` needs and no more: features without edges between nodes
    get no transpose, because each slice makes one of its own, and only the views are cut. Networks
    read nothing else; x and edges are then empty, of shapes that fail where somebody reads them.
    """
    assert graph.root is not None
    rank = torch.full_like(graph.root, -1)
    rank[roots] = torch.arange(roots.shape[0], device=roots.device)
    rank = rank[graph.root]
    inside = rank >= 0
    nodes = inside.nonzero().squeeze(1)
    nodes = nodes[torch.argsort(rank[nodes], stable=True)]
    place = torch.empty_like(graph.root)
    place[nodes] = torch.arange(nodes.shape[0], device=nodes.device)
    edges = graph.edges[0, :0] if for_slices else _edges_from(graph, nodes)

    def cut(part: Tensor | Sparse) -> Tensor | Sparse:
        if isinstance(part, Sparse):
            return _cut_sparse(part, nodes, place, transpose=not for_slices)
        return place[part[inside[part]]] if lists_nodes(part) else part[nodes]

    def cut_view(view: Matrix) -> Matrix:
        if not isinstance(view, Distinct):
            return cut(view)
        return replace(view, which=_cut_sparse(view.which, nodes, place, transpose=not for_slices))

    return replace(
        graph,
        **_of_nodes(graph, nodes),
        x=graph.real[nodes] if for_slices else cut(graph.x),
        edges=edges if for_slices else place[graph.edges[:, edges]],
        edge_weight=graph.edge_weight[edges],
        views={name: cut_view(view) for name, view in graph.views.items()},
        root=place[graph.root[nodes]],
        roots=place[roots],
        batch_size=0,
        held_out=None,
    )


def _of_nodes(graph: Graph, nodes: Tensor | slice) -> dict[str, Any]:
    """What a graph has for each node, for some of them."""
    names = ("y", "train", "val", "test", "real", "ids")
    return {name: getattr(graph, name)[nodes] for name in names}


def _slices(graph: Graph, size: int) -> list[Graph]:
    """`size` small graphs at a time, for a graph whose nodes stand graph by graph."""
    assert graph.root is not None
    assert graph.roots is not None
    count = graph.roots.shape[0]
    rank = torch.empty_like(graph.root)
    rank[graph.roots] = torch.arange(count, device=rank.device)
    first = torch.searchsorted(rank[graph.root], torch.arange(0, count, size, device=rank.device))
    bounds = [*first.tolist(), graph.num_nodes]
    views = {name: _split(view, bounds) for name, view in graph.views.items()}
    batches = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        nodes = slice(begin, end)
        batches.append(
            replace(
                graph,
                **_of_nodes(graph, nodes),
                x=graph.real[nodes],
                views={name: parts[number] for name, parts in views.items()},
                root=graph.root[nodes] - begin,
                roots=graph.roots[number * size : (number + 1) * size] - begin,
            )
        )
    return batches


def _split(matrix: Matrix, bounds: list[int]) -> Sequence[Matrix]:
    """Rows from each bound to the next; of a square matrix the same columns, too."""
    if isinstance(matrix, Sparse):
        return _split_sparse(matrix, bounds)
    if isinstance(matrix, Distinct):
        return [replace(matrix, which=part) for part in _split_sparse(matrix.which, bounds)]
    spans = pairwise(bounds)
    if lists_nodes(matrix):
        return [matrix[(matrix >= begin) & (matrix < end)] - begin for begin, end in spans]
    return [matrix[begin:end] for begin, end in spans]


def _split_sparse(matrix: Sparse, bounds: list[int]) -> list[Sparse]:
    ends = torch.cat([matrix.offsets, matrix.offsets.new_tensor([matrix.values.shape[0]])])
    spans = pairwise(ends[bounds].tolist())
    t_order, t_offsets = matrix.t_order, None
    if not matrix.square:
        # Each part has a transpose of its own: its entries by column, all parts in one sort.
        marks = torch.tensor(bounds[1:-1], device=matrix.rows.device)
        part = torch.bucketize(matrix.rows.long(), marks, right=True)
        width = matrix.shape[1]
        by_column = part * width + matrix.columns
        t_order = torch.argsort(by_column, stable=True).to(torch.int32)
        counts = torch.bincount(by_column, minlength=(len(bounds) - 1) * width).view(-1, width)
        t_offsets = (counts.cumsum(1) - counts).to(torch.int32)
    parts: list[Sparse] = []
    for number, ((begin, end), (first, last)) in enumerate(
        zip(pairwise(bounds), spans, strict=True)
    ):
        rows, entries = slice(begin, end), slice(first, last)
        columns, t_rows = matrix.columns[entries], matrix.rows[t_order[entries].long()] - begin
        order, values = t_order[entries] - first, matrix.values[entries]
        t_starts = matrix.t_offsets[rows] - first
        parts.append(
            Sparse(
                offsets=matrix.offsets[rows] - first,
                columns=columns - begin if matrix.square else columns,
                rows=matrix.rows[entries] - begin,
                values=values,
                t_offsets=t_offsets[number] if t_offsets is not None else t_starts,
                t_columns=t_rows,
                t_order=order,
                t_values=values[order],
                square=matrix.square,
            )
        )
    return parts


def _edges_from(graph: Graph, nodes: Tensor) -> Tensor:
    """Numbers of the edges that start at the nodes; edges are sorted by source."""
    counts = torch.bincount(graph.edges[0], minlength=graph.num_nodes)
    return runs((counts.cumsum(0) - counts)[nodes], counts[nodes])[0]


def _cut_sparse(matrix: Sparse, nodes: Tensor, place: Tensor, *, transpose: bool) -> Sparse:
    """The nodes' rows; of a square matrix their columns, too, because no other has an entry."""
    entries, offsets, rows = _entries(matrix.offsets, matrix, nodes)
    columns, values = matrix.columns[entries], matrix.values[entries]
    if matrix.square:
        moved = torch.empty_like(matrix.t_order)
        moved[entries] = torch.arange(len(entries), dtype=moved.dtype, device=moved.device)
        # The rows of the transpose are cut in the same way: sorting would cost far more.
        t_entries, t_offsets, _ = _entries(matrix.t_offsets, matrix, nodes)
        columns = place[columns].to(torch.int32)
        t_order = moved[matrix.t_order[t_entries]]
    elif transpose:
        t_order = torch.argsort(columns, stable=True).to(torch.int32)
        counts = torch.bincount(columns, minlength=matrix.shape[1])
        t_offsets = (counts.cumsum(0) - counts).to(torch.int32)
    else:
        t_order, t_offsets = matrix.t_order[:0], matrix.t_offsets  # its length tells the width
    return Sparse(
        offsets=offsets,
        columns=columns,
        rows=rows,
        values=values,
        t_offsets=t_offsets,
        t_columns=rows[t_order],
        t_order=t_order,
        t_values=values[t_order],
        square=matrix.square,
    )


def _entries(offsets: Tensor, matrix: Sparse, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of the entries in the given rows, and the offsets and rows of what they make."""
    starts = offsets.long()
    ends = torch.cat([starts[1:], starts.new_tensor([matrix.values.shape[0]])])
    entries, before, row = runs(starts[rows], (ends - starts)[rows])
    return entries, before.to(torch.int32), row.to(torch.int32)
