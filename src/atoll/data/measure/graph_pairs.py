"""How different the graphs of every two clients are, by the measure of GCFL §4.1.

Structure: Jensen-Shannon distance between the anonymous-walk embeddings of two graphs. Features:
Jensen-Shannon divergence between the distributions of the cosine similarity of linked nodes in two
graphs. Both in nats, averaged over pairs of graphs, one from each of two clients, as in the paper's
Table 2 and Fig. 3.

What is not the paper's: of a client with many graphs some are drawn; walks have 5 steps and
similarities common bins (`data.measure.heterogeneity` says why).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.data.measure.heterogeneity import (
    WALK_STEPS,
    PlainGraph,
    jensen_shannon,
    plain_features,
    similarity_histogram,
)
from atoll.data.measure.structure import anonymous_walks, undirected_pairs

BINS = 40


@dataclass(frozen=True, eq=False)
class PairHeterogeneity:
    """Means over pairs of graphs. K clients; NaN where there is no such pair.

    Attributes:
        structure: Jensen-Shannon distance, nats, (K, K); the diagonal within a client.
        features: Jensen-Shannon divergence, nats, (K, K).
    """

    structure: np.ndarray
    features: np.ndarray


def compare_graphs(
    federation: Federation, *, graphs: int = 20, walks: int = 2000, seed: int = 0
) -> PairHeterogeneity:
    """Compare the graphs of every two clients.

    Args:
        federation: The clients. One that classifies nodes has a single graph.
        graphs: At most so many graphs of a client, drawn by the seed and the client's own number.
        walks: Random walks in each graph.
        seed: Of drawing and walking.
    """
    embedded, similar, owner = [], [], []
    for place, (number, graph) in enumerate(
        zip(federation.numbers, federation.graphs, strict=True)
    ):
        rng = np.random.default_rng([seed, number])
        for one in some_graphs(graph, graphs, rng):
            embedded.append(
                anonymous_walks(one.pairs, one.nodes, walks=walks, steps=WALK_STEPS, rng=rng)
            )
            similar.append(similarity_histogram(one, BINS))
            owner.append(place)
    clients = np.array(owner)
    nats = np.log(2)
    distance = np.sqrt(nats * jensen_shannon(np.stack(embedded)))
    divergence = nats * jensen_shannon(np.stack(similar))
    size = len(federation)
    return PairHeterogeneity(_means(distance, clients, size), _means(divergence, clients, size))


def some_graphs(graph: Graph, count: int, rng: np.random.Generator) -> list[PlainGraph]:
    """Some of a client's small graphs, or its only one."""
    real, x = graph.real.cpu().numpy() > 0, plain_features(graph.x)
    ends = graph.edges.cpu().numpy()
    ends = ends[:, (graph.edge_weight.cpu().numpy() != 0) & real[ends].all(axis=0)]
    # A client that classifies nodes has one graph, whose root might be any node.
    root = np.zeros(real.size, np.int64) if graph.root is None else graph.root.cpu().numpy()
    roots = np.unique(root[real])
    drawn = np.sort(rng.choice(roots, min(count, roots.size), replace=False))
    place, found = np.empty(real.size, dtype=np.int64), []
    for one in drawn:
        nodes = np.flatnonzero((root == one) & real)
        place[nodes] = np.arange(nodes.size)
        pairs = undirected_pairs(place[ends[:, root[ends[0]] == one]], nodes.size)
        # Neither labels nor roles are compared.
        found.append(PlainGraph(nodes.size, pairs, np.zeros(nodes.size), x[nodes], (0, 0, 0)))
    return found


def _means(values: np.ndarray, clients: np.ndarray, size: int) -> np.ndarray:
    """Means over the pairs of different graphs of two clients, (G, G) -> (K, K)."""
    known = np.isfinite(values) & ~np.eye(len(values), dtype=bool)
    member = (clients[:, None] == np.arange(size)).astype(float)
    total = member.T @ np.where(known, values, 0.0) @ member
    pairs = member.T @ known @ member
    return np.asarray(np.divide(total, pairs, out=np.full(total.shape, np.nan), where=pairs > 0))
