"""Preparations of the whole graph before it is divided, as a protocol lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from atoll.data.client_graph import InducedSubgraphs
from atoll.data.source import Source


def largest_component(source: Source) -> Source:
    """Only the largest connected component; the lowest node number decides between equals."""
    n = source.num_nodes
    ones = np.ones(source.edges.shape[1], dtype=np.int8)
    adjacency = sp.coo_array((ones, tuple(source.edges)), shape=(n, n))
    _, label = connected_components(adjacency, directed=False)
    largest = np.flatnonzero(label == np.bincount(label).argmax())
    return InducedSubgraphs(source).part(largest)


def row_normalized(source: Source) -> Source:
    """Features divided by their row's sum (a row of zeros stays)."""
    total = np.asarray(source.x.sum(axis=1)).reshape(-1)
    scale = np.divide(1.0, total, out=np.zeros(total.shape), where=total != 0).astype(np.float32)
    if sp.issparse(source.x):
        return replace(source, x=sp.csr_array(sp.diags_array(scale) @ source.x))
    return replace(source, x=source.x * scale[:, None])


WORDS = ("cora", "citeseer", "pubmed", "computers", "photo")
"""Planetoid and Amazon: data sets whose features are counts of words."""


def words_normalized(source: Source) -> Source:
    """`row_normalized` for the data sets that FED-PUB normalises, and no others."""
    return row_normalized(source) if source.name.lower() in WORDS else source


PREPARATIONS: dict[str, Callable[[Source], Source]] = {
    "undirected": Source.undirected_simple,
    "largest-component": largest_component,
    "row-normalized": row_normalized,
    "words-normalized": words_normalized,
}
