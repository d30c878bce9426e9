"""A user's edges, read and made fit: dangling ends, self-loops, duplicates, weights, directions.

An edge is one int64 key, source * N + target, so that sorting and merging need little more memory
than the edges themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import scipy.sparse as sp

from atoll.core.errors import DataError
from atoll.data.own.columns import Rows, as_ids, is_number, is_text, lookup
from atoll.data.own.schema import Loading, OwnReport, edge_roles, quoted, quoted_list
from atoll.data.own.tables import Part, TableFile, release_arrow_memory

NO_VALUE = -2
"""Stands for an end that was left empty, until `_refuse_no_end` has looked."""


@dataclass(frozen=True, eq=False)
class Ends:
    """Edges as given: the indices of both ends, (E,) integers each, and weights or None."""

    source: np.ndarray
    target: np.ndarray
    weight: np.ndarray | None


def no_dangling(ends: Ends, n: int, sentence: Callable[[int], str], loading: Loading) -> Ends:
    """Drop edges to nodes that are not there, or refuse them with the sentence of the first."""
    good = (ends.source >= 0) & (ends.target >= 0) & (ends.source < n) & (ends.target < n)
    missing = int(good.size - good.sum())
    if not missing:
        return ends
    if loading.options.dangling == "error":
        raise DataError(
            f"{sentence(int(np.argmin(good)))} ({missing} such edges in all); add the nodes, or "
            "leave such edges out with --own dangling=drop"
        )
    loading.report.dangling_edges += missing
    weight = None if ends.weight is None else ends.weight[good]
    return Ends(ends.source[good], ends.target[good], weight)


def check_weights(values: np.ndarray, where: Callable[[int], str]) -> np.ndarray:
    """Edge weights as float32; refuses what is negative or not finite."""
    with np.errstate(over="ignore"):
        weight = values.astype(np.float32)
    bad = ~(np.isfinite(weight) & (weight >= 0))
    if bad.any():
        row = int(np.argmax(bad))
        given = "no weight" if np.isnan(values[row]) else f"the weight {values[row]}"
        raise DataError(
            f"{where(row)} has {given} ({int(bad.sum())} such edges in all); a "
            f"weight is a finite number, zero or more"
        )
    return weight


def clean_edges(ends: Ends, n: int, loading: Loading) -> tuple[np.ndarray, np.ndarray | None]:
    """Edges sorted by (source, target), loops and duplicates handled, both ways if undirected."""
    source, target, weight = ends.source, ends.target, ends.weight
    options, report, directed = loading.options, loading.report, loading.directed
    loops = source == target
    if loops.any():
        report.self_loops = int(loops.sum())
        _settle("self_loops", report.self_loops, options.self_loops, report)
        if options.self_loops == "drop":
            source, target = source[~loops], target[~loops]
            weight = None if weight is None else weight[~loops]
    keys = _keys(source, target, n)
    repeats = _repeats(keys)
    if repeats:
        report.duplicate_edges = repeats
        _settle("duplicate_edges", repeats, options.duplicate_edges, report)
    if not directed:
        np.minimum(keys, _keys(target, source, n), out=keys)
    del source, target, loops
    if options.duplicate_edges == "sum" and weight is None:
        weight = np.ones(keys.size, dtype=np.float32)
    rows = keys.size
    keys, weight = _merge(keys, weight, options.duplicate_edges)
    mirrored = 0 if options.duplicate_edges == "keep" else rows - repeats - keys.size
    if mirrored:
        report.mirrored_edges = mirrored
        report.note(f"{mirrored} edges were given in both directions and stand once")
    if weight is not None and (weight == 1).all():
        weight = None
    if not directed:
        return _both_ways(keys, weight, n)
    edges = np.empty((2, keys.size), dtype=np.int64)
    np.divmod(keys, max(n, 1), out=(edges[0], edges[1]))
    return edges, weight


def _keys(source: np.ndarray, target: np.ndarray, n: int) -> np.ndarray:
    keys = source.astype(np.int64)
    keys *= n
    keys += target
    return keys


def _repeats(keys: np.ndarray) -> int:
    ordered = np.sort(keys)
    return int((ordered[1:] == ordered[:-1]).sum())


def _settle(name: str, number: int, choice: str, report: OwnReport) -> None:
    """Report how an option treats what was found, or refuse it."""
    words = {"self_loops": "self-loops", "duplicate_edges": "duplicate edges"}[name]
    done = {"drop": "dropped", "keep": "kept", "sum": "merged, their weights added"}
    if choice == "error":
        raise DataError(
            f"the graph has {number} {words}, which {name} = error refuses; remove them, or choose "
            f"{name} = drop"
        )
    report.note(f"{number} {words} were {done[choice]}")


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
    """Every edge low-high in both directions, sorted; a self-loop has one direction only.

    The edges come sorted by (low, high). Among the edges that leave node u, those to smaller nodes
    (u is their high end) stand before those to larger ones, so each edge's place follows from
    counts, and the doubled list is never sorted: that would need twice the memory.
    """
    small = np.int32 if max(n, 2 * keys.size) < 2**31 else np.int64
    low, high = (keys // max(n, 1)).astype(small), (keys % max(n, 1)).astype(small)
    leaving = np.bincount(low, minlength=n)
    up_before = np.concatenate([[0], np.cumsum(leaving)]).astype(small)
    numbered = np.arange(low.size, dtype=small)
    # A transposition sorts by (high, low) in linear time.
    back = sp.csr_array((numbered, high, up_before), shape=(n, n)).tocsc().data
    back = back[low[back] != high[back]]
    down_until = np.cumsum(np.bincount(high[back], minlength=n)).astype(small)
    up = down_until[low] + numbered
    down = up_before[high[back]] + numbered[: back.size]
    edges = np.empty((2, up.size + down.size), dtype=np.int64)
    edges[0, up], edges[1, up] = low, high
    edges[0, down], edges[1, down] = high[back], low[back]
    if weight is None:
        return edges, None
    doubled = np.empty(edges.shape[1], dtype=weight.dtype)
    doubled[up], doubled[down] = weight, weight[back]
    return edges, doubled


def read_edges(parts: Sequence[Part], ids: Sequence[pa.ChunkedArray], loading: Loading) -> Ends:
    """The edges of all parts, as indices over the nodes of all parts."""
    found: list[Ends] = []
    start = 0
    for part, own in zip(parts, ids, strict=True):
        ends = _part_edges(part, own, loading)
        found.append(Ends(ends.source + start, ends.target + start, ends.weight))
        start += len(own)
    release_arrow_memory()
    weighted = [ends.weight is not None for ends in found]
    if any(weighted) and not all(weighted):
        raise DataError(
            f"{parts[weighted.index(True)].edges.name} has weights and "
            f"{parts[weighted.index(False)].edges.name} has none; give weights to all or to none"
        )
    if len(found) == 1:
        return found[0]
    return Ends(
        np.concatenate([ends.source for ends in found]),
        np.concatenate([ends.target for ends in found]),
        np.concatenate([e.weight for e in found if e.weight is not None]) if weighted[0] else None,
    )


def _part_edges(part: Part, ids: pa.ChunkedArray, loading: Loading) -> Ends:
    file = part.edges
    roles = edge_roles(file.columns(), loading.schema, file.name)
    if roles.ignored:
        loading.report.note(f"{file.name}: ignored {quoted_list(roles.ignored)}")
    names, weight = [roles.source, roles.target], None
    found: list[list[np.ndarray]] = [[], []]
    weights: list[np.ndarray] = []
    if file.is_csv and not is_text(ids.type):
        ids = ids.cast(pa.large_string())
    for batch in file.batches(names, roles.weight):
        for side, name in enumerate(names):
            found[side].append(_find(batch[name], name, file, ids))
        if roles.weight:
            weights.append(_weights(batch[roles.weight], roles.weight, file))
    source, target = (np.concatenate([np.empty(0, np.int32), *side]) for side in found)
    _refuse_no_end(source, names[0], file)
    _refuse_no_end(target, names[1], file)
    if roles.weight:
        weight = check_weights(np.concatenate([np.empty(0), *weights]), file.where)

    def sentence(row: int) -> str:
        name = names[0] if source[row] < 0 else names[1]
        value = file.read([name], [name])[name][row].as_py()
        place = f"{file.where(row)}, column '{name}'"
        return f"{place} holds {quoted(value)}, not a node of {part.nodes.name}"

    return no_dangling(Ends(source, target, weight), len(ids), sentence, loading)


def _find(column: pa.ChunkedArray, name: str, file: TableFile, ids: pa.ChunkedArray) -> np.ndarray:
    missing = np.asarray(column.is_null())
    found = lookup(as_ids(column, name, Rows(file.name, file.where)), ids)
    return np.where(missing, np.int32(NO_VALUE), found) if missing.any() else found


def _refuse_no_end(side: np.ndarray, name: str, file: TableFile) -> None:
    missing = side == NO_VALUE
    if missing.any():
        raise DataError(
            f"{file.where(int(np.argmax(missing)))}, column '{name}' has no value "
            f"({int(missing.sum())} such rows in all); an edge names two nodes: fill them in, or "
            f"remove the rows"
        )


def _weights(column: pa.ChunkedArray, name: str, file: TableFile) -> np.ndarray:
    """Weights as float64, NaN where there is none."""
    if is_number(column.type):
        return np.asarray(column.cast(pa.float64(), safe=False).fill_null(np.nan))
    raise file.not_a_number(name)
