"""The two partitions without a model behind them: by chance, and by a column of the data."""

from __future__ import annotations

import numpy as np

from atoll.core.errors import ConfigError, DataError
from atoll.data.partition.packing import members
from atoll.data.source import GraphSet, Source


def random(source: Source | GraphSet, clients: int, seed: int) -> list[np.ndarray]:
    """Every client gets the same number, give or take one, drawn uniformly."""
    order = np.random.default_rng(seed).permutation(len(source.y))
    return [np.sort(ids) for ids in np.array_split(order, clients)]


def column(
    source: Source, clients: int | None, seed: int, *, name: str | None = None
) -> list[np.ndarray]:
    """One client for each value of a node column, values ascending; the seed has no effect."""
    del seed
    there = ", ".join(sorted(source.columns)) or "none"
    if not name or name not in source.columns:
        raise ConfigError(
            f"partition 'column:{name or 'NAME'}' needs a node column of '{source.name}'; "
            f"its columns are: {there}"
        )
    values = np.asarray(source.columns[name])
    missing = _missing(values)
    if missing.any():
        raise DataError(
            f"column '{name}' of '{source.name}' has no value at node "
            f"{int(np.flatnonzero(missing)[0])} ({int(missing.sum())} in all); "
            f"fill it, every node needs a client"
        )
    if values.dtype == object:
        values = values.astype(str)
    distinct, owner = np.unique(values, return_inverse=True)
    if clients is not None and clients != len(distinct):
        raise ConfigError(
            f"column '{name}' of '{source.name}' has {len(distinct)} values, so it gives "
            f"{len(distinct)} clients, not {clients!r}; leave the number out or use that one"
        )
    return members(owner, len(distinct))


def _missing(values: np.ndarray) -> np.ndarray:
    """True where a value is None or NaN; NaN is the one value that differs from itself."""
    none = np.array([value is None for value in values], dtype=bool)
    not_itself = np.asarray(values != values, dtype=bool)  # noqa: PLR0124
    return np.asarray(none | not_itself)
