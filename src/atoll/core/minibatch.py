"""Mini-batches of small graphs, for clients that own many of them (`Graph.root`).

A batch contains a small graph completely or not at all, so no edge is ever cut. `fit` calls
`minibatches`; engines call `with_batching` once per client before training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.core.batching import WHOLE, Batching, Graphs, Whole
from atoll.core.errors import ConfigError
from atoll.core.graph import PER_NODE, Distinct, Graph, Matrix, Sparse, lists_nodes, pick, runs
from atoll.core.random import fold
from atoll.core.tree import Tree

MOST_RECORDED = 64  # steps of an epoch with more batches are not recorded on a GPU


def minibatches(graph: Graph, key: Tensor) -> Iterator[tuple[Graph, Tensor]]:
    """Yield (graph, key) for each step of an epoch. The graph is the whole graph or a batch."""
    # Networks read only the views of a batch. Its x and edges have wrong shapes, so that a loss
    # that reads them fails.
    training = with_new_views(graph)
    if isinstance(graph.batching, Whole):
        yield graph if training is None else training, key
        return
    training = training_graphs(graph) if training is None else training
    # Sort by hashes of ids, so that the batches do not depend on the numbering of the nodes.
    draw = fold(fold(key, "order"), training.at_roots(training.ids))
    batches = _batches(training, torch.argsort(draw, stable=True), graph.batching)
    for number, batch in enumerate(batches):
        yield batch, key if len(batches) == 1 else fold(key, "batch", number)


def with_batching(graph: Graph, batching: Batching) -> Graph:
    """Attach a batching, or `WHOLE` if all training graphs fit into one batch.

    Training then reads only the training graphs of a client with many graphs, and scoring only the
    others.
    """
    cut = is_cut(graph, batching)
    graph = replace(graph, batching=batching if cut else WHOLE)
    if graph.roots is None:
        return graph
    training, others = graph.train.nonzero().squeeze(1), (graph.val + graph.test).nonzero()
    if not cut and not (len(training) and len(others)):
        return graph
    parts = training_graphs(graph) if cut else whole_graphs(graph, training)
    held_out = whole_graphs(graph, others.squeeze(1))
    graph = replace(graph, training=parts, held_out=held_out)
    return padded(graph) if cut and graph.y.is_cuda else graph


def padded(graph: Graph) -> Graph:
    """Add `Graphs.room` to a graph's batching, so that a GPU can record the steps of an epoch.

    The graph is unchanged if a view cannot be padded or an epoch has too many batches.
    """
    training, batching = graph.training, graph.batching
    assert training is not None
    assert isinstance(batching, Graphs)
    views = training.views.values()
    if not all(v.square if isinstance(v, Sparse) else _by_node(v) for v in views):
        return graph
    if batching.size * MOST_RECORDED < len(training.at_roots(training.ids)):
        return graph
    counts, starts = _small_graphs(training)
    sparse = [_entry_counts(v, starts, counts)[1] for v in views if isinstance(v, Sparse)]
    largest = [torch.sort(c, descending=True).values[: batching.size] for c in (counts, *sparse)]
    nodes, *entries = [int(some.sum()) for some in largest]
    # One more node than a batch can have, for the entries of the padding.
    return replace(graph, batching=replace(batching, room=(nodes + 1, *entries)))


def _by_node(view: Matrix) -> bool:
    return isinstance(view, Tensor) and not lists_nodes(view)


def is_cut(graph: Graph, batching: Batching) -> bool:
    """Whether a client trains on more than one batch per epoch."""
    if isinstance(batching, Whole):
        return False
    if graph.roots is None:
        raise ConfigError("batch_size is for clients with many graphs, but a client has one graph")
    return int(graph.train.sum()) > batching.size


def training_graphs(graph: Graph) -> Graph:
    """Keep only the training graphs, and only the parts that mini-batches contain."""
    cut = whole_graphs(graph, graph.train.nonzero().squeeze(1))
    return replace(cut, x=cut.real, edges=cut.edges[0, :0], edge_weight=cut.edge_weight[:0])


def with_new_views(graph: Graph) -> Graph | None:
    """Return the training graphs, with the views that a step has added to the whole graph.

    Return None if the engine has attached no training graphs, or if a new view has no row per node.
    """
    if (training := graph.training) is None:
        return None
    assert graph.root is not None
    new = {name: view for name, view in graph.views.items() if name not in training.views}
    if not new:
        return training
    if not all(map(_by_node, new.values())):
        return None
    # The nodes of training graphs in the order of `whole_graphs`. A GPU can record this selection,
    # because the number of these nodes is known.
    owner = torch.where(pick(graph.train, graph.root) > 0, graph.root, graph.num_nodes)
    nodes = torch.argsort(owner, stable=True)[: training.num_nodes]
    found = {name: pick(view, nodes) for name, view in new.items() if isinstance(view, Tensor)}
    return replace(training, views=training.views | found)


def whole_graphs(graph: Graph, roots: Tensor) -> Graph:
    """Return the small graphs with the given roots, concatenated in this order, as a graph."""
    assert graph.root is not None
    rank = torch.full_like(graph.root, -1)
    rank[roots] = torch.arange(roots.shape[0], device=roots.device)
    rank = rank[graph.root]
    inside = rank >= 0
    nodes = inside.nonzero().squeeze(1)
    nodes = nodes[torch.argsort(rank[nodes], stable=True)]
    place = torch.empty_like(graph.root)
    place[nodes] = torch.arange(nodes.shape[0], device=nodes.device)
    counts = torch.bincount(graph.edges[0], minlength=graph.num_nodes)
    edges = runs((counts.cumsum(0) - counts)[nodes], counts[nodes])[0]  # sorted by source

    def cut(part: Matrix) -> Tree:
        if isinstance(part, Sparse):
            return cut_sparse(part, nodes, place)
        if isinstance(part, Distinct):
            return replace(part, which=cut_sparse(part.which, nodes, place))
        return place[part[inside[part]]] if lists_nodes(part) else part[nodes]

    return replace(
        graph,
        **of_nodes(graph, nodes),
        x=cut(graph.x),
        edges=place[graph.edges[:, edges]],
        edge_weight=graph.edge_weight[edges],
        views={name: cut(view) for name, view in graph.views.items()},
        root=place[graph.root[nodes]],
        roots=place[roots],
        batching=WHOLE,
        held_out=None,
        training=None,
    )


def of_nodes(graph: Graph, nodes: Tensor) -> dict[str, Any]:
    """Return the fields `PER_NODE` of a graph, restricted to the given nodes."""
    return {name: pick(getattr(graph, name), nodes) for name in PER_NODE}


class _Moved(NamedTuple):
    """Nodes or entries of G small graphs in a new order. Every batch counts its own from 0."""

    old: Tensor  # the previous number of each item
    graph: Tensor  # the position of its small graph in the order
    by: Tensor  # offset from old to new numbers of each small graph, (G,) int32
    bounds: Tensor  # the first item of each batch, and the end
    room: int | None  # the size to which each batch is padded, or None

    def number(self, old: Tensor, graph: Tensor) -> Tensor:
        """Return new numbers, given old numbers and the positions of their small graphs."""
        return old.to(torch.int32) + pick(self.by, graph)

    def parts(self, items: Tensor, fill: int | Tensor = 0) -> Sequence[Tensor]:
        """Cut the items into batches. If there is a room, pad each batch to it with `fill`."""
        if self.room is None:
            return [items[begin:end] for begin, end in pairwise(self.bounds.tolist())]
        place = self.bounds[:-1, None] + self.slots
        found = items[place.clamp(max=len(items) - 1)]
        there = place < self.bounds[1:, None]
        fill = fill.to(items.dtype) if isinstance(fill, Tensor) else fill
        return torch.where(there.view(*there.shape, *[1] * (items.dim() - 1)), found, fill).unbind()

    @property
    def slots(self) -> Tensor:
        """The numbers 0, ..., room - 1."""
        return torch.arange(self.room or 0, device=self.old.device)

    @property
    def used(self) -> Tensor:
        """The number of items in each of B batches, (B, 1)."""
        return self.bounds.diff().unsqueeze(1).to(torch.int32)


def _moved(
    starts: Tensor, counts: Tensor, order: Tensor, size: int, total: int, room: int | None
) -> _Moved:
    """Put small graphs, each a range of items, into a new order, with `size` graphs per batch."""
    starts, counts = pick(starts, order), pick(counts, order)
    old, before, graph = runs(starts, counts, total)
    first = before[::size]
    by = before - first.repeat_interleave(size)[: len(order)] - starts
    bounds = torch.cat([first, first.new_full((1,), total)])
    return _Moved(old, graph, by.to(torch.int32), bounds, room)


def _small_graphs(graph: Graph) -> tuple[Tensor, Tensor]:
    """Return the number of nodes of each small graph and its first node, (G,) each."""
    assert graph.root is not None
    assert graph.roots is not None
    numbers = torch.arange(len(graph.roots), device=graph.root.device)
    place = torch.zeros_like(graph.root).index_copy(0, graph.roots, numbers)
    owner = pick(place, graph.root)
    counts = torch.zeros_like(numbers).index_add(0, owner, torch.ones_like(owner))
    return counts, counts.cumsum(0) - counts


def _entry_counts(matrix: Sparse, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first entry of each small graph in a matrix and its entry count, (G,) each."""
    last = matrix.offsets.new_full((1,), len(matrix.values))
    ends = torch.cat([matrix.offsets, last]).long()
    return ends[starts], ends[starts + counts] - ends[starts]


def _batches(graph: Graph, order: Tensor, batching: Graphs) -> list[Graph]:
    """Cut small graphs into batches, in the given order. Each graph's nodes must be contiguous."""
    # Reorder all graphs at once. A batch is then a slice of each tensor.
    assert graph.root is not None
    assert graph.roots is not None
    size, room = batching.size, iter(batching.room)
    counts, starts = _small_graphs(graph)
    nodes = _moved(starts, counts, order, size, graph.num_nodes, next(room, None))

    def sparse(matrix: Sparse) -> list[Sparse]:
        runs_of = _entry_counts(matrix, starts, counts)
        entries = _moved(*runs_of, order, size, len(matrix.values), next(room, None))
        return _move_sparse(matrix, nodes, entries, size)

    def view(matrix: Matrix) -> Sequence[Matrix]:
        if isinstance(matrix, Sparse):
            return sparse(matrix)
        if isinstance(matrix, Distinct):
            return [replace(matrix, which=part) for part in sparse(matrix.which)]
        if not lists_nodes(matrix):
            return nodes.parts(pick(matrix, nodes.old))
        place = torch.empty_like(nodes.old)
        place[nodes.old] = torch.arange(len(place), device=place.device)
        listed, spans = place[matrix], pairwise(nodes.bounds.tolist())
        return [listed[(listed >= begin) & (listed < end)] - begin for begin, end in spans]

    by_node: Any = {n: nodes.parts(part) for n, part in of_nodes(graph, nodes.old).items()}
    views = {name: view(matrix) for name, matrix in graph.views.items()}
    numbers = nodes.number(pick(graph.root, nodes.old), nodes.graph).long()
    root = nodes.parts(numbers, (nodes.room or 0) - 1)
    roots = torch.split(pick(graph.roots, order) + nodes.by, size)
    return [
        replace(
            graph,
            **{name: parts[number] for name, parts in by_node.items()},
            x=by_node["real"][number],
            views={name: parts[number] for name, parts in views.items()},
            root=root[number],
            roots=roots[number],
        )
        for number in range(len(roots))
    ]


def _move_sparse(matrix: Sparse, nodes: _Moved, entries: _Moved, size: int) -> list[Sparse]:
    """Cut the rows of a matrix into batches. For a square matrix, cut the columns as well."""
    old, graph = entries.old, entries.graph
    by = pick(nodes.by, graph)
    rows, columns = pick(matrix.rows, old) + by, pick(matrix.columns, old)
    values = pick(matrix.values, old)
    if matrix.square:
        columns = columns + by
        t_order = entries.number(pick(matrix.t_order, old), graph)
        # A comparison is ten times as fast as the selections. A GPU, which has a room, would wait.
        if entries.room is None and _symmetric(matrix):
            t_columns, t_values = columns, values
        else:
            t_columns, t_values = pick(matrix.t_columns, old) + by, pick(matrix.t_values, old)
        starts = entries.number(pick(matrix.t_offsets, nodes.old), nodes.graph)
        t_offsets: Sequence[Tensor] = nodes.parts(starts, entries.used)
    else:
        # Each batch has its own transpose: its entries by column, all batches in one sort.
        batch, width = graph // size, matrix.shape[1]
        place = batch * width + columns
        order = _stable_order(place, (len(entries.bounds) - 1) * width)
        t_columns, t_values = pick(rows, order), pick(values, order)
        t_order = (order - pick(entries.bounds, batch)).to(torch.int32)
        counts = torch.bincount(place, minlength=(len(entries.bounds) - 1) * width).view(-1, width)
        t_offsets = (counts.cumsum(1) - counts).to(torch.int32).unbind()
    starts = entries.number(pick(matrix.offsets, nodes.old), nodes.graph)
    offsets, last = nodes.parts(starts, entries.used), (nodes.room or 0) - 1
    # As in a stack of clients, padding is at the end, in the last row and column.
    own = [entries.parts(field, last) for field in (columns, rows)]
    own.append(entries.parts(values))
    transposed = [entries.parts(t_columns, last), entries.parts(t_order, entries.slots)]
    transposed.append(entries.parts(t_values))
    by_batch = zip(offsets, *own, t_offsets, *transposed, strict=True)
    return list(starmap(partial(Sparse, square=matrix.square), by_batch))


def _stable_order(numbers: Tensor, below: int) -> Tensor:
    """Return the stable order of numbers in [0, below)."""
    if numbers.device.type != "cpu" or below > 1 << 16:
        return torch.argsort(numbers, stable=True)
    # NumPy sorts 16-bit numbers by their digits: 25,000 take 0.06 ms, torch takes 1.0 ms.
    return torch.from_numpy(numbers.numpy().astype("uint16").argsort(kind="stable"))


def _symmetric(matrix: Sparse) -> bool:
    """Whether a square matrix has the same columns and values as its transpose, in their order."""
    m = matrix
    return torch.equal(m.columns, m.t_columns) and torch.equal(m.values, m.t_values)


def cut_sparse(matrix: Sparse, nodes: Tensor, place: Tensor) -> Sparse:
    """Select the rows of `nodes`, and the same columns of a square matrix.

    `place` contains the new number of each node. In a square matrix the selected rows must not have
    entries in other columns.
    """
    entries, offsets, rows = _entries(matrix.offsets, matrix, nodes)
    columns, values = matrix.columns[entries], matrix.values[entries]
    if matrix.square:
        moved = torch.empty_like(matrix.t_order)
        moved[entries] = torch.arange(len(entries), dtype=moved.dtype, device=moved.device)
        # Cut the rows of the transpose in the same way, because sorting would cost far more.
        t_entries, t_offsets, _ = _entries(matrix.t_offsets, matrix, nodes)
        columns = place[columns].to(torch.int32)
        t_order = moved[matrix.t_order[t_entries]]
    else:
        t_order = torch.argsort(columns, stable=True).to(torch.int32)
        counts = torch.bincount(columns, minlength=matrix.shape[1])
        t_offsets = (counts.cumsum(0) - counts).to(torch.int32)
    own, t_columns, t_values = (offsets, columns, rows, values), rows[t_order], values[t_order]
    dense = matrix.dense if matrix.dense is None else matrix.dense[nodes]
    dense = dense[:, nodes] if dense is not None and matrix.square else dense
    return Sparse(*own, t_offsets, t_columns, t_order, t_values, matrix.square, dense)


def _entries(offsets: Tensor, matrix: Sparse, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of the entries in the given rows, their new offsets and their new rows."""
    starts = offsets.long()
    ends = torch.cat([starts[1:], starts.new_tensor([matrix.values.shape[0]])])
    entries, before, row = runs(starts[rows], (ends - starts)[rows])
    return entries, before.to(torch.int32), row.to(torch.int32)
