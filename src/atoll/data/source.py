"""One whole graph, or one set of small graphs, before the partition, in NumPy and SciPy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.errors import DataError, counted

if TYPE_CHECKING:
    import scipy.sparse as sp

    from atoll.data.own.encoder import Encoder

TRAIN, VAL, TEST, UNUSED = 0, 1, 2, -1
# Nodes that arrive after training. The client has no training node of the class of a MISSING one.
UNSEEN, MISSING = 3, 4
"""Roles of a node (or a graph) in `Source.split` and in every split function."""


def compact(x: np.ndarray | sp.csr_array, sparse_below: float) -> np.ndarray | sp.csr_array:
    """Convert features to float32: CSR if the share of non-zeros is below the limit, else dense."""
    import scipy.sparse as sp  # late: it takes half a second, which a cached run saves

    x = x.astype(np.float32, copy=False)
    entries = np.count_nonzero(x) if isinstance(x, np.ndarray) else x.count_nonzero()
    if entries >= sparse_below * x.shape[0] * x.shape[1]:
        return x if isinstance(x, np.ndarray) else x.toarray()
    made = sp.csr_array(x)
    made.eliminate_zeros()
    made.sort_indices()
    return made


def undirected_pairs(edges: np.ndarray, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted pairs of connected nodes, (2, P), and each pair's first edge, (P,).

    A pair has the smaller node first. A pair's edge is an index in `edges`. Loops are no pairs.
    """
    low, high = edges.min(axis=0), edges.max(axis=0)
    places = np.flatnonzero(low != high)
    keys = low[places].astype(np.int64) * nodes + high[places]
    distinct, first = np.unique(keys, return_index=True)
    return np.stack([distinct // max(nodes, 1), distinct % max(nodes, 1)]), places[first]


def both_directions(edges: np.ndarray, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return both directions of each pair of connected nodes, sorted, and the pair's first edge.

    The first edge is an index in `edges`. Loops are dropped.
    """
    pairs, first = undirected_pairs(edges, nodes)
    doubled = np.concatenate([pairs, pairs[::-1]], axis=1)
    order = np.lexsort((doubled[1], doubled[0]))
    return doubled[:, order], np.concatenate([first, first])[order]


class _Labelled:
    """The features and labels that a graph and a set of graphs have."""

    name: str
    x: np.ndarray | sp.csr_array
    edges: np.ndarray
    y: np.ndarray
    classes: int

    def __repr__(self) -> str:
        sizes = {"graph": len(self.y)} if isinstance(self, GraphSet) else {}
        sizes |= {"node": self.x.shape[0], "edge": self.edges.shape[1]}
        sizes |= {"feature": self.num_features, "class": self.classes}
        listed = ", ".join(counted(number, thing) for thing, number in sizes.items())
        return f"<{type(self).__name__} {self.name}: {listed}>"

    @property
    def num_features(self) -> int:
        return int(self.x.shape[1])

    def _check_values(self, kind: str) -> None:
        """Refuse features that are not finite, and labels outside the classes."""
        entries = None if isinstance(self.x, np.ndarray) else self.x.tocoo()
        bad = np.argwhere(~np.isfinite(self.x if entries is None else entries.data))
        if bad.size:
            row, column = bad[0] if entries is None else (c[bad[0, 0]] for c in entries.coords)
            place = f"node {row}, column {column} ({len(bad)} in all)"
            problem = f"data '{self.name}' has a NaN or infinite feature at {place}"
            raise DataError(f"{problem}; replace such values before training")
        wrong = np.flatnonzero((self.y >= self.classes) | (self.y < -1))
        if wrong.size:
            problem = f"data '{self.name}': {kind} {wrong[0]} has label {self.y[wrong[0]]}"
            raise DataError(f"{problem}; labels are 0 to {self.classes - 1}, or -1 where unknown")


@dataclass(frozen=True, eq=False, repr=False)
class Source(_Labelled):
    """One whole graph, before its partition among owners."""

    name: str
    x: np.ndarray | sp.csr_array  # (N, D) float32; CSR if most entries are zero
    edges: np.ndarray  # (2, E) int64, source -> target; an undirected edge occurs twice
    y: np.ndarray  # (N,) int64 in 0..classes-1, or -1 if unknown
    classes: int
    weight: np.ndarray | None = None  # (E,) float32, or None if all are one
    split: np.ndarray | None = None  # given roles, (N,) int8 of TRAIN/VAL/TEST/UNUSED
    # Further node columns by name, (N,) each, for example an owner.
    columns: Mapping[str, np.ndarray] = field(default_factory=lambda: MappingProxyType({}))
    metric: str = "accuracy"  # or "auc": the usual score of this data set
    class_names: tuple[str, ...] = ()  # in the order of the class numbers; empty if unknown
    encoder: Encoder | None = None  # how the columns of a user's own tables became features
    edge_time: np.ndarray | None = None  # (E,), in the unit of the column that splits by time
    settled: bool = False  # whether the user decided on directions, loops and duplicates

    @property
    def num_nodes(self) -> int:
        return int(self.x.shape[0])

    def prepared(self) -> Source:
        """Return `undirected_simple`, unless the user decided on the form of edges."""
        return self if self.settled else self.undirected_simple()

    def undirected_simple(self) -> Source:
        """Return the graph with all edges in both directions, without loops and duplicates."""
        if self.num_nodes == 0 or self.edges.shape[1] == 0 or self._is_undirected_simple():
            return self
        order = np.arange(self.edges.shape[1])
        if self.edge_time is not None:  # a pair exists from its earliest edge on
            order = np.argsort(self.edge_time, kind="stable")
        edges, first = both_directions(self.edges[:, order], self.num_nodes)
        # The two directions of an undirected edge have the same weight: the first one given.
        weight = None if self.weight is None else self.weight[order[first]]
        time = None if self.edge_time is None else self.edge_time[order[first]]
        return replace(self, edges=edges, weight=weight, edge_time=time)

    def _is_undirected_simple(self) -> bool:
        """Return whether edges are sorted, without loops, and once in both directions.

        Both directions must have equal weights. Indices beyond 32 bits also return False.
        """
        (begins, ends), n = self.edges, self.num_nodes
        if begins[0] > begins[-1] or (begins == ends).any() or max(n, ends.size) >= 1 << 31:
            return False
        step = np.diff(begins)
        if (step < 0).any() or ((step == 0) & (np.diff(ends) <= 0)).any():
            return False
        import scipy.sparse as sp

        values = np.ones(ends.size, np.int8) if self.weight is None else self.weight
        first = np.searchsorted(begins, np.arange(n + 1))
        rows = sp.csr_array((values, ends.astype(np.int32), first.astype(np.int32)), shape=(n, n))
        columns = rows.tocsc()  # the rows of the transpose
        same = ("indptr", "indices", "data")
        return all(np.array_equal(getattr(rows, part), getattr(columns, part)) for part in same)

    def checked(self) -> Source:
        """Refuse a graph that no method could use, with a one-sentence error."""
        name, n = self.name, self.num_nodes
        if n == 0:
            raise DataError(f"data '{name}' has no nodes; give a graph with at least one node")
        if self.y.shape != (n,):
            raise DataError(f"data '{name}' has {self.y.shape[0]} labels for {n} nodes")
        self._check_values("node")
        if self.edges.shape[1] and (self.edges.min() < 0 or self.edges.max() >= n):
            outside = self.edges[(self.edges < 0) | (self.edges >= n)]
            numbered = f"its nodes are numbered 0 to {n - 1}"
            raise DataError(f"data '{name}' has an edge to node {int(outside[0])}, but {numbered}")
        return self


@dataclass(frozen=True, eq=False, repr=False)
class GraphSet(_Labelled):
    """A set of small graphs with one label each, stored concatenated."""

    name: str
    x: np.ndarray  # features of all nodes of all graphs, (N, D) float32
    edges: np.ndarray  # (2, E) int64, node numbers counted over the whole set
    node_ptr: np.ndarray  # (G+1,) int64; graph g owns nodes node_ptr[g]:node_ptr[g+1]
    y: np.ndarray  # one label per graph, (G,) int64
    classes: int
    metric: str = "accuracy"

    @property
    def num_graphs(self) -> int:
        return int(self.y.shape[0])

    def graph_of_node(self) -> np.ndarray:
        """Return the graph of each node, (N,)."""
        return np.repeat(np.arange(self.num_graphs), np.diff(self.node_ptr))

    def undirected_simple(self) -> GraphSet:
        """Return the graphs with edges in both directions, without loops and duplicates."""
        return replace(self, edges=both_directions(self.edges, len(self.x))[0])

    prepared = undirected_simple

    def checked(self) -> GraphSet:
        """Refuse a set of graphs that no method could use, with a one-sentence error."""
        name = self.name
        if self.num_graphs == 0:
            raise DataError(f"data '{name}' has no graphs; give a set with at least one graph")
        empty = np.flatnonzero(np.diff(self.node_ptr) < 1)
        if empty.size:
            problem = f"graph {int(empty[0])} has no nodes ({empty.size} such graphs in all)"
            raise DataError(f"data '{name}': {problem}; remove them")
        self._check_values("graph")
        owner = self.graph_of_node()
        if self.edges.size and (self.edges.min() < 0 or self.edges.max() >= owner.size):
            raise DataError(f"data '{name}' has an edge to a node that is not there")
        if (owner[self.edges[0]] != owner[self.edges[1]]).any():
            raise DataError(f"data '{name}' has an edge from one graph to another; remove it")
        return self


@dataclass(frozen=True, eq=False)
class GraphGroup:
    """Several sets of graphs with different features and classes: one for each client, in order."""

    name: str
    sets: tuple[GraphSet, ...]

    def undirected_simple(self) -> GraphGroup:
        """Return every set with edges in both directions, without loops and duplicates."""
        return replace(self, sets=tuple(one.undirected_simple() for one in self.sets))

    prepared = undirected_simple
