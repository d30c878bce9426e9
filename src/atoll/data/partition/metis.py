"""METIS partitions, disjoint and overlapping (FED-PUB, FedIIH, OpenFGL)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from atoll.core.errors import ConfigError, DataError
from atoll.data.partition.checks import check_flag, check_whole
from atoll.data.partition.communities import metis_labels
from atoll.data.partition.packing import members, top_up
from atoll.data.source import Source


def metis(source: Source, clients: int, seed: int, *, reseed: bool = False) -> list[np.ndarray]:
    """METIS k-way, as FED-PUB and FedIIH.

    METIS has a constant seed of its own, so every seed gives the same partition, as in the papers;
    with `reseed` the partition's seed is handed to METIS, which only matters on graphs large enough
    to be coarsened (about a thousand nodes).
    """
    check_flag("reseed", reseed)
    return _clients(source, clients, False, seed if reseed else None)


def metis_recursive(
    source: Source, clients: int, seed: int, *, reseed: bool = False
) -> list[np.ndarray]:
    """METIS as OpenFGL calls it: recursive bisection up to 8 clients, k-way above."""
    check_flag("reseed", reseed)
    return _clients(source, clients, None, seed if reseed else None)


def _clients(
    source: Source, clients: int, recursive: bool | None, seed: int | None = None
) -> list[np.ndarray]:
    return top_up(members(metis_labels(source, clients, recursive, seed), clients))


def metis_overlap(
    source: Source,
    clients: int,
    seed: int,
    *,
    per_community: int = 5,
    after: Sequence[int] | int = (),
) -> list[np.ndarray]:
    """FED-PUB's overlapping clients: each is a random half of a METIS community.

    Args:
        source: The graph.
        clients: A multiple of `per_community`.
        seed: Seed of Python's generator, used in the order community, client.
        per_community: How many clients share one community.
        after: Client counts drawn before from the same stream; FED-PUB draws 10, 30 and 50 in
            this order from one seed, so its 50 clients are `after=(10, 30)`.
    """
    check_whole("per_community", per_community, 1)
    stream = random.Random(seed)
    for count in (after,) if isinstance(after, int) else after:
        check_whole("each number in after", count, 1)
        _halves(source, count, per_community, stream)
    return _halves(source, clients, per_community, stream)


def _halves(
    source: Source, clients: int, per_community: int, stream: random.Random
) -> list[np.ndarray]:
    if clients % per_community:
        raise ConfigError(
            f"partition 'metis-overlap' puts {per_community} clients on each community, so "
            f"{clients} clients do not fit; use a multiple of {per_community}, or set per_community"
        )
    communities = clients // per_community
    if communities > source.num_nodes // 2:
        raise DataError(
            f"partition 'metis-overlap' needs two nodes per community, but '{source.name}' has "
            f"{source.num_nodes} nodes for {communities} communities; "
            f"use at most {source.num_nodes // 2 * per_community} clients"
        )
    parts = _clients(source, communities, False)
    if min(map(len, parts)) < 2:
        raise DataError(
            f"METIS left a community of one node when it cut '{source.name}' into {communities}, "
            f"and half of one node is no client; use fewer than {clients} clients"
        )
    return [
        np.array(stream.sample(ids.tolist(), len(ids) // 2))
        for ids in parts
        for _ in range(per_community)
    ]
