"""From one whole graph to a federation: induced subgraphs, roles, tensors, checks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import scipy.sparse as sp
import torch

from atoll.core.errors import DataError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, Sparse, make_graph, sparse_matrix
from atoll.data.partition import Partition, divide
from atoll.data.source import TEST, TRAIN, VAL, Source, check_source
from atoll.data.spec import Value
from atoll.data.split import split as assign_roles

DEGENERATE = ("no-edge", "single-class")
"""Clients that are refused unless the user allows them."""


def federate(
    source: Source,
    *,
    clients: int | None,
    partition: str = "louvain",
    split: str = "stratified",
    ratios: tuple[float, float, float] | None = None,
    seed: int = 0,
    partition_seed: int | None = None,
    allow: Collection[str] = (),
    partition_options: dict[str, Value] | None = None,
    split_options: dict[str, Value] | None = None,
) -> Federation:
    """Divide a graph among clients and give every node its role.

    Args:
        source: The whole graph.
        clients: How many; None where the recipe knows (a column).
        partition: Recipe of `data.partition`.
        split: Recipe of `data.split`.
        ratios: Shares of training, validation and test nodes; the recipe's own by default.
        seed: Seed of the split, and of the partition unless `partition_seed` is given.
        partition_seed: Seed of the partition alone.
        allow: Names from `DEGENERATE` that are accepted.
        partition_options: Further options of the partition recipe.
        split_options: Further options of the split recipe.
    """
    check_source(source)
    first = seed if partition_seed is None else partition_seed
    parts = divide(source, partition, clients, first, **(partition_options or {}))
    roles = assign_roles(
        source, parts.parts, split, seed=seed, ratios=ratios, **(split_options or {})
    )
    cut = InducedSubgraphs(source)
    graphs = tuple(cut.graph(ids, role) for ids, role in zip(parts.parts, roles, strict=True))
    check_clients(source, parts, graphs, allow)
    about = {
        "partition": partition,
        "split": split,
        "clients": len(graphs),
        "sha1": parts.sha1,
        "nodes": [int(ids.size) for ids in parts.parts],
        "edges": [int(graph.edges.shape[1]) for graph in graphs],
        "edges_total": int(source.edges.shape[1]),
        **({"class_names": list(source.class_names)} if source.class_names else {}),
    }
    return Federation(graphs, source.classes, name=source.name, metric=source.metric, about=about)


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

    def edges(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the edges inside `ids`, ascending, and their ends counted in `ids`."""
        source = self.source
        counts = self.first[ids + 1] - self.first[ids]
        shift = np.repeat(self.first[ids] - (np.cumsum(counts) - counts), counts)
        leaving = np.unique(self.by_source[shift + np.arange(shift.size)])
        self.place[ids] = np.arange(ids.size)
        ends = self.place[source.edges[:, leaving]]
        self.place[ids] = -1
        inside = ends[1] >= 0
        return leaving[inside], np.ascontiguousarray(ends[:, inside])

    def part(self, ids: np.ndarray) -> Source:
        """The subgraph with the nodes `ids`, numbered in that order."""
        source, (numbers, ends) = self.source, self.edges(ids)
        return replace(
            source,
            x=source.x[ids],
            edges=ends,
            y=source.y[ids],
            weight=None if source.weight is None else source.weight[numbers],
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


def check_clients(
    source: Source,
    partition: Partition,
    graphs: tuple[Graph, ...],
    allow: Collection[str],
) -> None:
    """Refuse clients that cannot take part."""
    for number, ids in enumerate(partition.parts):
        who = f"client {number} of {len(graphs)} ({ids.size} nodes of '{source.name}')"
        check_client(who, graphs[number], source.y[ids], allow)


def check_client(who: str, graph: Graph, labels: np.ndarray, allow: Collection[str]) -> None:
    """Refuse a client that cannot take part, in one sentence that says what to do.

    Args:
        who: The client, in words.
        graph: What it has.
        labels: Labels of what it classifies; -1 where unknown.
        allow: Names from `DEGENERATE` that are accepted.
    """
    if not bool(graph.train.any()):
        raise DataError(
            f"{who} has no training {graph.task}; use fewer clients, another partition or split, "
            "or a larger training share"
        )
    if graph.edges.shape[1] == 0 and "no-edge" not in allow:
        raise DataError(
            f"{who} has no edge; use fewer clients or another partition, or accept such clients "
            "with --allow no-edge"
        )
    if np.unique(labels[labels >= 0]).size == 1 and "single-class" not in allow:
        raise DataError(
            f"{who} has {graph.task.plural} of a single class; use fewer clients or another "
            "partition, or accept such clients with --allow single-class"
        )
