"""From data to a federation: who owns what, and the role of every node or graph."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from atoll.core.batching import WHOLE, batching_of
from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.data.client_graph import InducedSubgraphs, joined_graphs
from atoll.data.partition import Partition, divide
from atoll.data.source import GraphGroup, GraphSet, Source, check_graph_set, check_source
from atoll.data.spec import Value
from atoll.data.split import Parts, Ratios
from atoll.data.split import split as assign_roles

Data = Source | GraphSet | GraphGroup
Options = dict[str, Value]
DEGENERATE = ("no-edge", "single-class")  # clients that are refused unless the user allows them
BY_SET = "by-set"  # the partition of a group: one set for each client
BATCH_SIZE = 128  # training graphs in one step unless the user says otherwise; GCFL's number


def federate(
    source: Data,
    *,
    clients: int | None = None,  # None where the recipe knows (a column, a group)
    partition: str | None = None,  # by default "louvain" for a graph, "gcfl-oneds" for a set
    split: str = "stratified",
    ratios: Ratios | None = None,  # of training, validation and testing; by default the recipe's
    seed: int = 0,  # of the split, and of the partition unless `partition_seed` is given
    partition_seed: int | None = None,
    allow: Collection[str] = (),  # names from `DEGENERATE` that are accepted
    batch_size: int = BATCH_SIZE,  # training graphs in one step; 0 for all of a client's at once
    partition_options: Options | None = None,
    split_options: Options | None = None,
) -> Federation:
    """Divide a graph or a set of graphs among clients, or give each a set, and all of it roles.

    `partition` and `split` are recipes of `data.partition` and `data.split`; a group knows only the
    partition "by-set". One graph is never divided into batches.
    """
    batching = WHOLE if isinstance(source, Source) else batching_of(batch_size)
    first = seed if partition_seed is None else partition_seed
    parts = _divided(source, partition, clients, first, partition_options or {})

    def draw(of: Source | GraphSet, owned: Parts) -> list[np.ndarray]:
        return assign_roles(of, owned, split, seed, ratios, **(split_options or {}))

    if isinstance(source, GraphGroup):
        roles = [draw(one, [ids])[0] for one, ids in zip(source.sets, parts.parts, strict=True)]
    else:
        roles = draw(source, parts.parts)
    graphs = _graphs(source, parts.parts, roles)
    sets = source.sets if isinstance(source, GraphGroup) else (source,) * len(roles)
    for number, (one, ids, graph) in enumerate(zip(sets, parts.parts, graphs, strict=True)):
        items = f"{ids.size} {graph.task.plural} of '{one.name}'"
        check_client(f"client {number} of {len(graphs)} ({items})", graph, one.y[ids], allow)
    about: dict[str, object] = {
        "split": split,
        "partition": parts.recipe,
        "clients": len(graphs),
        "sha1": parts.sha1,
        "nodes": [graph.num_nodes for graph in graphs],
        "edges": [int(graph.edges.shape[1]) for graph in graphs],
    }
    if isinstance(source, Source):
        named = {"class_names": list(source.class_names)} if source.class_names else {}
        about |= {"edges_total": int(source.edges.shape[1]), **named}
    else:
        names = [one.name for one in sets]
        about |= {"sets": names, "graphs": list(parts.sizes), "batch_size": batch_size}
    classes = max(one.classes for one in sets)
    return Federation(graphs, classes, source.name, (), sets[0].metric, batching, about)


def _graphs(source: Data, parts: Parts, roles: Parts) -> tuple[Graph, ...]:
    if isinstance(source, Source):
        return tuple(map(InducedSubgraphs(source).graph, parts, roles))
    sets = source.sets if isinstance(source, GraphGroup) else (source,) * len(parts)
    width, classes = max(one.num_features for one in sets), max(one.classes for one in sets)
    owned = zip(sets, parts, roles, strict=True)
    return tuple(joined_graphs(one, ids, own, width, classes) for one, ids, own in owned)


def _divided(
    source: Data, partition: str | None, clients: int | None, seed: int, options: Options
) -> Partition:
    """Who owns what; every set of a group goes whole to one client."""
    if isinstance(source, Source):
        return divide(check_source(source), partition or "louvain", clients, seed, **options)
    if isinstance(source, GraphSet):
        recipe = partition or "gcfl-oneds"
        return divide(check_graph_set(source), recipe, clients, seed, **options)
    if partition not in (None, BY_SET):
        raise ConfigError(
            f"group '{source.name}' has one client for each data set; leave out --partition"
        )
    if clients not in (None, len(source.sets)):
        raise ConfigError(
            f"group '{source.name}' has {len(source.sets)} data sets and one client for each; "
            f"leave out --clients {clients}"
        )
    parts = tuple(np.arange(check_graph_set(one).num_graphs) for one in source.sets)
    return Partition(BY_SET, parts)


def check_client(who: str, graph: Graph, labels: np.ndarray, allow: Collection[str]) -> None:
    """Refuse a client that cannot take part; `labels` are -1 where unknown."""
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
