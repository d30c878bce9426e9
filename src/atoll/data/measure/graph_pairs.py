"""How different the graphs of every two clients are, by the measure of GCFL §4.1.

Structure: Jensen-Shannon distance between the anonymous-walk embeddings of two graphs. Features:
Jensen-Shannon divergence between the distributions of the cosine similarity of linked nodes in two
graphs. Both in nats, averaged over pairs of graphs, one from each of two clients, as in the paper's
Table 2 and Fig. 3.

Departures from the paper: of a client with many graphs some are drawn; walks have 5 steps and
similarities common bins (`data.measure.heterogeneity` says why).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.data.measure import heterogeneity as measure
from atoll.data.measure.heterogeneity import PlainGraph, jensen_shannon
from atoll.data.source import undirected_pairs

BINS = 40


@dataclass(frozen=True, eq=False)
class PairHeterogeneity:
    """Means over pairs of graphs, (K, K); NaN where there is no such pair."""

    structure: np.ndarray  # Jensen-Shannon distance, nats; the diagonal within a client
    features: np.ndarray  # Jensen-Shannon divergence, nats


def compare_graphs(
    federation: Federation, *, graphs: int = 20, walks: int = 2000, seed: int = 0
) -> PairHeterogeneity:
    """Compare the graphs of every two clients; one that classifies nodes has a single graph.

    At most `graphs` graphs of a client are drawn, by the seed and the client's own number.
    """
    embedded, similar, owner = [], [], []
    numbered = zip(federation.numbers, federation.graphs, strict=True)
    for place, (number, graph) in enumerate(numbered):
        rng = np.random.default_rng([seed, number])
        for one in some_graphs(graph, graphs, rng):
            embedded.append(one.anonymous_walks(walks, rng))
            similar.append(measure.similarity_histogram(one, BINS))
            owner.append(place)
    clients, size, nats = np.array(owner), len(federation), np.log(2)
    distance = np.sqrt(nats * jensen_shannon(np.stack(embedded)))
    divergence = nats * jensen_shannon(np.stack(similar))
    return PairHeterogeneity(_means(distance, clients, size), _means(divergence, clients, size))


def some_graphs(graph: Graph, count: int, rng: np.random.Generator) -> list[PlainGraph]:
    """Some of a client's small graphs, or its only one."""
    x, (real, ends) = measure.plain_features(graph.x), measure.real_edges(graph)
    # A client that classifies nodes has one graph, whose root might be any node.
    root = np.zeros(real.size, np.int64) if graph.root is None else graph.root.cpu().numpy()
    roots = np.unique(root[real])
    place, found = np.empty(real.size, dtype=np.int64), []
    for one in np.sort(rng.choice(roots, min(count, roots.size), replace=False)):
        nodes = np.flatnonzero((root == one) & real)
        place[nodes] = np.arange(nodes.size)
        pairs, _ = undirected_pairs(place[ends[:, root[ends[0]] == one]], nodes.size)
        # Neither labels nor roles are compared.
        found.append(PlainGraph(nodes.size, pairs, x[nodes], np.zeros(nodes.size)))
    return found


def _means(values: np.ndarray, clients: np.ndarray, size: int) -> np.ndarray:
    """Means over the pairs of different graphs of two clients, (G, G) -> (K, K)."""
    known = np.isfinite(values) & ~np.eye(len(values), dtype=bool)
    member = (clients[:, None] == np.arange(size)).astype(float)
    total = member.T @ np.where(known, values, 0.0) @ member
    pairs = member.T @ known @ member
    return np.asarray(np.divide(total, pairs, out=np.full(total.shape, np.nan), where=pairs > 0))
