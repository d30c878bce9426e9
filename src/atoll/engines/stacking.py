"""Clients' graphs as one graph with a leading axis for the clients, padded to a common size.

A step that is written for one client is `vmap`ped over that axis. Padding must change no number: a
padded node has no role and no label that counts, and a padded edge has weight zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.graph import Distinct, Graph, Matrix, Sparse, lists_nodes
from atoll.core.tree import stack


def stack_graphs(graphs: Sequence[Graph]) -> Graph:
    """Graphs -> one graph with a leading client axis, padded to common numbers of nodes and edges.

    There is always one node of padding: padded edges loop on it.
    """
    nodes = max(graph.num_nodes for graph in graphs) + 1
    edges = max(graph.edges.shape[1] for graph in graphs)

    def rows(name: str) -> Tensor:
        return torch.stack([_pad(getattr(graph, name), nodes) for graph in graphs])

    def on_padding(name: str, size: int) -> Tensor | None:
        found = [getattr(graph, name) for graph in graphs]
        if found[0] is None:
            return None
        return torch.stack([_pad(index, size, nodes - 1) for index in found])

    def spaces(name: str) -> Tensor | None:
        found = [getattr(graph, name) for graph in graphs]
        return None if found[0] is None else torch.stack(found)

    x = _stack_matrix([graph.x for graph in graphs], nodes)

    def view(name: str) -> Matrix:
        found = [graph.views[name] for graph in graphs]
        if all(_is_same(view, graph.x) for view, graph in zip(found, graphs, strict=True)):
            return x  # the features themselves: not stacked twice
        return _stack_view(found, nodes)

    return Graph(
        x=x,
        edges=torch.stack([_pad(graph.edges.T, edges, nodes - 1).T for graph in graphs]),
        edge_weight=torch.stack([_pad(graph.edge_weight, edges) for graph in graphs]),
        y=rows("y"),
        train=rows("train"),
        val=rows("val"),
        test=rows("test"),
        real=rows("real"),
        ids=rows("ids"),
        views={name: view(name) for name in graphs[0].views},
        root=on_padding("root", nodes),
        roots=on_padding("roots", max(len(graph.at_roots(graph.y)) for graph in graphs)),
        has_features=spaces("has_features"),
        has_classes=spaces("has_classes"),
        task_name=graphs[0].task_name,
    )


def _stack_view(parts: Sequence[Matrix], nodes: int) -> Matrix:
    distinct = [part for part in parts if isinstance(part, Distinct)]
    if not distinct:
        return _stack_matrix([part for part in parts if not isinstance(part, Distinct)], nodes)
    most = max(len(part.rows) for part in distinct)
    rows = torch.stack([_pad(part.rows, most) for part in distinct])
    return Distinct(rows, stack_sparse([part.which for part in distinct], nodes))


def _is_same(one: Matrix, two: Matrix) -> bool:
    if isinstance(one, Sparse) and isinstance(two, Sparse):
        return one.values is two.values
    return one is two


def _stack_matrix(parts: Sequence[Tensor | Sparse], nodes: int) -> Tensor | Sparse:
    dense = [part for part in parts if isinstance(part, Tensor)]
    sparse = [part for part in parts if isinstance(part, Sparse)]
    if dense and sparse:
        raise ValueError("graphs can be stacked only if a matrix is dense in all, or sparse in all")
    if sparse:
        return stack_sparse(sparse, nodes)
    if lists_nodes(dense[0]):  # of different length: the node of padding fills them up
        longest = max(len(part) for part in dense)
        return torch.stack([_pad(part, longest, nodes - 1) for part in dense])
    return torch.stack([_pad(part, nodes) for part in dense])


def stack_sparse(parts: Sequence[Sparse], rows: int) -> Sparse:
    """Sparse matrices with a leading axis, numbered as the blocks of one block-diagonal matrix.

    With these numbers a product under `vmap` is one kernel call on the flattened stack, without
    index arithmetic (`nn/ops.py`). Padding entries stand last, in the last row and column, with
    value zero: a padded row begins where the used entries end, so that no kernel reads beyond it.
    """
    square = parts[0].square
    columns = rows if square else max(part.shape[1] for part in parts)
    entries = max(part.values.shape[0] for part in parts)
    blocks = []
    for k, part in enumerate(parts):
        used = part.values.shape[0]
        order = torch.arange(used, entries, dtype=torch.int32, device=part.values.device)
        blocks.append(
            Sparse(
                offsets=_pad(part.offsets, rows, used) + k * entries,
                columns=_pad(part.columns, entries, columns - 1) + k * columns,
                rows=_pad(part.rows, entries, rows - 1) + k * rows,
                values=_pad(part.values, entries),
                t_offsets=_pad(part.t_offsets, columns, used) + k * entries,
                t_columns=_pad(part.t_columns, entries, rows - 1) + k * rows,
                t_order=torch.cat([part.t_order, order]) + k * entries,
                t_values=_pad(part.t_values, entries),
                square=square,
                dense=None if part.dense is None else _pad(_pad(part.dense, rows).T, columns).T,
            )
        )
    return stack(blocks)


def _pad(leaf: Tensor, size: int, value: float = 0) -> Tensor:
    """Lengthen the first axis to `size`."""
    missing = size - leaf.shape[0]
    return functional.pad(leaf, [0, 0] * (leaf.dim() - 1) + [0, missing], value=value)
