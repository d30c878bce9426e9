"""Communities grouped by their label mix (OpenFGL's "plus" recipes, seeded).

These simulate owners with similar interests: they read every label, test labels included, to build
the clients. Sizes can be very uneven.
"""

from __future__ import annotations

import numpy as np

from atoll.core.errors import DataError
from atoll.data.partition.checks import check_whole
from atoll.data.partition.communities import groups_of, metis_labels, scikit_louvain
from atoll.data.partition.packing import members, top_up
from atoll.data.source import Source


def louvain_plus(source: Source, clients: int, seed: int) -> list[np.ndarray]:
    """Louvain communities whose label histograms fall into one KMeans cluster form a client."""
    communities = groups_of(scikit_louvain(source.undirected_simple(), None))
    return _by_label_mix(source, "louvain-plus", communities, clients, seed)


def metis_plus(
    source: Source, clients: int, seed: int, *, communities: int = 100
) -> list[np.ndarray]:
    """The same with METIS parts: `communities` of them, or one per two nodes in a small graph."""
    check_whole("communities", communities, 1)
    count = min(communities, max(1, source.num_nodes // 2))
    parts = groups_of(metis_labels(source, count, None))
    return _by_label_mix(source, "metis-plus", parts, clients, seed)


def _by_label_mix(
    source: Source, recipe: str, communities: list[np.ndarray], clients: int, seed: int
) -> list[np.ndarray]:
    # Column 0 counts the unlabelled nodes, so no community has an empty histogram.
    bins = source.classes + 1
    counts = np.stack([np.bincount(source.y[ids] + 1, minlength=bins) for ids in communities])
    mixes = counts / counts.sum(axis=1, keepdims=True)
    distinct = len(np.unique(mixes, axis=0))
    if clients > distinct:
        raise DataError(
            f"partition '{recipe}' found {len(communities)} communities with {distinct} different "
            f"label mixes in '{source.name}', too few for {clients} clients; "
            f"use at most {distinct} clients"
        )
    from sklearn.cluster import KMeans

    cluster = KMeans(n_clusters=clients, random_state=seed).fit_predict(mixes)
    owner = np.empty(source.num_nodes, dtype=np.int64)
    owner[np.concatenate(communities)] = np.repeat(cluster, [len(ids) for ids in communities])
    return top_up(members(owner, clients))
