"""Community labels of a graph: Louvain from two libraries, and METIS.

Each returns one whole number per node. Edge weights are not used: the recipes are defined on the
plain graph.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from atoll.data.source import Source


def scikit_louvain(source: Source, seed: int | None) -> np.ndarray:
    """Louvain of scikit-network with Newman's modularity at resolution 1.

    With a seed the nodes are visited in a random order; without one the answer is always the same,
    as in OpenFGL. The edges are taken as they stand: hand over `source.undirected_simple()` unless
    the degrees of the directed list are wanted.
    """
    if source.edges.shape[1] == 0:
        return np.arange(source.num_nodes)  # the library refuses a graph without edges
    from sknetwork.clustering import Louvain

    ones = np.ones(source.edges.shape[1])
    shape = (source.num_nodes, source.num_nodes)
    # The library knows csr_matrix, not csr_array.
    adjacency = sp.csr_matrix((ones, (source.edges[0], source.edges[1])), shape=shape)
    algorithm = Louvain(
        resolution=1,
        modularity="newman",
        shuffle_nodes=seed is not None,
        return_probs=False,
        return_aggregate=False,
        random_state=np.random.RandomState(seed or 0),
    )
    return np.asarray(algorithm.fit_predict(adjacency), dtype=np.int64)


def networkx_louvain(source: Source, seed: int) -> np.ndarray:
    """Louvain of python-louvain on the undirected simple graph (FedTAD, FedATH, FedGTA).

    The public codes let it draw from NumPy's global generator right after seeding that; a
    `RandomState` of the same seed is the same stream. The stream is used in the order of nodes and
    neighbours, so both go in ascending. Slow on large graphs: pure Python.
    """
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
    """METIS on the undirected simple graph with ascending neighbour lists.

    Args:
        source: The graph.
        parts: Number of parts; with few nodes per part METIS may leave some empty.
        recursive: False is k-way; None is the library's rule, recursive bisection up to 8 parts.
        seed: None is METIS's own constant seed, as in the papers.
    """
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


def groups_of(labels: np.ndarray) -> list[np.ndarray]:
    """The members of each label, ascending; labels in the order of their first member."""
    _, first, dense = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    order = np.argsort(rank[dense], kind="stable")
    return np.split(order, np.cumsum(np.bincount(rank[dense]))[:-1])
