"""GCFL's clients of one data set: chunks of it."""

from __future__ import annotations

import numpy as np

from atoll.core.errors import ConfigError
from atoll.data.partition.checks import check_compat, check_flag
from atoll.data.partition.packing import members
from atoll.data.source import GraphSet

CHUNK = 50  # graphs that GCFL hands out in file order before it draws


def gcfl_oneds(
    source: GraphSet,
    clients: int,
    seed: int,
    *,
    overlap: bool = False,
    compat: str | None = None,
) -> list[np.ndarray]:
    """Up to 50 graphs each in file order, the remaining graphs to clients at random.

    TU files are often sorted by class, so the first chunk makes label skew.

    Args:
        source: The set of graphs.
        clients: Number of clients.
        seed: Seed of NumPy's old generator; GCFL uses 123.
        overlap: Every client draws 50 to 149 graphs of the whole set on its own instead.
        compat: "replacement" draws them with replacement, as GCFL does, so that one graph can be
            in a client twice, for training and for testing.
    """
    check_flag("overlap", overlap)
    check_compat(compat, "replacement")
    if compat and not overlap:
        raise ConfigError("compat 'replacement' of partition 'gcfl-oneds' needs overlap = true")
    stream = np.random.RandomState(seed)
    count = source.num_graphs
    if overlap:
        sizes = stream.randint(50, 150, size=clients)
        if compat:
            return [stream.choice(count, size=size, replace=True) for size in sizes]
        return [stream.choice(count, size=min(size, count), replace=False) for size in sizes]
    chunk = min(CHUNK, count // clients)
    handed_out = np.repeat(np.arange(clients), chunk)
    drawn = stream.randint(0, clients, size=count - len(handed_out))
    return members(np.concatenate([handed_out, drawn]), clients)
