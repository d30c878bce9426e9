"""Sets of small graphs, made by hand."""

from __future__ import annotations

import numpy as np

from atoll.data.source import GraphSet


def toy_set(
    graphs: int, features: int = 4, classes: int = 2, seed: int = 0, name: str = "toys"
) -> GraphSet:
    """Cycles of 3 to 7 nodes, with a mean feature that depends on the class."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 8, graphs)
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    y = np.arange(graphs) % classes
    graph = np.repeat(np.arange(graphs), sizes)
    inside = np.arange(ptr[-1]) - ptr[graph]
    following = ptr[graph] + (inside + 1) % sizes[graph]
    one_way = np.stack([np.arange(ptr[-1]), following])
    edges = np.concatenate([one_way, one_way[::-1]], axis=1)
    column = (rng.integers(0, features, ptr[-1]) + y[graph]) % features
    x = np.eye(features, dtype=np.float32)[column]
    return GraphSet(name, x, edges[:, rng.permutation(edges.shape[1])], ptr, y, classes)
