"""What a loader hands over: one whole graph, or one set of small graphs, still undivided.

A `Source` is plain NumPy and SciPy, checked once by `check_source`; partitions and splits read it
and `data/divide.py` turns it into the tensors of a `Federation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import scipy.sparse as sp

from atoll.core.errors import DataError

TRAIN, VAL, TEST, UNUSED = 0, 1, 2, -1
"""Roles of a node (or a graph) in `Source.split` and in every split function."""


@dataclass(frozen=True, eq=False)
class Source:
    """One whole graph, before it is divided among owners.

    Attributes:
        name: The data set's name, for tables.
        x: Features, (N, D) float32; a CSR array when most entries are zero.
        edges: (2, E) int64 directed edges source -> target; an undirected edge stands twice.
        y: Labels, (N,) int64 in 0..classes-1, or -1 where unknown.
        classes: Number of classes.
        weight: Edge weights, (E,) float32, or None when all are one.
        split: Given roles, (N,) int8 of TRAIN/VAL/TEST/UNUSED, or None.
        columns: Further node columns by name, (N,) each, for example an owner.
        metric: "accuracy" or "auc", what this data set is usually scored by.
        class_names: The classes' names in the order of their numbers; empty if unknown.
    """

    name: str
    x: np.ndarray | sp.csr_array
    edges: np.ndarray
    y: np.ndarray
    classes: int
    weight: np.ndarray | None = None
    split: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=lambda: MappingProxyType({}))
    metric: str = "accuracy"
    class_names: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        return int(self.x.shape[0])

    @property
    def num_features(self) -> int:
        return int(self.x.shape[1])

    def undirected_simple(self) -> Source:
        """The same graph with every edge in both directions, without self-loops and duplicates."""
        if self.num_nodes == 0 or self.edges.shape[1] == 0:
            return self
        low, high = self.edges.min(axis=0), self.edges.max(axis=0)
        keep = low != high
        keys = low[keep].astype(np.int64) * self.num_nodes + high[keep]
        pairs, first = np.unique(keys, return_index=True)
        low, high = pairs // self.num_nodes, pairs % self.num_nodes
        edges = np.stack([np.concatenate([low, high]), np.concatenate([high, low])])
        order = np.lexsort((edges[1], edges[0]))
        weight = None
        if self.weight is not None:
            # The two directions of an undirected edge carry one weight: the first one given.
            once = self.weight[keep][first]
            weight = np.concatenate([once, once])[order]
        return replace(self, edges=edges[:, order], weight=weight)


@dataclass(frozen=True, eq=False)
class GraphSet:
    """A set of small graphs with one label each, stored end to end.

    Attributes:
        name: The data set's name.
        x: Features of all nodes of all graphs, (N, D) float32.
        edges: (2, E) int64, node numbers counted over the whole set.
        node_ptr: (G+1,) int64; graph g owns nodes node_ptr[g]:node_ptr[g+1].
        y: One label per graph, (G,) int64.
        classes: Number of classes.
        metric: "accuracy" or "auc".
    """

    name: str
    x: np.ndarray
    edges: np.ndarray
    node_ptr: np.ndarray
    y: np.ndarray
    classes: int
    metric: str = "accuracy"

    @property
    def num_graphs(self) -> int:
        return int(self.y.shape[0])

    @property
    def num_features(self) -> int:
        return int(self.x.shape[1])

    def graph_of_node(self) -> np.ndarray:
        """The graph that each node belongs to, (N,)."""
        return np.repeat(np.arange(self.num_graphs), np.diff(self.node_ptr))

    def undirected_simple(self) -> GraphSet:
        """The same graphs with edges in both directions, without self-loops and duplicates."""
        nodes = np.zeros(len(self.x), dtype=np.int64)
        whole = Source(self.name, self.x, self.edges, nodes, classes=1)
        return replace(self, edges=whole.undirected_simple().edges)


@dataclass(frozen=True, eq=False)
class GraphGroup:
    """Several sets of graphs, each with features and classes of its own: one for each client.

    Attributes:
        name: The group's name.
        sets: In the order of the clients.
    """

    name: str
    sets: tuple[GraphSet, ...]

    def undirected_simple(self) -> GraphGroup:
        """Every set with edges in both directions, without self-loops and duplicates."""
        return replace(self, sets=tuple(one.undirected_simple() for one in self.sets))


def check_graph_set(source: GraphSet) -> GraphSet:
    """Refuse a set of graphs that no method could use; each refusal is one sentence."""
    name, count = source.name, source.num_graphs
    if count == 0:
        raise DataError(f"data '{name}' has no graphs; give a set with at least one graph")
    empty = np.flatnonzero(np.diff(source.node_ptr) < 1)
    if empty.size:
        raise DataError(
            f"data '{name}': graph {int(empty[0])} has no nodes ({empty.size} such graphs in all); "
            "leave them out"
        )
    _check_finite(source)
    _check_labels(source, "graph")
    owner = source.graph_of_node()
    if source.edges.size and (source.edges.min() < 0 or source.edges.max() >= owner.size):
        raise DataError(f"data '{name}' has an edge to a node that is not there")
    if (owner[source.edges[0]] != owner[source.edges[1]]).any():
        raise DataError(f"data '{name}' has an edge from one graph to another; leave it out")
    return source


def _check_finite(source: Source | GraphSet) -> None:
    entries = sp.coo_array(source.x) if sp.issparse(source.x) else None
    bad = np.argwhere(~np.isfinite(source.x if entries is None else entries.data))
    if not bad.size:
        return
    row, column = bad[0] if entries is None else (c[bad[0, 0]] for c in entries.coords)
    raise DataError(
        f"data '{source.name}' has a NaN or infinite feature at node {row}, column {column} "
        f"({len(bad)} in all); replace such values before training"
    )


def _check_labels(source: Source | GraphSet, kind: str) -> None:
    wrong = np.flatnonzero((source.y >= source.classes) | (source.y < -1))
    if wrong.size:
        raise DataError(
            f"data '{source.name}': {kind} {wrong[0]} has label {source.y[wrong[0]]}; labels are "
            f"0 to {source.classes - 1}, or -1 where unknown"
        )


def check_source(source: Source) -> Source:
    """Refuse a graph that no method could use; each refusal is one sentence."""
    name, n = source.name, source.num_nodes
    if n == 0:
        raise DataError(f"data '{name}' has no nodes; give a graph with at least one node")
    _check_finite(source)
    if source.y.shape != (n,):
        raise DataError(f"data '{name}' has {source.y.shape[0]} labels for {n} nodes")
    _check_labels(source, "node")
    if source.edges.shape[1] and (source.edges.min() < 0 or source.edges.max() >= n):
        outside = source.edges[(source.edges < 0) | (source.edges >= n)]
        raise DataError(
            f"data '{name}' has an edge to node {int(outside[0])}, but its nodes are numbered 0 to "
            f"{n - 1}"
        )
    return source
