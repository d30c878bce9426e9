"""Fingerprints of data: the SHA-256 of the features, edges, labels and roles that a run reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.core.tree import leaves

PARTS = ("x", "edges", "edge_weight", "y", "train", "val", "test")
"""The tensors of a graph that its fingerprint covers, in this order."""


def graph_fingerprint(graph: Graph) -> str:
    """Return the fingerprint of a client's graph, as in model cards."""
    tensors = leaves([getattr(graph, part) for part in PARTS])
    return _digest(tensor.cpu().numpy() for tensor in tensors)


def data_fingerprint(data: object) -> str:
    """Return the fingerprint of a federation, or of data before their partition."""
    if isinstance(data, Federation):
        return _digest([str(data.numbers), *map(graph_fingerprint, data.graphs)])
    return _digest(_parts(data))


def _parts(value: Any) -> Iterator[np.ndarray | str]:
    """Yield the arrays of nested data, and the text of all other values."""
    if is_dataclass(value):
        for one in fields(value):
            yield from _parts(getattr(value, one.name))
    elif isinstance(value, Mapping):
        for name, part in sorted(value.items()):
            yield name
            yield from _parts(part)
    elif isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    elif hasattr(value, "indptr"):  # a sparse matrix; SciPy's import takes time
        yield from (str(value.shape), value.indptr, value.indices, value.data)
    else:
        plain = isinstance(value, np.ndarray) and value.dtype != object
        yield value if plain else repr(value.tolist() if isinstance(value, np.ndarray) else value)


def _digest(parts: Iterable[np.ndarray | str]) -> str:
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            found.update(part.encode())
        else:
            found.update(f"{part.dtype} {part.shape}".encode())
            found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()
