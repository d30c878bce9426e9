"""A client's data as tensors: a subgraph of one graph, or some graphs of a set end to end.

The sets of a group differ in features and classes. All clients then have as many columns as the
widest set and as many classes as the richest; `Graph.has_features` and `Graph.has_classes` mark
those of a client.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp
import torch

from atoll.core.graph import Graph, Sparse, make_graph, sparse_matrix
from atoll.data.public.registry import SPARSE_BELOW
from atoll.data.source import TEST, TRAIN, VAL, GraphSet, Source


class InducedSubgraphs:
    """Subgraphs that sets of nodes induce, each at the cost of its own nodes and their edges.

    Edges keep the order that they have in the whole graph.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        begins = source.edges[0]
        self.by_source = np.argsort(begins, kind="stable")
        degree = np.bincount(begins, minlength=source.num_nodes)
        self.first = np.concatenate([[0], np.cumsum(degree)])
        self.place = np.full(source.num_nodes, -1, dtype=np.int64)

    def part(self, ids: np.ndarray) -> Source:
        """The subgraph with the nodes `ids`, numbered in that order."""
        source = self.source
        leaving = _runs(self.first[ids], self.first[ids + 1] - self.first[ids])
        numbers = np.unique(self.by_source[leaving])
        self.place[ids] = np.arange(ids.size)
        ends = self.place[source.edges[:, numbers]]
        self.place[ids] = -1
        inside = ends[1] >= 0
        return replace(
            source,
            x=source.x[ids],
            edges=np.ascontiguousarray(ends[:, inside]),
            y=source.y[ids],
            weight=None if source.weight is None else source.weight[numbers[inside]],
            split=None if source.split is None else source.split[ids],
            columns={name: values[ids] for name, values in source.columns.items()},
        )

    def graph(self, ids: np.ndarray, roles: np.ndarray) -> Graph:
        """The subgraph as tensors."""
        part = self.part(ids)
        train, val, test = (
            torch.from_numpy((roles == role) & (part.y >= 0)) for role in (TRAIN, VAL, TEST)
        )
        return make_graph(
            _features(part.x),
            torch.from_numpy(part.edges),
            torch.from_numpy(part.y),
            train=train,
            val=val,
            test=test,
            edge_weight=None if part.weight is None else torch.from_numpy(part.weight),
            ids=torch.from_numpy(ids.astype(np.int32)),
        )


def _features(x: np.ndarray | sp.csr_array) -> torch.Tensor | Sparse:
    if not sp.issparse(x):
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    entries = sp.coo_array(x)
    row, column = (torch.from_numpy(index.astype(np.int64)) for index in entries.coords)
    values = torch.from_numpy(entries.data.astype(np.float32))
    return sparse_matrix(row, column, values, x.shape, square=False)


def joined_graphs(
    source: GraphSet, ids: np.ndarray, roles: np.ndarray, width: int, classes: int
) -> Graph:
    """Some graphs of a set end to end; label and role of each stand on its first node, the root."""
    sizes = np.diff(source.node_ptr)[ids]
    starts = np.cumsum(sizes) - sizes
    nodes = _runs(source.node_ptr[ids], sizes)
    y = np.zeros(nodes.size, dtype=np.int64)
    y[starts] = np.maximum(source.y[ids], 0)
    masks = np.zeros((3, nodes.size), dtype=bool)
    for mask, role in zip(masks, (TRAIN, VAL, TEST), strict=True):
        mask[starts] = (roles == role) & (source.y[ids] >= 0)
    train, val, test = torch.from_numpy(masks)
    return make_graph(
        _padded(source.x[nodes], width),
        torch.from_numpy(_edges(source, ids, starts)),
        torch.from_numpy(y),
        train=train,
        val=val,
        test=test,
        ids=torch.from_numpy(nodes.astype(np.int32)),
        root=torch.from_numpy(np.repeat(starts, sizes)),
        has_features=torch.arange(width) < source.num_features,
        has_classes=torch.arange(classes) < source.classes,
    )


def _edges(source: GraphSet, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The graphs' edges, with nodes counted from where each graph starts at the client."""
    graph_of_edge = source.graph_of_node()[source.edges[0]]
    order = np.argsort(graph_of_edge, kind="stable")
    counts = np.bincount(graph_of_edge, minlength=source.num_graphs)
    first = np.cumsum(counts) - counts
    chosen = order[_runs(first[ids], counts[ids])]
    moved = np.repeat(starts - source.node_ptr[ids], counts[ids])
    return np.ascontiguousarray(source.edges[:, chosen] + moved)


def _runs(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... for sizes[0] numbers, then from starts[1] on, and so forth."""
    before = np.cumsum(sizes) - sizes
    return np.asarray(np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes))


def _padded(x: np.ndarray, width: int) -> torch.Tensor | Sparse:
    """Features with columns of zeros up to `width`; sparse where most entries are zero."""
    if np.count_nonzero(x) >= SPARSE_BELOW * x.shape[0] * width:
        return _features(np.pad(x, ((0, 0), (0, width - x.shape[1]))))
    sparse = sp.csr_array(x)
    sparse.resize(x.shape[0], width)
    return _features(sparse)
