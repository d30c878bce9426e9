"""New tables for a trained model, as a graph of their own or joined to the training graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import scipy.sparse as sp

from atoll.core.errors import ConfigError, DataError
from atoll.data.own.columns import first, lookup
from atoll.data.own.edges import clean_edges, read_edges
from atoll.data.own.encoder import Encoder
from atoll.data.own.schema import Loading, OwnOptions, OwnReport, Schema, quoted, read_schema
from atoll.data.own.tables import Part, find_parts, read_nodes
from atoll.data.source import Source


def load_new(
    path: Path,
    encoder: Encoder,
    options: OwnOptions,
    old: Source | None = None,
    client: str | None = None,
) -> tuple[Source, OwnReport]:
    """The tables in a folder, encoded as the training tables were, which may change no column.

    With the training graph `old` the result is one graph: its nodes come first, and an edge of the
    new tables may join a new node with an old one, or two old ones. Where clients use the same ids,
    `client` says whose old nodes the edges of one folder name.
    """
    if not path.is_dir():
        raise DataError(f"'{path}' is no folder; give one with tables like those of the training")
    _check_schema(path, encoder.schema)
    loading = Loading(encoder.schema, options, encoder=encoder)
    parts = find_parts(path)
    nodes, ids = read_nodes(parts, loading)
    name, classes = path.resolve().name, len(encoder.classes)
    size, places = len(nodes.y), None
    if old is not None:
        ids, places = _with_old(parts, ids, old, client)
        size += old.num_nodes
    edges, weight = clean_edges(read_edges(parts, ids, loading, places), size, loading)
    new = Source(name, nodes.x, edges, nodes.y, classes, weight, None, nodes.columns)
    new = replace(new, class_names=encoder.classes, encoder=encoder)
    return (new if old is None else _joined(old, new)).checked(), loading.report


def _check_schema(path: Path, trained: Schema) -> None:
    """Refuse a schema beside the new tables that says something else than the run's."""
    if not (path / "schema.toml").is_file():
        return
    given = read_schema(path / "schema.toml")
    other = [f.name for f in fields(Schema) if getattr(given, f.name) != getattr(trained, f.name)]
    if other := [name for name in other if name != "file"]:
        one, two = (getattr(schema, other[0]) for schema in (given, trained))
        differ = f"gives {other[0]} = {one}, but the model was trained with {two}"
        raise ConfigError(f"'{path / 'schema.toml'}' {differ}; remove it, or train again")


def _with_old(
    parts: Sequence[Part], ids: Sequence[pa.ChunkedArray], old: Source, client: str | None
) -> tuple[list[pa.ChunkedArray], list[np.ndarray]]:
    """The ids that each part's edges may name, its own and old ones, and their places."""
    if "id" not in old.columns:
        raise DataError(f"the nodes of '{old.name}' have no ids, so that no edge can name them")
    known, owner = pa.array(old.columns["id"]), old.columns.get("client")
    named = len(np.unique(old.columns["id"])) < old.num_nodes  # ids are used by several clients
    if named and parts[0].client is None and client is None:
        problem = "clients of the training data use the same ids"
        hint = "give the new tables in one folder for each client, or name it with --client"
        raise DataError(f"{problem}; {hint}")
    every, places, start = list[pa.ChunkedArray](), list[np.ndarray](), old.num_nodes
    for part, own in zip(parts, ids, strict=True):
        pool = (
            np.flatnonzero(owner == (part.client or client)) if named else np.arange(old.num_nodes)
        )
        mine = known.take(pa.array(pool))
        if (again := lookup(own, mine) >= 0).any():
            problem = f"gives the id {quoted(own[first(again)].as_py())}, a node of the training"
            count = f"({int(again.sum())} such rows in all)"
            raise DataError(f"{part.nodes.name} {problem} graph {count}; list new nodes only")
        kind = own.type if own.type == mine.type else pa.large_string()
        chunks = [*own.cast(kind).chunks, mine.cast(kind)]
        every.append(pa.chunked_array(chunks, kind))
        places.append(np.concatenate([np.arange(start, start + len(own)), pool]))
        start += len(own)
    return every, places


def _joined(old: Source, new: Source) -> Source:
    """The nodes of both graphs, those of `old` first; edges of `new` count over all of them."""
    both = (old.x, new.x)
    sparse = [x for x in both if isinstance(x, sp.csr_array)]
    dense = [x.toarray() if isinstance(x, sp.csr_array) else x for x in both]
    x = sp.vstack(sparse, format="csr") if len(sparse) == 2 else np.concatenate(dense)
    weight = None
    if old.weight is not None or new.weight is not None:  # None means that all are one
        sides = (old, new)
        ones = [
            np.ones(s.edges.shape[1], np.float32) if s.weight is None else s.weight for s in sides
        ]
        weight = np.concatenate(ones)
    columns = {}
    for name in {**old.columns, **new.columns}:
        absent = (np.full(s.num_nodes, "") for s in (old, new))
        pair = [s.columns.get(name, no) for s, no in zip((old, new), absent, strict=True)]
        alike = pair[0].dtype.kind == pair[1].dtype.kind
        columns[name] = np.concatenate([p if alike else p.astype(str) for p in pair])
    edges = np.concatenate([old.edges, new.edges], axis=1)
    y = np.concatenate([old.y, new.y])
    return replace(new, x=x, edges=edges, y=y, weight=weight, columns=columns)
