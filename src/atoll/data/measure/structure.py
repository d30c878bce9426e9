"""The shape of one graph, given as `undirected_pairs`: GCFL's Table 1 and anonymous walks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy.sparse as sp
from numpy import ndarray
from numpy.random import Generator as Rng
from scipy.sparse.csgraph import connected_components

STATISTICS = (
    "kurtosis of degrees",
    "mean shortest path",
    "largest component",
    "clustering coefficient",
)
"""GCFL Table 1, in its order. Its columns "real" of PTC_MR and IMDB-BINARY are reproduced exactly.

Kurtosis is Pearson's, 3 for a normal distribution, NaN for a regular graph (paper: 0). The path is
the mean over the largest component. The component is a share of all nodes. The coefficient is the
mean over nodes, 0 for a node with fewer than two neighbours.
"""


def adjacency(pairs: ndarray, nodes: int) -> sp.csr_array:
    """Return the symmetric 0/1 matrix of the pairs, (N, N)."""
    rows, columns = np.concatenate([pairs, pairs[::-1]], axis=1)
    ones = np.ones(rows.size, dtype=np.int64)
    return sp.csr_array((ones, (rows, columns)), shape=(nodes, nodes))


def structure_statistics(pairs: ndarray, nodes: int, *, path_sources: int, rng: Rng) -> ndarray:
    """Return the four numbers of `STATISTICS`. Undefined ones are NaN."""
    # Shortest paths are counted from all nodes of the largest component, or from `path_sources`
    # drawn nodes if it is larger.
    from scipy.stats import kurtosis

    matrix = adjacency(pairs, nodes)
    degrees = np.diff(matrix.indptr)
    # SciPy warns of lost precision for equal degrees instead of giving a clean NaN.
    peak = np.nan if np.ptp(degrees) == 0 else float(kurtosis(degrees, fisher=False))
    _, part = connected_components(matrix, directed=False)
    sizes = np.bincount(part)
    inside = np.flatnonzero(part == sizes.argmax())
    path = mean_path_length(matrix[inside][:, inside], path_sources, rng)
    return np.array([peak, path, sizes.max() / nodes, clustering(pairs, nodes)])


def mean_path_length(matrix: sp.csr_array, sources: int, rng: Rng) -> float:
    """Return the mean number of steps from (drawn) nodes to all others of a connected graph."""
    # All searches run together, one bit per source. SciPy's search, source by source, takes eight
    # times as long for a client of Cora, and the random graphs multiply that by twenty.
    size = matrix.shape[0]
    if size < 2:
        return float("nan")
    chosen = np.arange(size) if size <= sources else rng.choice(size, sources, replace=False)
    bit = np.arange(chosen.size, dtype=np.uint64)
    seen = np.zeros((size, -(-chosen.size // 64)), dtype=np.uint64)
    seen[chosen, bit // 64] = np.uint64(1) << (bit % 64)
    frontier, steps, total = seen, 0, 0
    while frontier.any():
        total += steps * int(np.bitwise_count(frontier).sum())
        # Every node of a connected graph has a neighbour, so no segment is empty.
        reached = np.bitwise_or.reduceat(frontier[matrix.indices], matrix.indptr[:-1], axis=0)
        frontier = reached & ~seen
        seen = seen | frontier
        steps += 1
    return float(total / (chosen.size * (size - 1)))


def clustering(pairs: ndarray, nodes: int) -> float:
    """Return the mean clustering coefficient: the connected share of a node's neighbour pairs."""
    degrees = np.bincount(pairs.ravel(), minlength=nodes)
    order = np.empty(nodes, dtype=np.int64)
    order[np.argsort(degrees, kind="stable")] = np.arange(nodes)
    # Edges point to the node of larger degree. Few edges leave a hub, which bounds the cost.
    turn = order[pairs[0]] > order[pairs[1]]
    first, last = np.where(turn, pairs[::-1], pairs)
    ones = np.ones(first.size, dtype=np.int64)
    up = sp.csr_array((ones, (first, last)), shape=(nodes, nodes))
    ends = (up @ up).multiply(up)  # (a, c): triangles a -> b -> c with a -> c
    middles = (up.T @ up).multiply(up)  # (b, c): triangles with a -> b, a -> c and b -> c
    triangles = ends.sum(axis=1) + ends.sum(axis=0) + middles.sum(axis=1)
    possible = degrees * (degrees - 1) / 2
    return float((triangles / np.maximum(possible, 1)).mean())


def random_pairs(nodes: int, count: int, rng: Rng) -> ndarray:
    """Draw a uniform random graph with these numbers of nodes and pairs (Erdős–Rényi)."""
    number = rng.choice(nodes * (nodes - 1) // 2, count, replace=False, shuffle=False)
    # Pair number h (h - 1) / 2 + l is (l, h). The root may be off by one after rounding.
    high = ((1 + np.sqrt(1 + 8 * number.astype(np.float64))) / 2).astype(np.int64)
    high -= high * (high - 1) // 2 > number
    high += high * (high + 1) // 2 <= number
    return np.stack([number - high * (high - 1) // 2, high])


@dataclass(frozen=True, eq=False)
class StructureGap:
    """A graph's `STATISTICS`, compared with random graphs of the same numbers of nodes and edges.

    Arrays are (4,) for one graph and (K, 4) for the clients of a federation. `p` is a two-sided
    Monte Carlo p-value: the share of graphs, including the real one, that are at least as far from
    the mean. It is at least 1 / (graphs + 1). GCFL publishes p-values over the graphs of a data set
    without naming the test. Here a client is one graph.
    """

    real: ndarray
    mean: ndarray
    std: ndarray
    z: ndarray  # (real - mean) / std, or NaN if all random graphs are equal
    p: ndarray


def compare_with_random(
    pairs: ndarray, nodes: int, graphs: int, path_sources: int, rng: Rng
) -> StructureGap:
    """Compare a graph with `graphs` random ones of the same size (GCFL Table 1).

    With fewer than two random graphs, std, z and p are NaN.
    """
    real = structure_statistics(pairs, nodes, path_sources=path_sources, rng=rng)
    samples = np.full((graphs, real.size), np.nan)
    for row in samples:
        other = random_pairs(nodes, pairs.shape[1], rng)
        row[:] = structure_statistics(other, nodes, path_sources=path_sources, rng=rng)
    if graphs < 2:
        unknown = np.full(real.size, np.nan)
        return StructureGap(real, samples[0] if graphs else unknown, unknown, unknown, unknown)
    mean, std = samples.mean(axis=0), samples.std(axis=0, ddof=1)
    # The mean of equal numbers may differ from them in the last digit.
    varies = std > 1e-12
    z = np.divide(real - mean, std, out=np.full(real.size, np.nan), where=varies)
    farther = np.abs(samples - mean) >= np.abs(real - mean) - 1e-12
    p = (1 + farther.sum(axis=0)) / (graphs + 1)
    return StructureGap(real, mean, std, z, np.where(np.isfinite(real + mean), p, np.nan))


@lru_cache(maxsize=8)
def walk_patterns(steps: int) -> tuple[tuple[int, ...], ...]:
    """Return all anonymous walks of `steps` steps, sorted: 1, 2, 5, 15 or 52 for 1 to 5 steps."""
    # An anonymous walk numbers nodes as they first appear: both a-b-a-c and x-y-x-z are 0102.
    walks: list[tuple[int, ...]] = [(0,)]
    for _ in range(steps):
        steps_on = ((walk, name) for walk in walks for name in range(max(walk) + 2))
        walks = [(*walk, name) for walk, name in steps_on if name != walk[-1]]
    return tuple(walks)


def anonymous_walks(pairs: ndarray, nodes: int, *, walks: int, steps: int, rng: Rng) -> ndarray:
    """Return the share of each of `walk_patterns` among random walks: the graph's embedding."""
    # Ivanov and Burnaev, "Anonymous Walk Embeddings", ICML 2018. Walks start at a uniformly drawn
    # node that has a neighbour. The shares sum to one. They are NaN for a graph without edges.
    patterns = walk_patterns(steps)
    if pairs.shape[1] == 0:
        return np.full(len(patterns), np.nan)
    matrix = adjacency(pairs, nodes)
    degrees = np.diff(matrix.indptr)
    at = rng.choice(np.flatnonzero(degrees), walks)
    path, names = np.zeros((2, walks, steps + 1), dtype=np.int64)
    path[:, 0] = at
    fresh = np.ones(walks, dtype=np.int64)  # the name of the next new node
    for step in range(1, steps + 1):
        at = matrix.indices[matrix.indptr[at] + rng.integers(0, degrees[at])]
        met = path[:, :step] == at[:, None]
        old = np.take_along_axis(names, met.argmax(axis=1)[:, None], axis=1)[:, 0]
        names[:, step] = np.where(met.any(axis=1), old, fresh)
        fresh += ~met.any(axis=1)
        path[:, step] = at
    place = (steps + 1) ** np.arange(steps, -1, -1)
    found = np.searchsorted(np.array(patterns) @ place, names @ place)
    return np.bincount(found, minlength=len(patterns)) / walks
