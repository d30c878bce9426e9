"""Reading and cleaning of a user's edges: dangling ends, loops, duplicates, weights, directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from atoll.core.errors import DataError, counted
from atoll.data.own.columns import Column, as_ids, first, is_number, is_text, lookup
from atoll.data.own.schema import Loading, edge_roles, quoted
from atoll.data.own.tables import Part

Weighted = tuple[np.ndarray, np.ndarray | None]
"""Edges, as keys or as pairs, and their weights or None."""
JOIN = "join the training graph with --joined if it has them"
NO_VALUE = -2  # marks an empty end, until all rows are counted


@dataclass(frozen=True, eq=False)
class Ends:
    """Edges as given: the indices of both ends, (E,) integers each, and weights or None."""

    source: np.ndarray
    target: np.ndarray
    weight: np.ndarray | None

    def only(self, keep: np.ndarray) -> Ends:
        """Return the edges where `keep` is true."""
        weight = None if self.weight is None else self.weight[keep]
        return Ends(self.source[keep], self.target[keep], weight)


def no_dangling(ends: Ends, n: int, sentence: Callable[[int], str], loading: Loading) -> Ends:
    """Drop edges to missing nodes, or refuse them with the sentence about the first one."""
    good = (ends.source >= 0) & (ends.target >= 0) & (ends.source < n) & (ends.target < n)
    if not (missing := int(good.size - good.sum())):
        return ends
    if loading.options.dangling == "error":
        advice = "add the nodes, or drop such edges with --own dangling=drop"
        if loading.joined is not None:
            advice = f"add the nodes, or {'remove these edges' if loading.joined else JOIN}"
        raise DataError(f"{sentence(first(~good))} ({missing} such edges in all); {advice}")
    loading.report.dangling_edges += missing
    return ends.only(good)


def check_weights(values: np.ndarray, where: Callable[[int], str]) -> np.ndarray:
    """Convert edge weights to float32. Refuse negative, infinite and missing ones."""
    with np.errstate(over="ignore"):
        weight = values.astype(np.float32)
    bad = ~(np.isfinite(weight) & (weight >= 0))
    if bad.any():
        row = first(bad)
        given = "no weight" if np.isnan(values[row]) else f"the weight {values[row]}"
        advice = "a weight is a finite number, zero or more"
        raise DataError(f"{where(row)} has {given} ({int(bad.sum())} such edges in all); {advice}")
    return weight


def clean_edges(ends: Ends, n: int, loading: Loading) -> Weighted:
    """Return edges, sorted by (source, target), and weights, or None if all are one.

    The schema decides on loops, duplicates and directions.
    """
    report, schema = loading.report, loading.schema
    looped, repeated = schema.self_loops or "drop", schema.duplicate_edges or "drop"
    loops = ends.source == ends.target
    _settle("self_loops", int(loops.sum()), looped, loading)
    if looped == "drop" and loops.any():
        ends = ends.only(~loops)
    weight, keys = ends.weight, _keys(ends.source, ends.target, n)
    ordered = np.sort(keys)
    repeats = int((ordered[1:] == ordered[:-1]).sum())
    _settle("duplicate_edges", repeats, repeated, loading)
    if not schema.directed:
        np.minimum(keys, _keys(ends.target, ends.source, n), out=keys)
    del ends, loops, ordered
    if repeated == "count" or (repeated == "sum" and weight is None):
        weight = np.ones(keys.size, dtype=np.float32)
    rows = keys.size
    keys, weight = _sort(keys, weight)
    if repeated != "keep" and rows:
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        keys = keys[starts]
        if weight is not None and repeated in ("sum", "count"):
            weight = np.add.reduceat(weight, starts, dtype=np.float64).astype(np.float32)
        elif weight is not None:
            weight = weight[starts]
    mirrored = 0 if repeated == "keep" else rows - repeats - keys.size
    if mirrored:
        edges_were = counted(mirrored, "edge was", "edges were")
        report.note(f"{edges_were} given in both directions, and only one direction counts")
    if weight is not None and (weight == 1).all():
        weight = None
    if not schema.directed:  # a self-loop has one direction only
        back = keys % max(n, 1) * n + keys // max(n, 1)
        other = back != keys
        weight = None if weight is None else np.concatenate([weight, weight[other]])
        keys, weight = _sort(np.concatenate([keys, back[other]]), weight)
        del back, other
    edges = np.empty((2, keys.size), dtype=np.int64)
    np.divmod(keys, max(n, 1), out=(edges[0], edges[1]))
    return edges, weight


def _keys(source: np.ndarray, target: np.ndarray, n: int) -> np.ndarray:
    """Encode each edge as the number source * n + target, so that sorting needs little memory."""
    keys = source.astype(np.int64)
    keys *= n
    keys += target
    return keys


def _settle(name: str, number: int, choice: str, loading: Loading) -> None:
    """Report how an option treats irregular edges, or refuse them."""
    word = {"self_loops": "self-loop", "duplicate_edges": "duplicate edge"}[name]
    done = {"drop": "dropped", "keep": "kept", "sum": "merged, their weights added"}
    done["count"] = "merged, and their number is the weight"
    if number and choice == "error":
        choose = f", or choose {name} = drop" if loading.joined is None else ""
        advice = f"remove them{choose}"
        has = f"the graph has {counted(number, word)}"
        raise DataError(f"{has}, which {name} = error refuses; {advice}")
    if number:
        loading.report.note(counted(number, f"{word} was", f"{word}s were") + f" {done[choice]}")


def _sort(keys: np.ndarray, weight: np.ndarray | None) -> Weighted:
    if weight is None:
        keys.sort()  # in place, because a copy of all edges is large
        return keys, None
    order = np.argsort(keys, kind="stable")
    return keys[order], weight[order]


def read_edges(
    parts: Sequence[Part],
    ids: Sequence[pa.ChunkedArray],
    loading: Loading,
    places: Sequence[np.ndarray] | None = None,
) -> Ends:
    """Read the edges of all parts. The nodes of all parts are numbered in one sequence.

    With `places`, the j-th id of part i gets the number places[i][j] instead.
    """
    found: list[Ends] = []
    start = 0
    for number, (part, own) in enumerate(zip(parts, ids, strict=True)):
        ends = _part_edges(part, own, loading)
        if places is not None:
            at = places[number]
            ends = Ends(at[ends.source], at[ends.target], ends.weight)
        elif start:
            ends = Ends(ends.source + start, ends.target + start, ends.weight)
        found.append(ends)
        start += len(own)
    pa.default_memory_pool().release_unused()  # NumPy needs the memory that Arrow keeps
    weights = [ends.weight for ends in found if ends.weight is not None]
    if 0 < len(weights) < len(found):
        weighted = [ends.weight is not None for ends in found]
        one, other = (parts[weighted.index(given)].edges.name for given in (True, False))
        raise DataError(f"{one} has weights and {other} has none; give weights to all or to none")
    if len(found) == 1:
        return found[0]
    source = np.concatenate([ends.source for ends in found])
    target = np.concatenate([ends.target for ends in found])
    return Ends(source, target, np.concatenate(weights) if weights else None)


def _part_edges(part: Part, ids: pa.ChunkedArray, loading: Loading) -> Ends:
    file = part.edges
    source_name, target_name, weight_name = edge_roles(file.columns(), loading, file.name)
    found: dict[str, list[np.ndarray]] = {source_name: [], target_name: []}
    weights: list[np.ndarray] = []
    if file.is_csv and not is_text(ids.type):
        ids = ids.cast(pa.large_string())
    for batch in file.batches([source_name, target_name], weight_name):
        for name, pieces in found.items():
            index = lookup(as_ids(Column(batch[name], name, file.rows)), ids)
            missing = np.asarray(batch[name].is_null())
            pieces.append(np.where(missing, np.int32(NO_VALUE), index) if missing.any() else index)
        if weight_name:
            if not is_number(batch[weight_name].type):
                raise file.not_a_number(weight_name)
            given = batch[weight_name].cast(pa.float64(), safe=False)
            weights.append(np.asarray(given.fill_null(np.nan)))
    ends = {name: np.concatenate([np.empty(0, np.int32), *found[name]]) for name in found}
    for name, end in ends.items():
        missing = end == NO_VALUE
        if missing.any():
            problem = f"column '{name}' has no value ({int(missing.sum())} such rows in all)"
            advice = "an edge names two nodes: fill them in, or remove the rows"
            raise DataError(f"{file.where(first(missing))}, {problem}; {advice}")
    weight = None
    if weight_name:
        weight = check_weights(np.concatenate([np.empty(0), *weights]), file.where)

    def sentence(row: int) -> str:
        name = source_name if ends[source_name][row] < 0 else target_name
        value = file.read([name], [name])[name][row].as_py()
        place = f"{file.where(row)}, column '{name}'"
        return f"{place} holds {quoted(value)}, not a node of {part.nodes.name}"

    given_ends = Ends(ends[source_name], ends[target_name], weight)
    return no_dangling(given_ends, len(ids), sentence, loading)
