"""Partitions by communities of the unweighted graph, packed into clients or grouped by labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from atoll.core.errors import ConfigError, DataError
from atoll.data.source import Source
from atoll.data.spec import check_compat, check_flag, check_whole

Parts = list[np.ndarray]
Counts = Sequence[int] | int
NoRoom = Callable[[np.ndarray, np.ndarray, int], int]
"""(sizes of all clients, open clients, cursor) -> the client that takes a group without room."""


@dataclass(frozen=True)
class PackingRule:
    """The parameters in which the public packing rules differ."""

    piece: int  # the largest size of a group; a larger community is cut first
    room: int  # a group fits if client and group together have at most this many members
    full: int  # a client with this many members gets no more
    no_room: NoRoom  # chooses the client for a group that fits nowhere
    least: int = 1  # a client with fewer members is topped up at the end
    duplicates: bool = False  # store a group that fits nowhere twice (the fault of FedGTA's code)


def louvain(source: Source, clients: int, seed: int, *, delta: int = 20) -> Parts:
    """Pack seeded Louvain communities into clients of about N/K nodes, for N nodes and K clients.

    Communities are cut to N/K - delta nodes. A client takes a group while its nodes stay below
    N/K + delta. If delta is above a quarter of N/K, it is reduced to that.
    """
    # A group without room goes to the smallest client. Each client gets at least half of N/K.
    check_whole("delta", delta, 0)
    target = source.num_nodes // clients
    # The public rule never ends if N/K <= delta. A quarter of N/K also cuts few communities.
    slack = min(delta, target // 4)
    groups = groups_of(scikit_louvain(source.undirected_simple(), seed))
    return pack(groups, clients, replace(even_rule(target, slack), least=max(1, target // 2)))


def louvain_openfgl(
    source: Source, clients: int, seed: int, *, delta: int = 20, compat: str | None = None
) -> Parts:
    """OpenFGL: scikit-network's Louvain on the unchanged edges. The seed has no effect."""
    # `compat="give-up"` restores its faulty choice for a group that fits nowhere.
    rule = _public_rule(source, "louvain-openfgl", clients, delta, compat)
    return pack(groups_of(scikit_louvain(source, None)), clients, rule)


def louvain_fedtad(
    source: Source, clients: int, seed: int, *, delta: int = 20, compat: str | None = None
) -> Parts:
    """FedTAD and FedATH: python-louvain with NumPy's old generator, then OpenFGL's packing."""
    rule = _public_rule(source, "louvain-fedtad", clients, delta, compat)
    return pack(groups_of(networkx_louvain(source, seed)), clients, rule)


def louvain_fedgta(source: Source, clients: int, seed: int, *, compat: str | None = None) -> Parts:
    """FedGTA and AdaFGL: python-louvain, clients of about N/K + 1 nodes (N nodes, K clients)."""
    # `compat="duplicates"` restores its fault: a group that fits nowhere is stored twice.
    check_compat(compat, "duplicates")
    target = source.num_nodes // clients
    rule = PackingRule(target, target + 1, target + 1, stay, duplicates=compat is not None)
    return pack(groups_of(networkx_louvain(source, seed)), clients, rule)


def _public_rule(
    source: Source, recipe: str, clients: int, delta: int, compat: str | None
) -> PackingRule:
    check_whole("delta", delta, 0)
    check_compat(compat, "give-up")
    target = source.num_nodes // clients
    if target <= delta:
        most = source.num_nodes // (delta + 1)
        fewer = f"use at most {most} clients, or " if most else "use "
        need = f"partition '{recipe}' needs more than delta = {delta} nodes per client"
        has = f"'{source.name}' has {source.num_nodes} nodes for {clients} clients"
        raise DataError(f"{need}, but {has}; {fewer}a smaller delta or partition 'louvain'")
    return even_rule(target, delta, smallest if compat is None else mistaken_smallest)


def louvain_plus(source: Source, clients: int, seed: int) -> Parts:
    """OpenFGL: Louvain communities whose label histograms are in one KMeans cluster form a client.

    The seed is that of KMeans.
    """
    # It simulates owners with similar interests, and reads every label for that, including test
    # labels. Sizes can be very uneven.
    communities = groups_of(scikit_louvain(source.undirected_simple(), None))
    return _by_label_mix(source, "louvain-plus", communities, clients, seed)


def metis_plus(source: Source, clients: int, seed: int, *, communities: int = 100) -> Parts:
    """As `louvain_plus`, with METIS: `communities` parts, at most one per two nodes."""
    check_whole("communities", communities, 1)
    count = min(communities, max(1, source.num_nodes // 2))
    parts = groups_of(metis_labels(source, count, None))
    return _by_label_mix(source, "metis-plus", parts, clients, seed)


def _by_label_mix(
    source: Source, recipe: str, communities: Parts, clients: int, seed: int
) -> Parts:
    # Column 0 counts the unlabelled nodes, so no community has an empty histogram.
    bins = source.classes + 1
    counts = np.stack([np.bincount(source.y[ids] + 1, minlength=bins) for ids in communities])
    mixes = counts / counts.sum(axis=1, keepdims=True)
    distinct = len(np.unique(mixes, axis=0))
    if clients > distinct:
        mixes = f"{len(communities)} communities with {distinct} different label mixes"
        problem = f"found {mixes} in '{source.name}', too few for {clients} clients"
        raise DataError(f"partition '{recipe}' {problem}; use at most {distinct} clients")
    from sklearn.cluster import KMeans

    cluster = KMeans(n_clusters=clients, random_state=seed).fit_predict(mixes)
    owner = np.empty(source.num_nodes, dtype=np.int64)
    owner[np.concatenate(communities)] = np.repeat(cluster, [len(ids) for ids in communities])
    return top_up(members(owner, clients))


def metis(source: Source, clients: int, seed: int, *, reseed: bool = False) -> Parts:
    """METIS k-way, as in FED-PUB and FedIIH."""
    # METIS has a constant seed, so every seed gives the same partition, as in the papers. With
    # `reseed` METIS gets the partition's seed, which only matters on graphs that are large enough
    # to be coarsened (about a thousand nodes).
    check_flag("reseed", reseed)
    return _metis_clients(source, clients, False, seed if reseed else None)


def metis_recursive(source: Source, clients: int, seed: int, *, reseed: bool = False) -> Parts:
    """METIS as OpenFGL calls it: recursive bisection up to 8 clients, k-way above."""
    check_flag("reseed", reseed)
    return _metis_clients(source, clients, None, seed if reseed else None)


def _metis_clients(
    source: Source, clients: int, recursive: bool | None, seed: int | None = None
) -> Parts:
    return top_up(members(metis_labels(source, clients, recursive, seed), clients))


def metis_overlap(
    source: Source, clients: int, seed: int, *, per_community: int = 5, after: Counts = ()
) -> Parts:
    """FED-PUB's overlapping clients: `per_community` random halves of each METIS community."""
    # Python's generator is used in the order community, client. `after` lists client counts that
    # were drawn before from the same stream: FED-PUB draws 10, 30 and 50 in this order from one
    # seed, so its 50 clients are `after=(10, 30)`.
    check_whole("per_community", per_community, 1)
    stream = Random(seed)
    for count in (after,) if isinstance(after, int) else after:
        check_whole("each number in after", count, 1)
        _halves(source, count, per_community, stream)
    return _halves(source, clients, per_community, stream)


def _halves(source: Source, clients: int, per_community: int, stream: Random) -> Parts:
    if clients % per_community:
        raise ConfigError(
            f"partition 'metis-overlap' puts {per_community} clients on each community, so "
            f"{clients} clients do not fit; use a multiple of {per_community}, or set per_community"
        )
    communities = clients // per_community
    if communities > source.num_nodes // 2:
        nodes = f"{source.num_nodes} nodes for {communities} communities"
        problem = f"needs two nodes per community, but '{source.name}' has {nodes}"
        advice = f"use at most {source.num_nodes // 2 * per_community} clients"
        raise DataError(f"partition 'metis-overlap' {problem}; {advice}")
    parts = _metis_clients(source, communities, False)
    if min(map(len, parts)) < 2:
        raise DataError(
            f"METIS left a community of one node when it cut '{source.name}' into {communities}, "
            f"and half of one node is no client; use fewer than {clients} clients"
        )
    halves = [(ids.tolist(), len(ids) // 2) for ids in parts for _ in range(per_community)]
    return [np.array(stream.sample(*half)) for half in halves]


def scikit_louvain(source: Source, seed: int | None) -> np.ndarray:
    """Return each node's community by scikit-network's Louvain (Newman, resolution 1)."""
    # With a seed the nodes are visited in a random order. Without one the result is always the
    # same, as in OpenFGL. Degrees follow from the given edges: pass `source.undirected_simple()`
    # unless the degrees of the directed list are wanted.
    count, nodes = source.edges.shape[1], source.num_nodes
    if count == 0:
        return np.arange(nodes)  # the library refuses a graph without edges
    import scipy.sparse as sp
    from sknetwork.clustering import Louvain

    # The library supports csr_matrix, not csr_array.
    adjacency = sp.csr_matrix((np.ones(count), tuple(source.edges)), shape=(nodes, nodes))
    stream, shuffle = np.random.RandomState(seed or 0), seed is not None
    algorithm = Louvain(1, "newman", shuffle_nodes=shuffle, random_state=stream)
    return np.asarray(algorithm.fit_predict(adjacency), dtype=np.int64)


def networkx_louvain(source: Source, seed: int) -> np.ndarray:
    """Return each node's community by python-louvain on the undirected simple graph."""
    # The public codes (FedTAD, FedATH, FedGTA) draw from NumPy's global generator directly after
    # seeding it. A `RandomState` of the same seed is the same stream. It is used in the order of
    # nodes and neighbours, so both are ascending. Slow on large graphs, because it is pure Python.
    import community
    import networkx as nx

    graph = nx.Graph()
    graph.add_nodes_from(range(source.num_nodes))
    graph.add_edges_from(source.undirected_simple().edges.T.tolist())
    labels = community.best_partition(graph, random_state=np.random.RandomState(seed))
    return np.fromiter((labels[node] for node in range(source.num_nodes)), dtype=np.int64)


def metis_labels(
    source: Source, parts: int, recursive: bool | None, seed: int | None = None
) -> np.ndarray:
    """Return each node's part by METIS on the undirected simple graph, neighbours ascending."""
    # With few nodes per part METIS may leave some empty. `recursive` False is k-way. None is the
    # library's rule, recursive bisection up to 8 parts. `seed` None is METIS's constant seed.
    import pymetis

    edges = source.undirected_simple().edges
    index = pymetis.zero_copy_dtype()
    starts = np.concatenate([[0], np.cumsum(np.bincount(edges[0], minlength=source.num_nodes))])
    adjacency = pymetis.CSRAdjacency(starts.astype(index), edges[1].astype(index))
    options = pymetis.Options()
    if seed is not None:
        # METIS seeds C's rand, which takes 32 signed bits and treats 0 as 1.
        options.seed = 1 + seed % (2**31 - 2)
    _, labels = pymetis.part_graph(parts, adjacency, recursive=recursive, options=options)
    return np.asarray(labels, dtype=np.int64)


def groups_of(labels: np.ndarray) -> Parts:
    """Return the members of each label, ascending. Labels are ordered by their first member."""
    _, first, dense = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    order = np.argsort(rank[dense], kind="stable")
    return np.split(order, np.cumsum(np.bincount(rank[dense]))[:-1])


def even_rule(target: int, slack: int, no_room: NoRoom | None = None) -> PackingRule:
    """Return the packing rule for clients of `target` members and fewer than `slack` extra ones."""
    most = max(target + slack - 1, target)
    return PackingRule(target - slack, most, target, no_room or smallest)


def smallest(sizes: np.ndarray, open_clients: np.ndarray, cursor: int) -> int:
    """Return the smallest client. Closed clients may be smaller than the last open one."""
    return int(np.argmin(sizes))


def stay(sizes: np.ndarray, open_clients: np.ndarray, cursor: int) -> int:
    """Return the client at the cursor, as FedGTA's code does after a full turn."""
    return int(open_clients[cursor])


def mistaken_smallest(sizes: np.ndarray, open_clients: np.ndarray, cursor: int) -> int:
    """Return the client that OpenFGL and FedTAD choose by mistake instead of the smallest one."""
    # Their search begins after 1001 steps of the cursor. It compares the size at the cursor, which
    # it moves itself, so each comparison is one client late: sizes 5, 3, 9 with the cursor on 9
    # give 9.
    open_sizes = sizes[open_clients]
    seen, least = (cursor + 1001) % len(open_sizes), np.inf
    for candidate in range(len(open_sizes)):
        if open_sizes[seen] < least:
            least, seen = open_sizes[seen], candidate
    return int(open_clients[seen])


def cut(groups: Sequence[np.ndarray], piece: int) -> Parts:
    """Cut groups to `piece` members. The first members stay, the others form a group at the end."""
    result = list(groups)
    for place, group in enumerate(result):  # this also visits the groups that it appends
        if len(group) > piece:
            result.append(group[piece:])
            result[place] = group[:piece]
    return result


def pack(groups: Sequence[np.ndarray], clients: int, rule: PackingRule) -> Parts:
    """Give the groups, largest first, to the next client that has room."""
    # The cursor stays on the client that took the last group. No client remains empty.
    owned: list[Parts] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, dtype=np.int64)
    open_clients, cursor = np.arange(clients), 0
    for group in sorted(cut(groups, rule.piece), key=len, reverse=True):
        while len(open_clients) > 1 and sizes[open_clients[cursor]] >= rule.full:
            open_clients = np.delete(open_clients, cursor)
            cursor %= len(open_clients)
        in_turn = np.roll(open_clients, -cursor)
        fits = sizes[in_turn] + len(group) <= rule.room
        if fits.any():
            taker, copies = int(in_turn[fits.argmax()]), 1
        else:
            taker, copies = rule.no_room(sizes, open_clients, cursor), 1 + rule.duplicates
        owned[taker] += [group] * copies
        sizes[taker] += len(group) * copies
        if taker in open_clients:
            cursor = int(np.searchsorted(open_clients, taker))
    none = np.empty(0, dtype=np.int64)
    return top_up([np.concatenate([none, *groups]) for groups in owned], rule.least)


def members(owner: np.ndarray, clients: int) -> Parts:
    """Return the ids of each client, ascending, from the client of each id."""
    sizes = np.bincount(owner, minlength=clients)
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])


def top_up(parts: Sequence[np.ndarray], least: int = 1) -> Parts:
    """Move last members of the currently largest clients to clients with fewer than `least`."""
    # If `least` is at most half of the mean size, each client ends with at least that many.
    result = list(parts)
    for client in range(len(result)):
        if len(result[client]) < least:
            largest = int(np.argmax([len(ids) for ids in result]))
            keep = len(result[largest]) - (len(result[largest]) - len(result[client])) // 2
            result[client] = np.concatenate([result[client], result[largest][keep:]])
            result[largest] = result[largest][:keep]
    return result


LOUVAIN = (louvain, louvain_openfgl, louvain_fedtad, louvain_fedgta, louvain_plus)
METIS = (metis, metis_recursive, metis_overlap, metis_plus)
