"""Subgraphs of one graph, cut for clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from atoll.data.client_graph import InducedSubgraphs
from atoll.data.synthetic import Archipelago, make_lagoon


def test_subgraphs_keep_edges_and_their_order_also_where_clients_overlap() -> None:
    source = make_lagoon(Archipelago(own_library=0.5), 3, 1)
    numbers = np.arange(source.edges.shape[1], dtype=np.float32)
    rng = np.random.default_rng(0)
    induced = InducedSubgraphs(replace(source, weight=numbers))
    for _ in range(5):
        ids = rng.permutation(source.num_nodes)[: source.num_nodes // 2]
        inside = np.isin(source.edges, ids).all(0)
        part = induced.part(ids)
        np.testing.assert_array_equal(part.weight, np.flatnonzero(inside))
        np.testing.assert_array_equal(ids[part.edges], source.edges[:, inside])
