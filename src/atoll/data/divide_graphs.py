"""From sets of small graphs to a federation: each client's graphs joined end to end, as one graph.

A client owns a part of one set, or a whole set of a group. The sets of a group differ in features
and classes: all clients then have as many columns as the widest set and as many classes as the
richest, and `Graph.has_features` and `Graph.has_classes` say what a client really has.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch

from atoll.core.batching import batching_of
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, Sparse, make_graph, sparse_matrix
from atoll.data.divide import check_client
from atoll.data.partition import Partition, divide
from atoll.data.public.registry import SPARSE_BELOW
from atoll.data.source import TEST, TRAIN, VAL, GraphGroup, GraphSet, check_graph_set
from atoll.data.split import split as assign_roles

BY_SET = "by-set"
"""The partition of a group: one set for each client."""
BATCH_SIZE = 128
"""Training graphs in one step unless the user says otherwise; GCFL's number."""


class Owner(NamedTuple):
    """What one client gets: graphs of a set, by number, and their roles."""

    source: GraphSet
    ids: np.ndarray
    roles: np.ndarray


def federate_graphs(
    source: GraphSet | GraphGroup,
    *,
    clients: int | None = None,
    partition: str | None = None,
    split: str = "stratified",
    ratios: tuple[float, float, float] | None = None,
    seed: int = 0,
    partition_seed: int | None = None,
    allow: Collection[str] = (),
    batch_size: int = BATCH_SIZE,
) -> Federation:
    """Divide a set of graphs among clients, or give each a set, and every graph its role.

    Args:
        source: One set, or a group of sets.
        clients: How many; for a group there is one for each set.
        partition: Recipe of `data.partition` for one set (default: "gcfl-oneds"); a group knows
            "by-set" alone.
        split: Recipe of `data.split`.
        ratios: Shares of training, validation and test graphs; the recipe's own by default.
        seed: Seed of the split, and of the partition unless `partition_seed` is given.
        partition_seed: Seed of the partition alone.
        allow: Names from `federate.DEGENERATE` that are accepted.
        batch_size: Training graphs in one step, unless an experiment chooses; 0 takes all of a
            client's at once.
    """
    batching = batching_of(batch_size)
    first = seed if partition_seed is None else partition_seed
    if isinstance(source, GraphGroup):
        parts = _by_set(source, clients, partition, first)
        sets = source.sets
    else:
        parts = divide(check_graph_set(source), partition or "gcfl-oneds", clients, first)
        sets = (source,) * len(parts.parts)
    roles = _roles(source, sets, parts, split, seed, ratios)
    owners = [Owner(*owned) for owned in zip(sets, parts.parts, roles, strict=True)]
    width = max(one.num_features for one in sets)
    classes = max(one.classes for one in sets)
    graphs = tuple(client_graphs(owner, width, classes) for owner in owners)
    check_owners(owners, graphs, allow)
    about = {
        "partition": parts.recipe,
        "split": split,
        "clients": len(graphs),
        "sha1": parts.sha1,
        "sets": [one.name for one in sets],
        "graphs": [int(owner.ids.size) for owner in owners],
        "nodes": [graph.num_nodes for graph in graphs],
        "edges": [int(graph.edges.shape[1]) for graph in graphs],
        "batch_size": batch_size,
    }
    metric = sets[0].metric
    return Federation(graphs, classes, source.name, (), metric, batching, about)


def _by_set(group: GraphGroup, clients: int | None, partition: str | None, seed: int) -> Partition:
    """Every set whole, to one client each."""
    if partition not in (None, BY_SET):
        raise ConfigError(
            f"group '{group.name}' has one client for each data set; leave out --partition"
        )
    if clients not in (None, len(group.sets)):
        raise ConfigError(
            f"group '{group.name}' has {len(group.sets)} data sets and one client for each; leave "
            f"out --clients {clients}"
        )
    parts = tuple(np.arange(check_graph_set(one).num_graphs) for one in group.sets)
    return Partition(BY_SET, len(parts), seed, {}, parts)


def _roles(
    source: GraphSet | GraphGroup,
    sets: tuple[GraphSet, ...],
    parts: Partition,
    recipe: str,
    seed: int,
    ratios: tuple[float, float, float] | None,
) -> list[np.ndarray]:
    if isinstance(source, GraphSet):
        return assign_roles(source, parts.parts, recipe, seed=seed, ratios=ratios)
    return [
        assign_roles(one, [ids], recipe, seed=seed, ratios=ratios)[0]
        for one, ids in zip(sets, parts.parts, strict=True)
    ]


def client_graphs(owner: Owner, width: int, classes: int) -> Graph:
    """A client's graphs end to end; label and role of each stand on its first node, the root."""
    source, ids, roles = owner
    sizes = np.diff(source.node_ptr)[ids]
    starts = np.cumsum(sizes) - sizes
    nodes = _runs(source.node_ptr[ids], sizes)
    root = np.repeat(starts, sizes)
    y = np.zeros(nodes.size, dtype=np.int64)
    y[starts] = np.maximum(source.y[ids], 0)

    def mask(role: int) -> torch.Tensor:
        chosen = np.zeros(nodes.size, dtype=bool)
        chosen[starts] = (roles == role) & (source.y[ids] >= 0)
        return torch.from_numpy(chosen)

    return make_graph(
        _padded(source.x[nodes], width),
        torch.from_numpy(_edges(source, ids, starts)),
        torch.from_numpy(y),
        train=mask(TRAIN),
        val=mask(VAL),
        test=mask(TEST),
        ids=torch.from_numpy(nodes.astype(np.int32)),
        root=torch.from_numpy(root),
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
    shape = (x.shape[0], width)
    if np.count_nonzero(x) >= SPARSE_BELOW * x.shape[0] * width:
        wide = np.zeros(shape, dtype=np.float32)
        wide[:, : x.shape[1]] = x
        return torch.from_numpy(wide)
    rows, columns = (torch.from_numpy(index) for index in x.nonzero())
    values = torch.from_numpy(x.astype(np.float32))[rows, columns]
    return sparse_matrix(rows, columns, values, shape, square=False)


def check_owners(owners: list[Owner], graphs: tuple[Graph, ...], allow: Collection[str]) -> None:
    """Refuse clients that cannot take part."""
    for number, (owner, graph) in enumerate(zip(owners, graphs, strict=True)):
        size, name = owner.ids.size, owner.source.name
        who = f"client {number} of {len(owners)} ({size} graphs of '{name}')"
        check_client(who, graph, owner.source.y[owner.ids], allow)
