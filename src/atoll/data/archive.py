"""A federation in one file: the clients' graphs concatenated as safetensors, and their origin.

The file is memory-mapped, so that a federation larger than memory can be opened (`lazy`), client
by client. Nothing in it can run code.

Arrays are concatenated over the K clients, which have N nodes, E edges, D features and C classes.
`nodes` and `edges`, (K+1,), contain the offset of each client, then N or E. Node numbers in `edge`,
(2, E), start at 0 in each client. `weight`, (E,), is omitted if all are one. `y`, `role` and `id`
are (N,). `sparse`, (K,), marks clients with sparse features. `x_count` has the number of entries in
each row of these clients. `x_column` and `x_value` have the columns and values, and `entries` the
clients' offsets. The rows of all other clients are in `x`, (rows, D). For graph classification:
`root`, (N,), `has_features`, (K, D), and `has_classes`, (K, C). For a graph that grows: `since`,
(N,), and `edge_since`, (E,).
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atoll.core.batching import batch_size_of, batching_of
from atoll.core.errors import DataError
from atoll.core.federation import Federation, LazyGraphs
from atoll.core.graph import Graph, Sparse, make_graph, sparse_matrix
from atoll.core.task import ROLES, TASKS
from atoll.data.source import TEST, TRAIN, UNUSED, VAL

SUFFIX = ".atoll"
_FORMAT, _VERSION, _GROWING = "atoll-federation", 1, 2
_MAX_HEADER = 1 << 28
_HAS = ("has_features", "has_classes")
_STAGES = ("since", "edge_since")  # only in files of `_GROWING`, which earlier versions refuse
_CUT_OFF = "it is cut off, or was written over"


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description in a federation's file."""

    name: str
    clients: int
    features: int
    classes: int
    metric: str
    task: str  # by its name in `TASKS`
    numbers: tuple[int, ...]  # the number of each client
    batch_sizes: tuple[int, ...]  # training graphs in one step, by client; 0 for all at once
    about: dict[str, Any]  # its origin: data, partition, split, seed, protocol, and more


def save_federation(federation: Federation, path: str | Path) -> Path:
    """Write a federation's graphs, without views, to a new file atomically. Return its path."""
    path = new_file(path)
    graphs = list(federation.graphs)
    same = ("name", "features", "classes", "metric", "numbers")
    more = {name: getattr(federation, name) for name in same}
    sizes, about = (batch_size_of(federation.batching),) * len(graphs), dict(federation.about)
    about |= {} if federation.encoder is None else {"encoder": dict(federation.encoder)}
    more |= {"clients": len(graphs), "task": federation.task.name}
    header = Header(batch_sizes=sizes, about=about, **more)
    text = json.dumps(msgspec.structs.asdict(header))
    version = _VERSION if graphs[0].since is None else _GROWING
    metadata = {"format": _FORMAT, "version": str(version), "header": text}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(_arrays(graphs), part, metadata=metadata)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return path


def new_file(path: str | Path) -> Path:
    """Return the file to write a federation to. The default suffix is `.atoll`.

    Refuse an existing file.
    """
    path = Path(path).expanduser()
    path = path if path.suffix else path.with_suffix(SUFFIX)
    if path.exists():
        raise DataError(f"'{path}' exists already; delete it, or choose another --out")
    return path


def _arrays(graphs: list[Graph]) -> dict[str, Tensor]:
    def joined(name: str, dtype: torch.dtype, dim: int = 0) -> Tensor:
        return torch.cat([getattr(graph, name).to(dtype) for graph in graphs], dim)

    role = torch.full((sum(graph.num_nodes for graph in graphs),), UNUSED, dtype=torch.int8)
    for number, name in zip((TRAIN, VAL, TEST), ROLES, strict=True):
        role[joined(name, torch.float32) > 0] = number
    arrays = {
        "nodes": _starts([graph.num_nodes for graph in graphs]),
        "edges": _starts([graph.edges.shape[1] for graph in graphs]),
        "edge": joined("edges", torch.int32, 1),
        "y": joined("y", torch.int32),
        "role": role,
        "id": joined("ids", torch.int32),
        "sparse": torch.tensor([isinstance(graph.x, Sparse) for graph in graphs]).to(torch.uint8),
    }
    if dense := [graph.x for graph in graphs if isinstance(graph.x, Tensor)]:
        arrays["x"] = torch.cat(dense)
    if sparse := [graph.x for graph in graphs if isinstance(graph.x, Sparse)]:
        arrays["entries"] = _starts([x.values.shape[0] for x in sparse])
        counts = [torch.bincount(x.rows.long(), minlength=x.shape[0]) for x in sparse]
        arrays["x_count"] = torch.cat(counts).to(torch.int32)
        arrays["x_column"] = torch.cat([x.columns for x in sparse])
        arrays["x_value"] = torch.cat([x.values for x in sparse])
    if any(bool((graph.edge_weight != 1).any()) for graph in graphs):
        arrays["weight"] = joined("edge_weight", torch.float32)
    if graphs[0].since is not None:
        arrays |= {name: joined(name, torch.int8) for name in _STAGES}
    if graphs[0].root is not None:
        arrays["root"] = joined("root", torch.int32)
        for name in _HAS:
            arrays[name] = torch.stack([getattr(graph, name) for graph in graphs]).to(torch.uint8)
    return {name: array.contiguous() for name, array in arrays.items()}


def _starts(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def is_federation_file(name: str | Path) -> bool:
    """Return whether data of this name are a federation file, by its suffix or first bytes."""
    try:
        path = Path(name).expanduser()
        if path.suffix == SUFFIX or not path.is_file():
            return path.suffix == SUFFIX
        with path.open("rb") as file:
            return _FORMAT.encode() in file.read(4096)[8:]
    except (OSError, RuntimeError, ValueError):  # not the name of a readable file
        return False


def read_header(path: str | Path) -> Header:
    """Read the description in a federation's file, without the arrays."""
    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size) if size <= _MAX_HEADER else b""
        metadata = json.loads(text)["__metadata__"]
        found, version, header = (metadata[key] for key in ("format", "version", "header"))
    except FileNotFoundError:
        hint = f"write one with: atoll partition --data NAME --out {path}"
        raise DataError(f"there is no federation '{path}'; {hint}") from None
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError):
        found = None
    if found != _FORMAT:
        advice = f"write one with: atoll partition --data NAME --out FILE{SUFFIX}"
        raise DataError(f"'{path}' is not a federation that Atoll wrote; {advice}")
    if version not in (str(_VERSION), str(_GROWING)):
        formats = f"of format {version}, and this Atoll reads format {_GROWING}"
        advice = "update Atoll, or write it again with `atoll partition`"
        raise DataError(f"'{path}' is a federation {formats}; {advice}")
    try:
        made = msgspec.json.decode(header, type=Header)
    except (msgspec.DecodeError, TypeError):
        raise _damaged(path, "its description is not readable") from None
    if not len(made.numbers) == len(made.batch_sizes) == made.clients > 0:
        raise _damaged(path, "it does not list its clients")
    return made


def memory_needed(path: str | Path) -> int:
    """Estimate the bytes that all clients take in training, from the sizes of the arrays."""
    # Dense features take their memory four times: themselves, their product with the adjacency, and
    # both in stacks. An edge, or an entry of sparse features, takes about a dozen numbers.
    path = Path(path).expanduser()
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        raise _damaged(path, _CUT_OFF) from None
    sizes: dict[str, int] = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
    return 4 * sizes.pop("x", 0) + 12 * sum(sizes.values())


def load_federation(path: str | Path, *, lazy: bool = False) -> Federation:
    """Load the federation in a file, which must not change while in use.

    With `lazy`, each access to a client's graph reads it again, and none stays in memory.
    """
    path = Path(path).expanduser()
    header = read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        parts = _Parts(path, header, arrays)
    except SafetensorError:
        raise _damaged(path, _CUT_OFF) from None
    except KeyError as error:
        raise _damaged(path, f"it has no array {error}") from None
    graphs = LazyGraphs(header.clients, parts.graph)
    chosen = graphs if lazy else tuple(graphs)
    about = dict(header.about)
    encoder = about.pop("encoder", None)
    more = header.numbers, header.metric, batching_of(max(header.batch_sizes)), about, encoder
    return Federation(chosen, header.classes, header.name, *more)


class _Parts:
    """The memory-mapped arrays of a file. `graph` cuts one client's graph from them."""

    def __init__(self, path: Path, header: Header, arrays: Mapping[str, Tensor]) -> None:
        self.path, self.header, self.arrays = path, header, arrays
        sparse, sizes = arrays["sparse"].bool(), arrays["nodes"].diff()
        # Rows of dense and of sparse features are counted separately, and so are sparse clients.
        self.dense_rows = _starts((sizes * ~sparse).tolist())
        self.sparse_rows = _starts((sizes * sparse).tolist())
        self.sparse_before = _starts(sparse.long().tolist())
        clients, nodes = header.clients, int(arrays["nodes"][-1])
        shapes = {
            **dict.fromkeys(("nodes", "edges"), (clients + 1,)),
            "sparse": (clients,),
            "edge": (2, int(arrays["edges"][-1])),
            **dict.fromkeys(("y", "role", "id"), (nodes,)),
        }
        if "since" in arrays:
            shapes |= {"since": (nodes,), "edge_since": (int(arrays["edges"][-1]),)}
        if not bool(sparse.all()):
            shapes["x"] = (int(self.dense_rows[-1]), header.features)
        if bool(sparse.any()):
            shapes["entries"] = (int(sparse.sum()) + 1,)
            shapes["x_count"] = (int(self.sparse_rows[-1]),)
            shapes["x_column"] = shapes["x_value"] = (int(arrays["entries"][-1]),)
        if TASKS[header.task].many_graphs:
            shapes["root"] = (nodes,)
        for name, shape in shapes.items():
            found = tuple(arrays[name].shape)
            if found != shape:
                raise _damaged(path, f"array '{name}' has shape {found}, not {shape}")
        if any(bool((arrays[name].diff() < 0).any()) for name in ("nodes", "edges")):
            raise _damaged(path, "its clients overlap")

    def graph(self, client: int) -> Graph:
        header, arrays = self.header, self.arrays
        a, b = arrays["nodes"][client : client + 2].tolist()
        c, d = arrays["edges"][client : client + 2].tolist()
        edges, y, role = arrays["edge"][:, c:d].long(), arrays["y"][a:b].long(), arrays["role"][a:b]
        for what, values, end in (("edge", edges, b - a), ("label", y, header.classes)):
            if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < end:
                raise _damaged(self.path, f"client {client} has an impossible {what}")
        own = {name: arrays[name][client] for name in _HAS if name in arrays}
        graph = make_graph(
            self._features(client, a, b),
            edges,
            y,
            *(role == number for number in (TRAIN, VAL, TEST)),
            edge_weight=arrays["weight"][c:d] if "weight" in arrays else None,
            ids=arrays["id"][a:b],
            root=arrays["root"][a:b].long() if "root" in arrays else None,
            has_features=own.get("has_features"),
            has_classes=own.get("has_classes"),
        )
        if "since" not in arrays:
            return graph
        return replace(graph, since=arrays["since"][a:b], edge_since=arrays["edge_since"][c:d])

    def _features(self, client: int, a: int, b: int) -> Tensor | Sparse:
        arrays = self.arrays
        if not arrays["sparse"][client]:
            first = int(self.dense_rows[client])
            return arrays["x"][first : first + b - a]
        first, which = int(self.sparse_rows[client]), int(self.sparse_before[client])
        e, f = arrays["entries"][which : which + 2].tolist()
        counts = arrays["x_count"][first : first + b - a].long()
        columns = arrays["x_column"][e:f].long()
        width = self.header.features
        if int(counts.sum()) != f - e or (f > e and not 0 <= int(columns.max()) < width):
            raise _damaged(self.path, f"client {client} has impossible features")
        rows = torch.arange(b - a).repeat_interleave(counts)
        return sparse_matrix(rows, columns, arrays["x_value"][e:f], (b - a, width), square=False)


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"federation '{path}' is damaged ({why}); write it again: atoll partition")
