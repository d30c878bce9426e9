"""New tables for a trained model, as a separate graph or joined to the training graph."""

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
    """Read the tables in a folder with the encoder of the training tables.

    With the training graph `old` the result is one graph, and the old nodes come first. An edge of
    the new tables may then join new and old nodes. If clients use the same ids, the edges of a
    single folder name old nodes of `client`.
    """
    if not path.is_dir():
        raise DataError(f"'{path}' is no folder; give one with tables like those of the training")
    _check_schema(path, encoder.schema, options)
    # The encoder has the directions of the training, where --own directed is part of it.
    loading = Loading(
        encoder.schema, replace(options, directed=None), encoder=encoder, client=client
    )
    parts = find_parts(path)
    nodes, ids = read_nodes(parts, loading)
    name, classes = path.resolve().name, len(encoder.classes)
    size, places = len(nodes.y), None
    if old is not None:
        ids, places = _with_old(parts, ids, old, client)
        size += old.num_nodes
    edges, weight = clean_edges(read_edges(parts, ids, loading, places), size, loading)
    new = Source(name, nodes.x, edges, nodes.y, classes, weight, None, nodes.columns)
    new = replace(new, class_names=encoder.classes, encoder=encoder, settled=True)
    return (new if old is None else _joined(old, new)).checked(), loading.report


def _check_schema(path: Path, trained: Schema, options: OwnOptions) -> None:
    """Refuse a schema.toml in the folder of the new tables that differs from the run's schema."""
    file = path / "schema.toml"
    given = read_schema(file).with_options(options) if file.is_file() else trained
    for name in (field.name for field in fields(Schema) if field.name != "file"):
        one, two = getattr(given, name), getattr(trained, name)
        if one != two:
            differ = f"gives {name} = {one}, but the model was trained with {two}"
            raise ConfigError(f"'{file}' {differ}; remove it, or train again")


def _with_old(
    parts: Sequence[Part], ids: Sequence[pa.ChunkedArray], old: Source, client: str | None
) -> tuple[list[pa.ChunkedArray], list[np.ndarray]]:
    """The ids that each part's edges may name, its own and old ones, and their places."""
    if "id" not in old.columns:
        raise DataError(f"the nodes of '{old.name}' have no ids, so that no edge can name them")
    known, owner = pa.array(old.columns["id"]), old.columns.get("client")
    shared = len(np.unique(old.columns["id"])) < old.num_nodes  # by several clients
    if shared and parts[0].client is None and client is None:
        problem = "clients of the training data use the same ids"
        hint = "give the new tables in one folder for each client, or name it with --client"
        raise DataError(f"{problem}; {hint}")
    every, places, start = list[pa.ChunkedArray](), list[np.ndarray](), old.num_nodes
    for part, own in zip(parts, ids, strict=True):
        pool = np.arange(old.num_nodes)
        if shared:
            pool = np.flatnonzero(owner == (part.client or client))
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
    """Both graphs as one, nodes of `old` first; edges of `new` are numbered for all of them."""
    sides = (old, new)
    if all(sp.issparse(side.x) for side in sides):
        x = sp.vstack([side.x for side in sides], format="csr")
    else:
        x = np.concatenate([s.x.toarray() if isinstance(s.x, sp.csr_array) else s.x for s in sides])
    weight = None
    if old.weight is not None or new.weight is not None:  # None means that all are one
        ones = [np.ones(side.edges.shape[1], np.float32) for side in sides]
        pairs = zip(ones, (old.weight, new.weight), strict=True)
        weight = np.concatenate([one if own is None else own for one, own in pairs])
    columns = {}
    for name in {**old.columns, **new.columns}:
        pair = [s.columns.get(name, np.full(s.num_nodes, "")) for s in sides]
        alike = pair[0].dtype.kind == pair[1].dtype.kind
        columns[name] = np.concatenate([p if alike else p.astype(str) for p in pair])
    edges = np.concatenate([old.edges, new.edges], axis=1)
    y = np.concatenate([old.y, new.y])
    return replace(new, x=x, edges=edges, y=y, weight=weight, columns=columns)
