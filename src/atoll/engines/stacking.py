"""Groups of clients that share a program, and their graphs stacked along a leading client axis.

A step for one client is `vmap`ped over that axis. Padding must not change any result. Padded nodes
belong to no split, so their label never counts, and padded edges have weight zero.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.graph import PER_NODE, Distinct, Graph, Matrix, Sparse, lists_nodes
from atoll.core.tree import Tree, leaves, stack, structure, tree_map
from atoll.engines.base import Members

CHUNK = 256  # clients per program unless the user chooses another number
MOST_NODES = 1 << 15
"""Most nodes per program on a CPU: a larger program gains nothing, and exceeds the caches."""
_ALIGNED = 64


class Outline(NamedTuple):
    """The properties of a client that determine which clients share a program."""

    kind: int  # number of the graph's structure; only graphs of one kind can be stacked
    nodes: int
    alone: bool  # whether it needs a program for itself, because of mini-batches


def outline(graphs: Sequence[Graph]) -> list[Outline]:
    """Return all clients' outlines. The kinds do not depend on the order of the clients."""
    found = [(structure(graph), graph.num_nodes, graph.batching.cuts) for graph in graphs]
    kinds = {spec: i for i, spec in enumerate(sorted({spec for spec, *_ in found}, key=str))}
    return [Outline(kinds[spec], nodes, alone) for spec, nodes, alone in found]


def make_buckets(
    outlines: Sequence[Outline], positions: Sequence[int], chunk: int, nodes: float = math.inf
) -> list[Members]:
    """Group clients of one kind into buckets of at most `chunk` clients and `nodes` nodes.

    Padding adds at most 25 % to the clients' nodes, or 4096 nodes if that is more. A client with
    more than `nodes` nodes or with mini-batches gets its own bucket.
    """
    buckets: list[list[int]] = []
    total = 0
    for position in sorted(positions, key=lambda p: (*outlines[p][:2], p)):
        kind, size, alone = outlines[position]
        current = buckets[-1] if buckets else []
        waste = (len(current) + 1) * size - (total + size)
        fits = (
            current
            and len(current) < chunk
            and total + size <= nodes
            and not alone
            and outlines[current[0]].kind == kind
            and waste <= max(0.25 * (total + size), 4096)
        )
        if fits:
            current.append(position)
            total += size
        else:
            buckets.append([position])
            total = size
    return [tuple(sorted(bucket)) for bucket in buckets]


def stack_graphs(graphs: Sequence[Graph]) -> Graph:
    """Stack graphs along a client axis, padded to common numbers of nodes and edges."""
    nodes = max(graph.num_nodes for graph in graphs) + 1  # padded edges are loops at the last one
    edges = max(graph.edges.shape[1] for graph in graphs)

    x = _stack_matrix([graph.x for graph in graphs], nodes)

    def padded(name: str, size: int = nodes, value: int = 0) -> Tree:
        found = [getattr(graph, name) for graph in graphs]
        if found[0] is None:
            return None
        return torch.stack([_pad(part, size or len(part), value) for part in found])

    def view(name: str) -> Tree:
        found = [graph.views[name] for graph in graphs]
        same = (_is_same(view, graph.x) for view, graph in zip(found, graphs, strict=True))
        return x if all(same) else _stack_matrix(found, nodes)  # stack features only once

    def inner(name: str) -> Graph | None:
        found = [part for graph in graphs if (part := getattr(graph, name)) is not None]
        return stack_graphs(found) if len(found) == len(graphs) else None

    return Graph(
        x=x,
        edges=torch.stack([_pad(graph.edges.T, edges, nodes - 1).T for graph in graphs]),
        edge_weight=torch.stack([_pad(graph.edge_weight, edges) for graph in graphs]),
        **{name: padded(name) for name in PER_NODE},
        views={name: view(name) for name in graphs[0].views},
        root=padded("root", value=nodes - 1),
        roots=padded("roots", max(len(graph.at_roots(graph.y)) for graph in graphs), nodes - 1),
        has_features=padded("has_features", 0),
        has_classes=padded("has_classes", 0),
        class_weights=padded("class_weights", 0),
        focal=graphs[0].focal,
        task_name=graphs[0].task_name,
        held_out=inner("held_out"),
        training=inner("training"),
        later=inner("later"),
    )


def _is_same(one: Matrix, two: Matrix) -> bool:
    if isinstance(one, Sparse) and isinstance(two, Sparse):
        return one.values is two.values
    return one is two


def _stack_matrix(parts: Sequence[Matrix], nodes: int) -> Tree:
    distinct = [part for part in parts if isinstance(part, Distinct)]
    if distinct:
        most = max(len(part.rows) for part in distinct)
        rows = torch.stack([_pad(part.rows, most) for part in distinct])
        return Distinct(rows, stack_sparse([part.which for part in distinct], nodes))
    dense = [part for part in parts if isinstance(part, Tensor)]
    sparse = [part for part in parts if isinstance(part, Sparse)]
    if dense and sparse:
        raise ValueError("graphs can be stacked only if a matrix is dense in all, or sparse in all")
    if sparse:
        return stack_sparse(sparse, nodes)
    if lists_nodes(dense[0]):  # lists of different length are filled with the padding node
        longest = max(len(part) for part in dense)
        return torch.stack([_pad(part, longest, nodes - 1) for part in dense])
    return torch.stack([_pad(part, nodes) for part in dense])


def stack_sparse(parts: Sequence[Sparse], rows: int) -> Sparse:
    """Stack sparse matrices along a leading axis, indexed as blocks of a block-diagonal matrix.

    With these indices a product under `vmap` is one kernel call on the flattened stack, without
    index arithmetic (`nn/ops.py`). Padding entries come last, in the last row and column, with
    value zero. A padded row begins where the used entries end, so no kernel reads beyond them.
    """
    square = parts[0].square
    columns = rows if square else max(part.shape[1] for part in parts)
    entries = max(part.values.shape[0] for part in parts)

    def block(k: int, part: Sparse) -> Sparse:
        used = part.values.shape[0]
        order = torch.arange(used, entries, dtype=torch.int32, device=part.values.device)
        return Sparse(
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

    return stack([block(k, part) for k, part in enumerate(parts)])


def _pad(leaf: Tensor, size: int, value: float = 0) -> Tensor:
    """Pad the first axis to `size`."""
    missing = size - leaf.shape[0]
    return functional.pad(leaf, [0, 0] * (leaf.dim() - 1) + [0, missing], value=value)


def on_disk(tree: Tree) -> Tree:
    """Return the same tree with its tensors in a memory-mapped temporary file."""
    # The system loads only the parts in use. The file is deleted with the last tensor.
    tensors = [leaf.contiguous() for leaf in leaves(tree)]
    places = []
    with tempfile.TemporaryFile(prefix="atoll-") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % _ALIGNED))
            places.append(file.tell())
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        file.write(bytes(_ALIGNED))  # an empty file cannot be mapped
        file.flush()
        # A private copy, so writes do not reach the file.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    placed = iter(zip(tensors, places, strict=True))

    def read(_: Tensor) -> Tensor:
        like, place = next(placed)
        if not like.numel():
            return like
        flat = torch.frombuffer(mapped, dtype=like.dtype, count=like.numel(), offset=place)
        return flat.view(like.shape)

    return tree_map(read, tree)
