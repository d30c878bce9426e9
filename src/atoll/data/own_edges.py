"""A user's edges made fit: dangling ends, self-loops, duplicates, weights and directions.

An edge is one int64 key, source * N + target, so that sorting and merging need little more memory
than the edges themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import DataError
from atoll.data.schema import Findings, OwnOptions


@dataclass(frozen=True, eq=False)
class Ends:
    """Edges as given: the indices of both ends, (E,) integers each, and weights or None."""

    source: np.ndarray
    target: np.ndarray
    weight: np.ndarray | None


def no_dangling(
    ends: Ends, n: int, sentence: Callable[[int], str], options: OwnOptions, findings: Findings
) -> Ends:
    """Drop edges to nodes that are not there, or refuse them with the sentence of the first."""
    good = (ends.source >= 0) & (ends.target >= 0) & (ends.source < n) & (ends.target < n)
    missing = int(good.size - good.sum())
    if not missing:
        return ends
    if options.dangling == "error":
        raise DataError(
            f"{sentence(int(np.argmin(good)))} ({missing} such edges in all); add the nodes, or "
            f"choose dangling = drop"
        )
    findings.count("dangling_edges", missing)
    weight = None if ends.weight is None else ends.weight[good]
    return Ends(ends.source[good], ends.target[good], weight)


def check_weights(values: np.ndarray, where: Callable[[int], str]) -> np.ndarray:
    """Edge weights as float32; refuses what is negative or not finite."""
    with np.errstate(over="ignore"):
        weight = values.astype(np.float32)
    bad = ~(np.isfinite(weight) & (weight >= 0))
    if bad.any():
        row = int(np.argmax(bad))
        raise DataError(
            f"{where(row)} has the weight {values[row]} ({int(bad.sum())} such edges in all); a "
            f"weight is a finite number, zero or more"
        )
    return weight


def clean_edges(
    ends: Ends, n: int, directed: bool, options: OwnOptions, findings: Findings
) -> tuple[np.ndarray, np.ndarray | None]:
    """Edges sorted by (source, target), loops and duplicates handled, both ways if undirected."""
    source, target, weight = ends.source.astype(np.int64), ends.target, ends.weight
    loops = source == target
    if loops.any():
        _settle("self_loops", int(loops.sum()), "self-loops", options.self_loops, findings)
        if options.self_loops == "drop":
            source, target = source[~loops], target[~loops]
            weight = None if weight is None else weight[~loops]
    keys = np.sort(source * n + target)
    repeats = int((keys[1:] == keys[:-1]).sum())
    if repeats:
        _settle("duplicate_edges", repeats, "duplicate edges", options.duplicate_edges, findings)
    keys = source * n + target
    if not directed:
        np.minimum(keys, target * np.int64(n) + source, out=keys)
    del source, target, loops
    if options.duplicate_edges == "sum" and weight is None:
        weight = np.ones(keys.size, dtype=np.float32)
    rows = keys.size
    keys, weight = _merge(keys, weight, options.duplicate_edges)
    mirrored = 0 if options.duplicate_edges == "keep" else rows - repeats - keys.size
    if mirrored:
        findings.count("mirrored_edges", mirrored)
        findings.say(f"{mirrored} edges were given in both directions and stand once")
    if not directed:
        keys, weight = _both_ways(keys, weight, n)
    edges = np.empty((2, keys.size), dtype=np.int64)
    np.divmod(keys, max(n, 1), out=(edges[0], edges[1]))
    if weight is not None and (weight == 1).all():
        weight = None
    return edges, weight


def _settle(name: str, number: int, words: str, choice: str, findings: Findings) -> None:
    """Count a finding and say what becomes of it, or refuse it."""
    done = {"drop": "dropped", "keep": "kept", "sum": "merged, their weights added"}
    if choice == "error":
        raise DataError(
            f"the graph has {number} {words}, which {name} = error refuses; remove them, or choose "
            f"{name} = drop"
        )
    findings.count(name, number)
    findings.say(f"{number} {words} were {done[choice]}")


def _merge(
    keys: np.ndarray, weight: np.ndarray | None, choice: str
) -> tuple[np.ndarray, np.ndarray | None]:
    """Sorted keys, each once unless choice is "keep"; weights follow: the first, or the sum."""
    if weight is None:
        keys.sort()
    else:
        order = np.argsort(keys, kind="stable")
        keys, weight = keys[order], weight[order]
    if choice == "keep" or keys.size == 0:
        return keys, weight
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    if weight is not None and choice == "sum":
        weight = np.add.reduceat(weight, starts, dtype=np.float64).astype(np.float32)
    elif weight is not None:
        weight = weight[starts]
    return keys[starts], weight


def _both_ways(
    keys: np.ndarray, weight: np.ndarray | None, n: int
) -> tuple[np.ndarray, np.ndarray | None]:
    low, high = np.divmod(keys, max(n, 1))
    other = low != high  # a self-loop has one direction only
    both = np.concatenate([keys, high[other] * n + low[other]])
    del low, high
    return _merge(both, None if weight is None else np.concatenate([weight, weight[other]]), "keep")
