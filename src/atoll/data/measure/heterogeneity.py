"""Measures of how the clients of a federation differ, as defined in the papers.

- Labels: Jensen-Shannon divergence between the clients' label distributions.
- Edges: homophily, overall and class-wise (FedTAD, Eq. 2):
  φ(c) = |{(p, q) ∈ E: y_p = c and y_q = c}| / |{(p, q) ∈ E: y_p = c or y_q = c}|.
- Features and structure (GCFL §4.1): Jensen-Shannon divergence between distributions of the cosine
  similarity of connected nodes, and between anonymous-walk embeddings.
- Shape (GCFL Table 1): four statistics, compared with random graphs.
- Embeddings of a trained model (FedATH Fig. 1b): Wasserstein distance within a class.

`describe` takes a client as one graph. Its divergences are in bits, from 0 (equal) to 1 (disjoint).
`compare_graphs` averages over pairs of graphs in nats, as GCFL does. GCFL's code compares counts of
distinct similarities without their values. Here the bins are common to all clients. GCFL joins
walks of 3 to 7 steps. Here walks have 5 steps, so there are 52 anonymous walks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import combinations

import numpy as np
import scipy.sparse as sp
from numpy import ndarray
from scipy.special import rel_entr
from torch import Tensor

from atoll.core.errors import ConfigError, DataError, not_installed
from atoll.core.federation import Federation
from atoll.core.graph import Graph, Sparse
from atoll.data.measure.structure import (
    STATISTICS,
    StructureGap,
    anonymous_walks,
    compare_with_random,
)
from atoll.data.source import undirected_pairs

WALK_STEPS = 5  # steps of an anonymous walk; there are 52 such walks
FEATURE_BINS = 40  # bins of the feature similarity, from -1 to 1
NATS = float(np.log(2))  # nats in a bit
_CHUNK = 1 << 16  # pairs whose features are multiplied at once


@dataclass(frozen=True, eq=False)
class Heterogeneity:
    """The measures of `describe`. K clients, C classes. Undefined numbers are NaN."""

    name: str
    clients: ndarray  # each client's own number, (K,)
    names: ndarray  # of the clients, or their numbers as texts, (K,)
    class_names: ndarray  # (C,)
    nodes: ndarray  # (K,)
    roles: ndarray  # training, validation and test nodes, (K, 3)
    edges: ndarray  # undirected pairs of different nodes, (K,)
    isolated: ndarray  # nodes without a neighbour, (K,)
    mean_degree: ndarray  # (K,)
    labels: ndarray  # nodes of each class, (K, C)
    homophily: ndarray  # share of the pairs whose two nodes have the same class, (K,)
    class_homophily: ndarray  # FedTAD's Eq. 2, (K, C); NaN if no pair touches the class
    edges_total: float  # edges of the whole graph, or NaN if unknown
    edges_lost: float  # edges that no client has
    label_divergence: ndarray  # between label distributions, (K, K)
    # Between distributions of connected nodes' feature similarity, (K, K). Two clients with 450
    # pairs each, drawn from one distribution, differ by about 0.015.
    feature_divergence: ndarray
    structure_divergence: ndarray  # between anonymous-walk embeddings, (K, K)
    similarity: ndarray  # histogram of the feature similarity from -1 to 1, (K, B); rows sum to 1
    walks: ndarray  # anonymous-walk embeddings, (K, 52), in the order of `walk_patterns(5)`
    shape: StructureGap  # GCFL's Table 1 and the random graphs, (K, 4) each

    @property
    def edges_lost_share(self) -> float:
        """The share of the whole graph's edges that no client has."""
        return self.edges_lost / self.edges_total if self.edges_total else float("nan")


@dataclass(frozen=True, eq=False)
class PlainGraph:
    """One graph without padding, as NumPy arrays. Unknown labels are -1."""

    nodes: int
    pairs: ndarray
    x: ndarray | sp.csr_array
    labels: ndarray
    roles: tuple[int, int, int] = (0, 0, 0)

    def anonymous_walks(self, walks: int, rng: np.random.Generator) -> ndarray:
        """Return the graph's anonymous-walk embedding, from walks of `WALK_STEPS` steps."""
        return anonymous_walks(self.pairs, self.nodes, walks=walks, steps=WALK_STEPS, rng=rng)


def describe(
    federation: Federation,
    *,
    seed: int = 0,
    walks: int = 20_000,  # random walks per client for its anonymous-walk embedding
    random_graphs: int = 20,  # number of random graphs to compare each client with
    path_sources: int = 512,  # most nodes from which shortest paths are counted
    feature_bins: int = FEATURE_BINS,  # of the feature similarity, from -1 to 1
    shape: bool = True,  # whether to compute `STATISTICS`, the slowest part; NaN if not
) -> Heterogeneity:
    """Measure how a federation's clients differ. Weights and edge directions have no effect."""
    # Random generators depend on the client's own number, so the order of clients has no effect.
    _check(0, seed=seed, random_graphs=random_graphs)
    _check(1, walks=walks, path_sources=path_sources, feature_bins=feature_bins)
    clients, classes, numbers = _read(federation), federation.classes, federation.numbers
    labels = np.stack([np.bincount(c.labels[c.labels >= 0], minlength=classes) for c in clients])
    similarity = np.stack([similarity_histogram(client, feature_bins) for client in clients])
    unknown = np.full((5, len(STATISTICS)), np.nan)
    walked, shapes = [], []
    for number, client in zip(numbers, clients, strict=True):
        walks_rng, shape_rng = (np.random.default_rng([seed, number, use]) for use in (0, 1))
        walked.append(client.anonymous_walks(walks, walks_rng))
        graph = client.pairs, client.nodes, random_graphs, path_sources, shape_rng
        shapes.append(astuple(compare_with_random(*graph)) if shape else unknown)
    overall, by_class = zip(*(_homophily(client, classes) for client in clients), strict=True)
    nodes = np.array([client.nodes for client in clients])
    edges = np.array([client.pairs.shape[1] for client in clients])
    total, lost = _edges_lost(federation)
    return Heterogeneity(
        name=federation.name,
        clients=np.array(numbers),
        names=np.array(federation.client_names),
        class_names=np.array(federation.class_names),
        nodes=nodes,
        roles=np.array([client.roles for client in clients]),
        edges=edges,
        isolated=np.array([c.nodes - np.unique(c.pairs).size for c in clients]),
        mean_degree=2 * edges / nodes,
        labels=labels,
        homophily=np.array(overall),
        class_homophily=np.stack(by_class),
        edges_total=total,
        edges_lost=lost,
        label_divergence=jensen_shannon(labels),
        feature_divergence=jensen_shannon(similarity),
        structure_divergence=jensen_shannon(np.stack(walked)),
        similarity=similarity,
        walks=np.stack(walked),
        shape=StructureGap(*np.stack(shapes, axis=1)),
    )


def _check(least: int, **options: int) -> None:
    for option, value in options.items():
        if value < least:
            raise ConfigError(f"{option} is {value}; give a whole number from {least} on")


def jensen_shannon(counts: ndarray) -> ndarray:
    """Return the Jensen-Shannon divergence in bits between every two rows, (K, B) -> (K, K)."""
    # Rows are scaled to sum to one. A row without counts is NaN compared with every other.
    weights = np.asarray(counts, dtype=np.float64)
    total = weights.sum(axis=1, keepdims=True)
    shares = np.divide(weights, total, out=np.full_like(weights, np.nan), where=total > 0)
    found = np.empty((len(shares), len(shares)))
    for row, share in enumerate(shares):
        middle = (share + shares) / 2
        # SciPy's `jensenshannon` takes a root, which is NaN if rounding leaves -1e-17 here.
        found[row] = (rel_entr(share, middle) + rel_entr(shares, middle)).sum(axis=1) / 2
    return np.asarray(np.clip(found / NATS, 0, 1))


def _read(federation: Federation) -> list[PlainGraph]:
    """Read the clients' real nodes and edges as NumPy arrays."""
    graphs = federation.graphs
    selected = [(graph.train + graph.val + graph.test).cpu().numpy() > 0 for graph in graphs]
    # A graph stores an unknown label as zero. If *all* nodes outside every mask are of class zero,
    # they count as unlabelled. Otherwise a split excluded nodes with known labels.
    left_out = [
        graph.y.cpu().numpy()[(graph.real.cpu().numpy() > 0) & ~mask]
        for graph, mask in zip(graphs, selected, strict=True)
    ]
    unlabelled = not any(y.any() for y in left_out) and any(mask.any() for mask in selected)
    clients = []
    for graph, mask in zip(graphs, selected, strict=True):
        real, ends = real_edges(graph)
        if not real.any():
            raise DataError("a client has no nodes; remove it from the federation")
        nodes, place = int(real.sum()), np.cumsum(real) - 1
        pairs, _ = undirected_pairs(place[ends], nodes)
        y = graph.y.cpu().numpy()
        labels = np.where(mask, y, -1) if unlabelled else y
        roles = int(graph.train.sum()), int(graph.val.sum()), int(graph.test.sum())
        clients.append(PlainGraph(nodes, pairs, plain_features(graph.x)[real], labels[real], roles))
    return clients


def real_edges(graph: Graph) -> tuple[ndarray, ndarray]:
    """Return which nodes are real, (N,) bool, and the edges between them, (2, E)."""
    real = graph.real.cpu().numpy() > 0
    ends, weight = graph.edges.cpu().numpy(), graph.edge_weight.cpu().numpy()
    return real, ends[:, (weight != 0) & real[ends].all(axis=0)]


def plain_features(x: Tensor | Sparse) -> ndarray | sp.csr_array:
    """Convert features to NumPy or SciPy."""
    if isinstance(x, Sparse):
        entries = (x.values.cpu().numpy(), (x.rows.cpu().numpy(), x.columns.cpu().numpy()))
        return sp.csr_array(entries, shape=x.shape)
    return x.cpu().numpy()


def _homophily(client: PlainGraph, classes: int) -> tuple[float, ndarray]:
    """Return edge homophily, overall and class-wise (FedTAD Eq. 2), over labelled pairs."""
    first, second = client.labels[client.pairs]
    known = (first >= 0) & (second >= 0)
    first, second = first[known], second[known]
    same = first == second
    both = np.bincount(first[same], minlength=classes)
    # A pair within a class touches that class once, not twice.
    either = np.bincount(first, minlength=classes) + np.bincount(second, minlength=classes) - both
    by_class = np.divide(both, either, out=np.full(classes, np.nan), where=either > 0)
    return float(same.mean()) if same.size else float("nan"), by_class


def similarity_histogram(client: PlainGraph, bins: int) -> ndarray:
    """Return shares of connected pairs by their cosine similarity (GCFL §4.1), (bins,)."""
    # Pairs with a node without any features have no cosine and are excluded.
    x = client.x.astype(np.float64)
    length = np.sqrt(np.asarray((x * x).sum(axis=1)))  # `*` is element by element for both kinds
    found = np.zeros(bins)
    for start in range(0, client.pairs.shape[1], _CHUNK):
        first, second = client.pairs[:, start : start + _CHUNK]
        scale = length[first] * length[second]
        products = x[first] * x[second]
        cosine = np.asarray(products.sum(axis=1))[scale > 0] / scale[scale > 0]
        # Round, so that 0 and 1, the only values of one-hot features, fall into definite bins.
        place = np.floor(np.round((cosine + 1) / 2 * bins, 6)).astype(np.int64)
        found += np.bincount(np.clip(place, 0, bins - 1), minlength=bins)
    return found / found.sum() if found.any() else np.full(bins, np.nan)


def _edges_lost(federation: Federation) -> tuple[float, float]:
    """Return the number of edges of the whole graph, and of those that no client has.

    In an undirected graph both directions count as one edge. Unknown numbers are NaN.
    """
    total = federation.about.get("edges_total")
    if total is None:
        return float("nan"), float("nan")
    owned = np.concatenate([graph.ids.cpu().numpy() for graph in federation.graphs])
    ends = [graph.ids.long()[graph.edges].cpu().numpy() for graph in federation.graphs]
    source, target = np.concatenate(ends, axis=1)
    width = int(owned.max(initial=0)) + 1
    keys = source * width + target
    if np.unique(owned).size < owned.size:
        # If a node belongs to two clients, an edge may, too: count it once.
        keys = np.unique(keys)
    there, back = np.divmod(keys, width)
    if not np.array_equal(np.unique(keys), np.unique(back * width + there)):
        return float(total), float(total - keys.size)
    # Self-loops are never lost, and are not pairs.
    return (total - int((there == back).sum())) / 2, (total - keys.size) / 2


@dataclass(frozen=True, eq=False)
class PairHeterogeneity:
    """Mean differences between graphs of every two of K clients, (K, K). NaN without a pair.

    The diagonal compares the different graphs of one client.
    """

    structure: ndarray  # Jensen-Shannon distance: the root of the divergence in nats
    features: ndarray  # Jensen-Shannon divergence, nats


def compare_graphs(
    federation: Federation, *, graphs: int = 20, walks: int = 2000, seed: int = 0
) -> PairHeterogeneity:
    """Return mean differences between the graphs of every two clients (GCFL Table 2).

    At most `graphs` graphs of each client are drawn.
    """
    embedded, similar, owner = [], [], []
    numbered = zip(federation.numbers, federation.graphs, strict=True)
    for place, (number, graph) in enumerate(numbered):
        rng = np.random.default_rng([seed, number])
        for one in some_graphs(graph, graphs, rng):
            embedded.append(one.anonymous_walks(walks, rng))
            similar.append(similarity_histogram(one, FEATURE_BINS))
            owner.append(place)
    clients, size = np.array(owner), len(federation)
    distance = np.sqrt(NATS * jensen_shannon(np.stack(embedded)))
    divergence = NATS * jensen_shannon(np.stack(similar))
    return PairHeterogeneity(_means(distance, clients, size), _means(divergence, clients, size))


def some_graphs(graph: Graph, count: int, rng: np.random.Generator) -> list[PlainGraph]:
    """Draw up to `count` of a client's small graphs, or return its only graph."""
    x, (real, ends) = plain_features(graph.x), real_edges(graph)
    # A client that classifies nodes has one graph, whose root may be any node.
    root = np.zeros(real.size, np.int64) if graph.root is None else graph.root.cpu().numpy()
    roots = np.unique(root[real])
    place, found = np.empty(real.size, dtype=np.int64), []
    for one in np.sort(rng.choice(roots, min(count, roots.size), replace=False)):
        nodes = np.flatnonzero((root == one) & real)
        place[nodes] = np.arange(nodes.size)
        pairs, _ = undirected_pairs(place[ends[:, root[ends[0]] == one]], nodes.size)
        # Labels and roles are not compared.
        found.append(PlainGraph(nodes.size, pairs, x[nodes], np.zeros(nodes.size)))
    return found


def _means(values: ndarray, clients: ndarray, size: int) -> ndarray:
    """Return means over the pairs of different graphs of every two clients, (K, K).

    `values` has a number for each pair of graphs, and `clients` the client of each graph.
    """
    known = np.isfinite(values) & ~np.eye(len(values), dtype=bool)
    member = (clients[:, None] == np.arange(size)).astype(float)
    total = member.T @ np.where(known, values, 0.0) @ member
    pairs = member.T @ known @ member
    return np.asarray(np.divide(total, pairs, out=np.full(total.shape, np.nan), where=pairs > 0))


def embedding_distance(
    embeddings: Sequence[ndarray],  # (N_k, D) for each client
    labels: Sequence[ndarray],  # (N_k,) for each client; negative labels are unknown
    *,
    samples: int = 200,  # most nodes per client and class, drawn without replacement
    order: int = 1,  # 1: earth mover's distance; 2: the root of the mean squared distance
    seed: int = 0,
) -> float:
    """Return the mean Wasserstein distance within a class between clients (FedATH, Fig. 1b).

    It is NaN if no two clients have a class in common. The paper names neither the order nor the
    ground distance. Here the default order is 1, and the ground distance is Euclidean.
    """
    if order not in (1, 2) or samples < 1:
        advice = "order is 1 or 2, samples at least 1"
        raise ConfigError(f"order is {order} and samples is {samples}; {advice}")
    if len(embeddings) != len(labels):
        raise DataError(f"{len(embeddings)} arrays of embeddings came with {len(labels)} of labels")
    groups: dict[int, list[ndarray]] = {}
    for number, (vectors, classes) in enumerate(zip(embeddings, labels, strict=True)):
        if vectors.shape[:1] != classes.shape:
            shapes = f"embeddings of shape {vectors.shape} and labels of shape {classes.shape}"
            raise DataError(f"client {number} has {shapes}; give one label per row")
        for label in np.unique(classes[classes >= 0]).tolist():
            rows = np.flatnonzero(classes == label)
            if rows.size > samples:
                rng = np.random.default_rng([seed, number, label])
                rows = rng.choice(rows, samples, replace=False)
            groups.setdefault(label, []).append(np.asarray(vectors[rows], dtype=np.float64))
    pairs = [pair for members in groups.values() for pair in combinations(members, 2)]
    if not pairs:
        return float("nan")
    try:
        import ot
    except ImportError as error:
        raise not_installed("the Wasserstein distance", "POT", "report") from error
    metric = "euclidean" if order == 1 else "sqeuclidean"
    costs = (ot.dist(first, second, metric=metric) for first, second in pairs)
    return float(np.mean([np.power(ot.emd2([], [], cost), 1 / order) for cost in costs]))
