"""From data to a federation: preparations, each client's part and roles, and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from atoll.core.batching import WHOLE, batching_of
from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, Sparse, make_graph, sparse_matrix
from atoll.data.partition import Partition, divide
from atoll.data.public.registry import SPARSE_BELOW
from atoll.data.source import TEST, TRAIN, VAL, GraphGroup, GraphSet, Source
from atoll.data.split import Growth, Parts, Ratios, growth
from atoll.data.split import split as assign_roles

if TYPE_CHECKING:
    import scipy.sparse as sp

Data = Source | GraphSet | GraphGroup
DEGENERATE = ("no-edge", "single-class")  # clients that are refused unless the user allows them
BY_SET = "by-set"  # the partition of a group: one set for each client
BATCH_SIZE = 128  # default number of training graphs in one step, as in GCFL
WORDS = ("cora", "citeseer", "pubmed", "computers", "photo")
"""Planetoid's and Amazon's data sets, whose features are words. FED-PUB normalises their rows."""


def federate(
    source: Data,
    *,
    clients: int | None = None,  # None if the recipe determines it (a column, a group)
    partition: str | None = None,  # by default "louvain" for a graph, "gcfl-oneds" for a set
    split: str = "stratified",
    ratios: Ratios | None = None,  # of training, validation and testing; by default the recipe's
    seed: int = 0,  # of the split, and of the partition unless `partition_seed` is given
    partition_seed: int | None = None,
    allow: Collection[str] = (),  # names from `DEGENERATE` that are accepted
    batch_size: int = BATCH_SIZE,  # training graphs in one step; 0 for all of a client's at once
) -> Federation:
    """Partition a graph or a set of graphs among clients, and split every client's part.

    `partition` and `split` are recipes of `data.partition` and `data.split`. A group gives each
    client one set and has only the partition "by-set". A single graph is never cut into batches.
    """
    batching = WHOLE if isinstance(source, Source) else batching_of(batch_size)
    first = seed if partition_seed is None else partition_seed
    parts = _divided(source, partition, clients, first)

    def draw(of: Source | GraphSet, owned: Parts) -> list[np.ndarray]:
        return assign_roles(of, owned, split, seed, ratios)

    if isinstance(source, GraphGroup):
        roles = [draw(one, [ids])[0] for one, ids in zip(source.sets, parts.parts, strict=True)]
    else:
        roles = draw(source, parts.parts)
    grows = growth(source, split, ratios)
    graphs = _graphs(source, parts.parts, roles, grows)
    sets = source.sets if isinstance(source, GraphGroup) else (source,) * len(graphs)
    names = _client_names(source, parts.recipe)
    for number, (one, ids, graph) in enumerate(zip(sets, parts.parts, graphs, strict=True)):
        items = f"{ids.size} {graph.task.plural} of '{one.name}'"
        who = f"'{names[number]}'" if names else str(number)
        check_client(f"client {who} of {len(graphs)} ({items})", graph, one.y[ids], allow)
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
        about |= {"cuts": list(grows.cuts)} if grows and grows.column else {}
    else:
        about |= {"sets": [one.name for one in sets], "graphs": list(parts.sizes)}
        about["batch_size"] = batch_size
    if names:
        about["client_names"] = names
    classes = max(one.classes for one in sets)
    known = source.encoder if isinstance(source, Source) else None
    encoder = None if known is None else known.plain()
    return Federation(graphs, classes, source.name, (), sets[0].metric, batching, about, encoder)


def _client_names(source: Data, recipe: str) -> list[str]:
    """Return the clients' names: values of an owner column, or the sets of a group, or []."""
    if not isinstance(source, Source):
        names = [one.name for one in source.sets] if isinstance(source, GraphGroup) else []
        return names if len(set(names)) == len(names) else []
    values = source.columns.get(recipe.removeprefix("column:"))
    if values is None or (source.encoder is None and values.dtype.kind not in "UO"):
        return []
    plain = values.astype(str) if values.dtype == object else values
    return [str(name) for name in np.unique(plain).tolist()]


def _graphs(
    source: Data, parts: Parts, roles: Parts, grows: Growth | None = None
) -> tuple[Graph, ...]:
    if isinstance(source, Source):
        cut = InducedSubgraphs(source)
        return tuple(cut.graph(*one, grows) for one in zip(parts, roles, strict=True))
    sets = source.sets if isinstance(source, GraphGroup) else (source,) * len(parts)
    width, classes = max(one.num_features for one in sets), max(one.classes for one in sets)
    owned = zip(sets, parts, roles, strict=True)
    return tuple(joined_graphs(one, ids, own, width, classes) for one, ids, own in owned)


def _divided(source: Data, partition: str | None, clients: int | None, seed: int) -> Partition:
    """Return the parts of all clients. Each set of a group belongs to one client as a whole."""
    if not isinstance(source, GraphGroup):
        usual = "louvain" if isinstance(source, Source) else "gcfl-oneds"
        return divide(source.checked(), partition or usual, clients, seed)
    if partition not in (None, BY_SET):
        advice = "remove --partition"
        raise ConfigError(f"group '{source.name}' has one client for each data set; {advice}")
    if clients not in (None, len(source.sets)):
        problem = f"group '{source.name}' has {len(source.sets)} data sets and one client for each"
        raise ConfigError(f"{problem}; remove --clients {clients}")
    return Partition(BY_SET, tuple(np.arange(one.checked().num_graphs) for one in source.sets))


def check_client(who: str, graph: Graph, labels: np.ndarray, allow: Collection[str]) -> None:
    """Refuse a client without a training node (or graph).

    Refuse a client of a kind in `DEGENERATE`, unless `allow` names the kind. A label of -1 is
    unknown.
    """
    advice = "use fewer clients or another partition, or accept such clients with --allow"
    if not bool(graph.train.any()):
        advice = "use fewer clients, another partition or split, or a larger training share"
        raise DataError(f"{who} has no training {graph.task}; {advice}")
    if graph.edges.shape[1] == 0 and "no-edge" not in allow:
        raise DataError(f"{who} has no edge; {advice} no-edge")
    if np.unique(labels[labels >= 0]).size == 1 and "single-class" not in allow:
        raise DataError(f"{who} has {graph.task.plural} of a single class; {advice} single-class")


class InducedSubgraphs:
    """Subgraphs of sets of nodes. Edges keep their order.

    After one sort of all edges, the time for a subgraph depends only on its nodes and their edges.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        begins = source.edges[0]
        self.by_source = np.argsort(begins, kind="stable")
        degree = np.bincount(begins, minlength=source.num_nodes)
        self.first = np.concatenate([[0], np.cumsum(degree)])
        self.place = np.full(source.num_nodes, -1, dtype=np.int64)

    def part(self, ids: np.ndarray) -> Source:
        """Return the subgraph with the nodes `ids`, numbered in that order."""
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
            edge_time=None if source.edge_time is None else source.edge_time[numbers[inside]],
            columns={name: values[ids] for name, values in source.columns.items()},
        )

    def graph(self, ids: np.ndarray, roles: np.ndarray, grows: Growth | None = None) -> Graph:
        return graph_of(self.part(ids), ids, roles, grows)


def graph_of(
    part: Source, ids: np.ndarray, roles: np.ndarray, grows: Growth | None = None
) -> Graph:
    """Return one client's graph as tensors. `ids` are its node numbers in the whole graph."""
    x, edges, y = _features(part.x), torch.from_numpy(part.edges), torch.from_numpy(part.y)
    weight = None if part.weight is None else torch.from_numpy(part.weight)
    own = torch.from_numpy(ids.astype(np.int32))
    graph = make_graph(x, edges, y, *_masks(roles, part.y), edge_weight=weight, ids=own)
    if grows is None:
        return graph
    since = grows.of_nodes(part, roles)
    stages = since, grows.of_edges(part, since)
    return replace(graph, since=torch.from_numpy(stages[0]), edge_since=torch.from_numpy(stages[1]))


def _masks(roles: np.ndarray, y: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy((roles == role) & (y >= 0)) for role in (TRAIN, VAL, TEST)]


def _features(x: np.ndarray | sp.csr_array) -> torch.Tensor | Sparse:
    if isinstance(x, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    entries = x.tocoo()
    row, column = (torch.from_numpy(index.astype(np.int64)) for index in entries.coords)
    values = torch.from_numpy(entries.data.astype(np.float32))
    return sparse_matrix(row, column, values, x.shape, square=False)


def joined_graphs(
    source: GraphSet, ids: np.ndarray, roles: np.ndarray, width: int, classes: int
) -> Graph:
    """Concatenate graphs of a set. Each graph's first node, the root, has its label and role."""
    # The sets of a group differ in features and classes. All clients get the largest numbers of
    # both. `has_features` and `has_classes` mark those that a client's own set has.
    sizes = np.diff(source.node_ptr)[ids]
    starts = np.cumsum(sizes) - sizes
    nodes = _runs(source.node_ptr[ids], sizes)
    y, role = np.full((2, nodes.size), -1)  # no label, and UNUSED
    y[starts], role[starts] = source.y[ids], roles
    graph_of_edge = source.graph_of_node()[source.edges[0]]
    order = np.argsort(graph_of_edge, kind="stable")
    counts = np.bincount(graph_of_edge, minlength=source.num_graphs)
    chosen = order[_runs((np.cumsum(counts) - counts)[ids], counts[ids])]
    # Shift each graph's node numbers to the place of its root.
    moved = np.repeat(starts - source.node_ptr[ids], counts[ids])
    x = source.x[nodes]
    if np.count_nonzero(x) >= SPARSE_BELOW * nodes.size * width:
        x = np.pad(x, ((0, 0), (0, width - x.shape[1])))
    else:
        import scipy.sparse as sp

        x = sp.csr_array(x)
        x.resize(nodes.size, width)
    return make_graph(
        _features(x),
        torch.from_numpy(np.ascontiguousarray(source.edges[:, chosen] + moved)),
        torch.from_numpy(y),
        *_masks(role, y),
        ids=torch.from_numpy(nodes.astype(np.int32)),
        root=torch.from_numpy(np.repeat(starts, sizes)),
        has_features=torch.arange(width) < source.num_features,
        has_classes=torch.arange(classes) < source.classes,
    )


def _runs(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return starts[0], starts[0] + 1, ... (sizes[0] numbers), then from starts[1], and so on."""
    before = np.cumsum(sizes) - sizes
    return np.asarray(np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes))


def largest_component(source: Source) -> Source:
    """Keep only the largest connected component. In a tie, keep that with the lowest node."""
    import scipy.sparse as sp
    from scipy.sparse.csgraph import connected_components

    n = source.num_nodes
    ones = np.ones(source.edges.shape[1], dtype=np.int8)
    adjacency = sp.coo_array((ones, tuple(source.edges)), shape=(n, n))
    _, label = connected_components(adjacency, directed=False)
    largest = np.flatnonzero(label == np.bincount(label).argmax())
    return InducedSubgraphs(source).part(largest)


def row_normalized(source: Source) -> Source:
    """Divide features by their row's sum. A row of zeros stays."""
    total = np.asarray(source.x.sum(axis=1)).reshape(-1)
    scale = np.divide(1.0, total, out=np.zeros(total.shape), where=total != 0).astype(np.float32)
    if isinstance(source.x, np.ndarray):
        return replace(source, x=source.x * scale[:, None])
    import scipy.sparse as sp

    return replace(source, x=sp.csr_array(sp.diags_array(scale) @ source.x))


def words_normalized(source: Source) -> Source:
    """Apply `row_normalized` to the data sets that FED-PUB normalises, and to no others."""
    return row_normalized(source) if source.name.lower() in WORDS else source


PREPARATIONS: dict[str, Callable[[Source], Source]] = {
    "undirected": Source.prepared,
    "largest-component": largest_component,
    "row-normalized": row_normalized,
    "words-normalized": words_normalized,
}
