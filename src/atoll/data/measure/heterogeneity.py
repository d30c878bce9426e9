"""What makes the clients of a federation differ, by the papers' own measures.

- Labels: Jensen-Shannon divergence between the clients' label distributions.
- Edges: homophily, overall and class-wise (FedTAD, Eq. 2):
  φ(c) = |{(p, q) ∈ E: y_p = c and y_q = c}| / |{(p, q) ∈ E: y_p = c or y_q = c}|.
- Features and structure (GCFL §4.1): Jensen-Shannon divergence between distributions of the cosine
  similarity of connected nodes, and between anonymous-walk embeddings.
- Shape (GCFL Table 1): four statistics next to those of random graphs.
- Embeddings of a trained model (FedATH Fig. 1b): Wasserstein distance within a class.

All divergences are in bits, from 0 (equal) to 1 (nothing in common), so that they can be compared.
Departures from GCFL's code: it lists the counts of distinct similarities without saying which
similarity each belongs to, so that unlike values are compared; here the bins are common to all
clients. It averages over pairs of graphs; here a client is one graph (`data.measure.graph_pairs`
compares the graphs of clients that have many, as the paper does). It joins walks of 3 to 7 steps;
here there are 5 steps, hence 52 anonymous walks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import scipy.sparse as sp
from scipy.special import rel_entr
from torch import Tensor

from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, Sparse
from atoll.data.measure.structure import (
    Comparison,
    anonymous_walks,
    compare_with_random,
    undirected_pairs,
)

WALK_STEPS = 5
"""Steps of an anonymous walk; there are 52 such walks."""

_NATS = float(np.log(2))  # of a bit
_CHUNK = 1 << 16  # pairs whose features are multiplied at once


@dataclass(frozen=True, eq=False)
class Heterogeneity:
    """What `describe` finds. K clients, C classes; NaN where a number is not defined.

    Attributes:
        name: The data set's name.
        clients: Each client's own number, (K,).
        nodes: Nodes, (K,).
        roles: Training, validation and test nodes, (K, 3).
        edges: Undirected pairs of different nodes, (K,).
        isolated: Nodes without a neighbour, (K,).
        mean_degree: Mean number of neighbours, (K,).
        labels: Nodes of each class, (K, C).
        homophily: Share of the pairs whose nodes have one class, (K,).
        class_homophily: FedTAD's Eq. 2, (K, C); NaN where no pair touches the class.
        edges_total: Edges of the whole graph; NaN when the federation does not know.
        edges_lost: Those that no client has.
        label_divergence: Between label distributions, (K, K).
        feature_divergence: Between distributions of connected nodes' feature similarity, (K, K).
            Two clients with 450 pairs each, drawn from one distribution, differ by about 0.015.
        structure_divergence: Between anonymous-walk embeddings, (K, K).
        similarity: Histogram of the feature similarity from -1 to 1, (K, B), rows summing to one.
        walks: Anonymous-walk embeddings, (K, 52), in the order of `walk_patterns(5)`.
        shape: GCFL's Table 1 and the random graphs, (K, 4) each.
    """

    name: str
    clients: np.ndarray
    nodes: np.ndarray
    roles: np.ndarray
    edges: np.ndarray
    isolated: np.ndarray
    mean_degree: np.ndarray
    labels: np.ndarray
    homophily: np.ndarray
    class_homophily: np.ndarray
    edges_total: float
    edges_lost: float
    label_divergence: np.ndarray
    feature_divergence: np.ndarray
    structure_divergence: np.ndarray
    similarity: np.ndarray
    walks: np.ndarray
    shape: Comparison

    @property
    def edges_lost_share(self) -> float:
        """Share of the whole graph's edges that no client has."""
        return self.edges_lost / self.edges_total if self.edges_total else float("nan")

    @property
    def gcfl_structure(self) -> np.ndarray:
        """Structure heterogeneity in the unit of GCFL's Table 2: JS distance in nats, (K, K)."""
        return np.asarray(np.sqrt(_NATS * self.structure_divergence))

    @property
    def gcfl_feature(self) -> np.ndarray:
        """Feature heterogeneity in the unit of GCFL's Table 2: JS divergence in nats, (K, K)."""
        return np.asarray(_NATS * self.feature_divergence)


@dataclass(frozen=True, eq=False)
class PlainGraph:
    """One graph without padding, as NumPy arrays; labels are -1 where unknown."""

    nodes: int
    pairs: np.ndarray
    labels: np.ndarray
    x: np.ndarray | sp.csr_array
    roles: tuple[int, int, int]


def describe(
    federation: Federation,
    *,
    seed: int = 0,
    walks: int = 20_000,
    random_graphs: int = 20,
    path_sources: int = 512,
    feature_bins: int = 40,
) -> Heterogeneity:
    """Measure how the clients of a federation differ.

    Draws come from generators keyed by `seed` and the client's own number, so that the order of the
    clients does not matter.

    Args:
        federation: The clients; their weights and edge directions are not looked at.
        seed: Seed of the walks, the random graphs and the drawn sources.
        walks: Random walks per client for its anonymous-walk embedding.
        random_graphs: Random graphs that each client is compared with; 0 for none.
        path_sources: Nodes from which shortest paths are counted; all when there are no more.
        feature_bins: Bins of the feature similarity, from -1 to 1.
    """
    _check(0, seed=seed, random_graphs=random_graphs)
    _check(1, walks=walks, path_sources=path_sources, feature_bins=feature_bins)
    clients, classes = _read(federation), federation.classes
    numbered = list(zip(federation.numbers, clients, strict=True))
    labels = np.stack([np.bincount(c.labels[c.labels >= 0], minlength=classes) for c in clients])
    similarity = np.stack([similarity_histogram(client, feature_bins) for client in clients])
    walked = np.stack([_walk(client, walks, _rng(seed, number, 0)) for number, client in numbered])
    homophily = [_homophily(client, classes) for client in clients]
    shapes = [
        _shape(client, random_graphs, path_sources, _rng(seed, number, 1))
        for number, client in numbered
    ]
    nodes = np.array([client.nodes for client in clients])
    edges = np.array([client.pairs.shape[1] for client in clients])
    total, lost = _edges_lost(federation)
    return Heterogeneity(
        name=federation.name,
        clients=np.array(federation.numbers),
        nodes=nodes,
        roles=np.array([client.roles for client in clients]),
        edges=edges,
        isolated=np.array([c.nodes - np.unique(c.pairs).size for c in clients]),
        mean_degree=2 * edges / nodes,
        labels=labels,
        homophily=np.array([overall for overall, _ in homophily]),
        class_homophily=np.stack([by_class for _, by_class in homophily]),
        edges_total=total,
        edges_lost=lost,
        label_divergence=jensen_shannon(labels),
        feature_divergence=jensen_shannon(similarity),
        structure_divergence=jensen_shannon(walked),
        similarity=similarity,
        walks=walked,
        shape=_stack(shapes),
    )


def _check(least: int, **options: int) -> None:
    for option, value in options.items():
        if value < least:
            raise ConfigError(f"{option} is {value}; give a whole number from {least} on")


def _rng(seed: int, number: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, number, purpose])


def jensen_shannon(counts: np.ndarray) -> np.ndarray:
    """Jensen-Shannon divergence in bits between every two rows, (K, B) -> (K, K).

    Rows are scaled to sum to one; a row without any count is NaN against every other.
    """
    weights = np.asarray(counts, dtype=np.float64)
    total = weights.sum(axis=1, keepdims=True)
    shares = np.divide(weights, total, out=np.full_like(weights, np.nan), where=total > 0)
    found = np.empty((len(shares), len(shares)))
    for row, share in enumerate(shares):
        middle = (share + shares) / 2
        # SciPy's `jensenshannon` takes a root, which is NaN when rounding leaves -1e-17 here.
        found[row] = (rel_entr(share, middle) + rel_entr(shares, middle)).sum(axis=1) / 2
    return np.asarray(np.clip(found / _NATS, 0, 1))


def _read(federation: Federation) -> list[PlainGraph]:
    """The clients' real nodes and edges as NumPy arrays."""
    selected = [
        (graph.train + graph.val + graph.test).cpu().numpy() > 0 for graph in federation.graphs
    ]
    # A graph stores an unknown label as zero. Nodes outside every mask that are *all* of class zero
    # are taken as unlabelled; if some are not, a split left out nodes whose labels are known.
    left_out = np.concatenate(
        [
            graph.y.cpu().numpy()[(graph.real.cpu().numpy() > 0) & ~mask]
            for graph, mask in zip(federation.graphs, selected, strict=True)
        ]
    )
    unlabelled = not left_out.any() and any(mask.any() for mask in selected)
    return [
        _read_client(graph, mask if unlabelled else np.ones_like(mask))
        for graph, mask in zip(federation.graphs, selected, strict=True)
    ]


def _read_client(graph: Graph, known: np.ndarray) -> PlainGraph:
    real = graph.real.cpu().numpy() > 0
    place = np.cumsum(real) - 1
    ends, weight = graph.edges.cpu().numpy(), graph.edge_weight.cpu().numpy()
    ends = ends[:, (weight != 0) & real[ends].all(axis=0)]
    labels = np.where(known, graph.y.cpu().numpy(), -1)
    nodes = int(real.sum())
    if nodes == 0:
        raise DataError("a client has no nodes; leave it out of the federation")
    return PlainGraph(
        nodes=nodes,
        pairs=undirected_pairs(place[ends], nodes),
        labels=labels[real],
        x=plain_features(graph.x)[real],
        roles=(int(graph.train.sum()), int(graph.val.sum()), int(graph.test.sum())),
    )


def plain_features(x: Tensor | Sparse) -> np.ndarray | sp.csr_array:
    """Features as NumPy or SciPy has them."""
    if isinstance(x, Sparse):
        entries = (x.values.cpu().numpy(), (x.rows.cpu().numpy(), x.columns.cpu().numpy()))
        return sp.csr_array(entries, shape=x.shape)
    return x.cpu().numpy()


def _walk(client: PlainGraph, walks: int, rng: np.random.Generator) -> np.ndarray:
    return anonymous_walks(client.pairs, client.nodes, walks=walks, steps=WALK_STEPS, rng=rng)


def _shape(client: PlainGraph, graphs: int, sources: int, rng: np.random.Generator) -> Comparison:
    return compare_with_random(
        client.pairs, client.nodes, graphs=graphs, path_sources=sources, rng=rng
    )


def _stack(shapes: list[Comparison]) -> Comparison:
    return Comparison(
        **{f.name: np.stack([getattr(one, f.name) for one in shapes]) for f in fields(Comparison)}
    )


def _homophily(client: PlainGraph, classes: int) -> tuple[float, np.ndarray]:
    """Edge homophily, overall and class-wise (FedTAD Eq. 2), over pairs with two known labels."""
    first, second = client.labels[client.pairs]
    known = (first >= 0) & (second >= 0)
    first, second = first[known], second[known]
    same = first == second
    both = np.bincount(first[same], minlength=classes)
    # A pair within a class touches that class once, not twice.
    either = np.bincount(first, minlength=classes) + np.bincount(second, minlength=classes) - both
    by_class = np.divide(both, either, out=np.full(classes, np.nan), where=either > 0)
    return float(same.mean()) if same.size else float("nan"), by_class


def similarity_histogram(client: PlainGraph, bins: int) -> np.ndarray:
    """Shares of the cosine similarities of connected nodes' features (GCFL §4.1), (B,).

    Pairs with a node that has no features at all have no cosine and are left out.
    """
    x = client.x.astype(np.float64)
    length = np.sqrt(np.asarray((x * x).sum(axis=1)))  # `*` is element by element for both kinds
    found = np.zeros(bins)
    for start in range(0, client.pairs.shape[1], _CHUNK):
        first, second = client.pairs[:, start : start + _CHUNK]
        scale = length[first] * length[second]
        products = x[first] * x[second]
        cosine = np.asarray(products.sum(axis=1))[scale > 0] / scale[scale > 0]
        # Rounded, so that 0 and 1, all that one-hot features give, fall on one side of their bins.
        place = np.floor(np.round((cosine + 1) / 2 * bins, 6)).astype(np.int64)
        found += np.bincount(np.clip(place, 0, bins - 1), minlength=bins)
    return found / found.sum() if found.any() else np.full(bins, np.nan)


def _edges_lost(federation: Federation) -> tuple[float, float]:
    """Edges of the whole graph and those that no client has; pairs when both directions stand."""
    total = federation.about.get("edges_total")
    if total is None:
        return float("nan"), float("nan")
    ids = [graph.ids.cpu().numpy().astype(np.int64) for graph in federation.graphs]
    ends = [i[graph.edges.cpu().numpy()] for i, graph in zip(ids, federation.graphs, strict=True)]
    source, target = np.concatenate(ends, axis=1)
    owned = np.concatenate(ids)
    width = int(owned.max(initial=0)) + 1
    keys = source * width + target
    if np.unique(owned).size < owned.size:
        # A partition that gives a node to two clients may give them one edge too: count it once.
        keys = np.unique(keys)
    there, back = np.divmod(keys, width)
    if not np.array_equal(np.unique(keys), np.unique(back * width + there)):
        return float(total), float(total - keys.size)
    # No self-loop is ever lost, and none is a pair.
    return (total - int((there == back).sum())) / 2, (total - keys.size) / 2


def embedding_distance(
    embeddings: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    *,
    samples: int = 200,
    order: int = 1,
    seed: int = 0,
) -> float:
    """Average Wasserstein distance between embeddings of one class at different clients.

    FedATH, Fig. 1b; the mean over all classes and all pairs of clients that both have the class.
    The paper names neither the order nor the ground distance: here Euclidean, order 1.

    Args:
        embeddings: One array per client, (N_k, D).
        labels: One array per client, (N_k,); negative labels are unknown and left out.
        samples: At most this many nodes per client and class, drawn without replacement.
        order: 1 for the earth mover's distance, 2 for the root of the mean squared distance.
        seed: Seed of the drawing.

    Returns:
        The distance; NaN when no class occurs at two clients.
    """
    if order not in (1, 2) or samples < 1:
        raise ConfigError(
            f"order is {order} and samples is {samples}; order is 1 or 2, samples at least 1"
        )
    if len(embeddings) != len(labels):
        raise DataError(f"{len(embeddings)} arrays of embeddings came with {len(labels)} of labels")
    groups: dict[int, list[np.ndarray]] = {}
    for number, (vectors, classes) in enumerate(zip(embeddings, labels, strict=True)):
        if vectors.shape[:1] != classes.shape:
            raise DataError(
                f"client {number} has embeddings of shape {vectors.shape} and labels of shape "
                f"{classes.shape}; give one label per row"
            )
        for label in np.unique(classes[classes >= 0]).tolist():
            rows = np.flatnonzero(classes == label)
            if rows.size > samples:
                rng = np.random.default_rng([seed, number, label])
                rows = rng.choice(rows, samples, replace=False)
            groups.setdefault(label, []).append(np.asarray(vectors[rows], dtype=np.float64))
    distances = [
        _wasserstein(first, second, order)
        for members in groups.values()
        for place, first in enumerate(members)
        for second in members[place + 1 :]
    ]
    return float(np.mean(distances)) if distances else float("nan")


def _wasserstein(first: np.ndarray, second: np.ndarray, order: int) -> float:
    try:
        import ot
    except ImportError as error:
        raise ConfigError(
            "the Wasserstein distance needs the package POT, which is not installed; "
            "install it with: pip install 'atoll-fgl[report]'"
        ) from error
    cost = ot.dist(first, second, metric="euclidean" if order == 1 else "sqeuclidean")
    return float(np.power(ot.emd2([], [], cost), 1 / order))
