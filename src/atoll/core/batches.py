"""Mini-batches of whole graphs: which training graphs a step sees, and the graph that they make.

For clients that own many small graphs (`Graph.root`). No edge is ever cut, because a batch holds a
small graph whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from atoll.core.graph import Graph, Sparse, lists_nodes, runs
from atoll.core.random import fold


def minibatches(graph: Graph, key: Tensor) -> Iterator[tuple[Graph, Tensor]]:
    """The training graphs, `batch_size` at a time, in an order drawn by the key; a key for each."""
    roots = graph.train.nonzero().squeeze(1)
    # Ranks of hashes of ids: how the nodes are numbered does not change who is with whom.
    draw = fold(fold(key, "order"), graph.ids[roots])
    batches = torch.split(roots[torch.argsort(draw, stable=True)], graph.batch_size)
    for number, chosen in enumerate(batches):
        yield whole_graphs(graph, chosen), key if len(batches) == 1 else fold(key, "batch", number)


def whole_graphs(graph: Graph, roots: Tensor) -> Graph:
    """The small graphs with the given roots, as a graph of their own; it is one batch."""
    assert graph.root is not None
    chosen = torch.zeros_like(graph.root, dtype=torch.bool)
    chosen[roots] = True
    inside = chosen[graph.root]
    nodes = inside.nonzero().squeeze(1)
    place = torch.empty_like(graph.root)
    place[nodes] = torch.arange(nodes.shape[0], device=nodes.device)
    edges = _edges_from(graph, nodes)

    def cut(part: Tensor | Sparse) -> Tensor | Sparse:
        if isinstance(part, Sparse):
            return _cut_sparse(part, nodes, place)
        return place[part[inside[part]]] if lists_nodes(part) else part[nodes]

    return replace(
        graph,
        x=cut(graph.x),
        edges=place[graph.edges[:, edges]],
        edge_weight=graph.edge_weight[edges],
        y=graph.y[nodes],
        train=graph.train[nodes],
        val=graph.val[nodes],
        test=graph.test[nodes],
        real=graph.real[nodes],
        ids=graph.ids[nodes],
        views={name: cut(view) for name, view in graph.views.items()},
        root=place[graph.root[nodes]],
        roots=place[roots],
        batch_size=0,
    )


def _edges_from(graph: Graph, nodes: Tensor) -> Tensor:
    """Numbers of the edges that start at the nodes; edges are sorted by source."""
    sources = graph.edges[0].contiguous()
    starts = torch.searchsorted(sources, nodes)
    return runs(starts, torch.searchsorted(sources, nodes, right=True) - starts)[0]


def _cut_sparse(matrix: Sparse, nodes: Tensor, place: Tensor) -> Sparse:
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
    else:
        t_order = torch.argsort(columns, stable=True).to(torch.int32)
        counts = torch.bincount(columns, minlength=matrix.shape[1])
        t_offsets = (counts.cumsum(0) - counts).to(torch.int32)
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
