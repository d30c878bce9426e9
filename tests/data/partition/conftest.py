"""Cora, whole and its largest component."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from atoll.data.public.registry import load_dataset
from atoll.data.source import Source


@pytest.fixture(scope="module")
def cora_source(real_data) -> Source:
    return load_dataset("cora", real_data("cora"))


@pytest.fixture(scope="module")
def cora_component(cora_source: Source) -> Source:
    """Cora's largest component, renumbered in ascending order."""
    n, (tail, head) = cora_source.num_nodes, cora_source.edges
    _, part = connected_components(sp.coo_array((np.ones(len(tail)), (tail, head)), shape=(n, n)))
    inside = part == np.bincount(part).argmax()
    number = np.cumsum(inside) - 1
    edges = number[cora_source.edges[:, inside[tail]]]
    return replace(cora_source, x=cora_source.x[inside], edges=edges, y=cora_source.y[inside])
