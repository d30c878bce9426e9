"""Loading of a user's graph: tables (CSV, Parquet), a PyG `Data`, GraphML or a NetworkX graph.

New tables for a trained model become a separate graph, or new nodes of the training graph.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import scipy.sparse as sp
import torch

from atoll.core.errors import ConfigError, DataError, counted
from atoll.data.own import columns
from atoll.data.own import schema as schemas
from atoll.data.own.columns import Column, Rows
from atoll.data.own.edges import JOIN, Ends, check_weights, clean_edges, no_dangling, read_edges
from atoll.data.own.encoder import Encoder, Nodes, encode_nodes
from atoll.data.own.schema import OWNERS, Loading, OwnOptions, OwnReport, Schema
from atoll.data.own.tables import Part, find_parts, read_nodes
from atoll.data.source import TEST, TRAIN, UNUSED, VAL, Source, compact

if TYPE_CHECKING:
    import networkx as nx

Tensors = Mapping[str, object]  # the content of a `.pt` file by name; `_array` checks each
MASKS = {"train_mask": TRAIN, "val_mask": VAL, "test_mask": TEST}
KINDS = "a folder with nodes.csv and edges.csv (or .parquet), a .pt file or a .graphml file"


def load_own(
    path: str | Path,
    schema: str | Path | None = None,
    options: OwnOptions | None = None,
    encoder: Encoder | None = None,
    telling: int = 0,
) -> tuple[Source, OwnReport]:
    """Load a user's graph. Return it and a report. Errors name the place in a file and a remedy.

    Args:
        path: A folder with `nodes` and `edges` as CSV or Parquet. Or a folder of such folders, one
            per client. Their names become the column `client`. Or a `.pt` file of `torch.save` with
            a PyG `Data` or a dict of tensors. Or a GraphML file.
        schema: A TOML file with the roles of columns. The default is `schema.toml` in the folder.
        options: How to treat dangling edges, duplicates, self-loops and directions.
        encoder: The encoder of an earlier run, whose columns the tables must have. By default a new
            one is fitted. It has no effect on other files.
        telling: Fewest rows of a category value that is sent to others. Above 0, the report on
            tables contains the statistics that a site sends.
    """
    path, options = Path(path), options or OwnOptions()
    if not path.exists():
        raise DataError(f"there is no '{path}'; give {KINDS}")
    if path.is_dir():
        own = path / "schema.toml"
        if schema is None and own.is_file():
            schema = own
        loading = Loading(_schema(schema, options), options, encoder=encoder, telling=telling)
        parts = find_parts(path)
        nodes, ids = read_nodes(parts, loading)
        ends = read_edges(parts, ids, loading)
        return _assemble(path.resolve().name, nodes, ends, loading)
    suffix = path.suffix.lower()
    if suffix in (".pt", ".pth"):
        if schema is not None:
            reason = "a schema names the columns of tables or GraphML, and a .pt file has none"
            raise ConfigError(f"'{path.name}' was given with a schema; {reason}: remove it")
        return _load_tensors(path, Loading(Schema().with_options(options), options))
    if suffix in (".graphml", ".xml"):
        source, report = from_networkx(_read_graphml(path), path.name, schema, options)
        return replace(source, name=path.stem), report
    hint = " (give the folder that holds it)" if suffix in (".csv", ".parquet") else ""
    raise DataError(f"'{path.name}' is not a graph that can be loaded{hint}; give {KINDS}")


def _schema(given: Schema | str | Path | None, options: OwnOptions) -> Schema:
    read = schemas.read_schema(Path(given)) if isinstance(given, str | Path) else given or Schema()
    return read.with_options(options)


def _assemble(name: str, nodes: Nodes, ends: Ends, loading: Loading) -> tuple[Source, OwnReport]:
    """Clean the edges, check roles against labels, and return source and report."""
    report, split = loading.report, nodes.split
    report.classes, report.features = nodes.classes, nodes.features
    if report.dangling_edges:
        dropped = "edge to missing nodes was dropped", "edges to missing nodes were dropped"
        report.note(counted(report.dangling_edges, *dropped))
    if split is not None:
        lost = (nodes.y < 0) & (split != UNUSED)
        if lost.any():
            report.note(f"{int(lost.sum())} unlabelled nodes lost their place in the split")
            split = np.where(lost, np.int8(UNUSED), split)
        if not (split == TRAIN).any():
            advice = "mark some as train, or remove the split and one is drawn"
            raise DataError(f"the split of '{name}' has no labelled training node; {advice}")
    edges, weight = clean_edges(ends, len(nodes.y), loading)
    if edges.shape[1] == 0:
        report.note("the graph has no edges")
    source = Source(name, nodes.x, edges, nodes.y, len(nodes.classes), weight, split, nodes.columns)
    named = replace(source, class_names=nodes.classes, encoder=nodes.encoder, settled=True)
    return named.checked(), report


def from_networkx(
    graph: nx.Graph,
    name: str = "networkx",
    schema: Schema | str | Path | None = None,
    options: OwnOptions | None = None,
) -> tuple[Source, OwnReport]:
    """Load a NetworkX graph. Return it and a report.

    Without a schema, node attributes have the roles of columns with their names: `label` (or `y`),
    `split`, `client` and `owner`. Every other attribute is a feature, and texts become categories.
    The edge attribute `weight` is a weight. Parallel edges are duplicate edges.
    """
    options = options or OwnOptions()
    loading = Loading(_schema(schema, options), options)
    if not (ids := list(graph.nodes)):
        raise DataError(f"{name} holds no nodes; give a graph with at least one node per class")
    keys = dict.fromkeys(key for _, data in graph.nodes(data=True) for key in data)
    roles = schemas.node_roles([str(key) for key in keys], loading, name, with_id=False)
    if roles.ignored:
        loading.report.note(f"{name}: ignored {schemas.quoted_list(roles.ignored)}")
    values = {str(key): [d.get(key) for _, d in graph.nodes(data=True)] for key in keys}
    table = columns.from_lists({key: values[key] for key in values if key in roles.used}, name)
    rows = Rows(name, lambda row: f"{name} node {ids[row]!r}")
    nodes = encode_nodes(table, roles, rows, loading)
    whole = all(isinstance(node, int) for node in ids)
    nodes.columns["id"] = np.array(ids if whole else [str(node) for node in ids])
    if graph.is_directed() and not loading.schema.directed:
        undirected = "its edges were made undirected (directed = true keeps)"
        loading.report.note(f"{name} is directed; {undirected}")
    ends = _networkx_edges(graph, ids, name, loading.schema.weight or "weight")
    return _assemble(name, nodes, ends, loading)


def _networkx_edges(graph: nx.Graph, ids: list[Hashable], name: str, key: str) -> Ends:
    index = {node: row for row, node in enumerate(ids)}
    pairs = [(u, v, data.get(key)) for u, v, data in graph.edges(data=True)]
    ends = np.array([(index[u], index[v]) for u, v, _ in pairs], dtype=np.int64).reshape(-1, 2)
    given = [weight for _, _, weight in pairs if weight is not None]

    def where(row: int) -> str:
        return f"{name} edge {pairs[row][0]!r} to {pairs[row][1]!r}"

    if given and len(given) < len(pairs):
        row = next(row for row, pair in enumerate(pairs) if pair[2] is None)
        raise DataError(f"{where(row)} has no {key}; give a {key} to every edge or to none")
    try:
        weight = check_weights(np.array(given, dtype=np.float64), where) if given else None
    except (TypeError, ValueError):
        raise DataError(f"an edge {key} of {name} is not a number; give numbers only") from None
    return Ends(ends[:, 0], ends[:, 1], weight)


def _read_graphml(path: Path) -> nx.Graph:
    import networkx as nx

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about keys without a type, and uses text
            return nx.read_graphml(path)
    except Exception as problem:  # the parser raises many types of errors
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        advice = "export the graph again"
        raise DataError(f"'{path.name}' is not readable as GraphML ({reason}); {advice}") from None


def _load_tensors(path: Path, loading: Loading) -> tuple[Source, OwnReport]:
    """Load a PyG `Data`, or a dict of tensors with the same names."""
    options, name = loading.options, path.name
    values = _read_tensors(path)
    x = _array(values, "x", name, 2, "one row of numbers for each node")
    n = len(x)
    if n == 0:
        raise DataError(f"'{name}' holds no nodes; give a graph with at least one node per class")
    y = _array(values, "y", name, 1, "one class for each node", n=n)
    if y.min() < -1:
        raise DataError(f"y of '{name}' holds {y.min()}; a label is 0 or more, or -1 for unknown")
    rows = Rows(f"'{name}'", lambda row: f"'{name}' node {row}")
    labels = pa.chunked_array([pa.array(y, mask=y == -1)])
    y, classes = columns.encode_labels(Column(labels, "y", rows), options)
    ends = _tensor_edges(values, name, n, loading)
    owners = {key for key in (*OWNERS, options.owner) if key is not None and key in values}
    owned = {key: _array(values, key, name, 1, "one owner for each node", n=n) for key in owners}
    known = {"x", "y", "edge_index", "edge_weight", "num_nodes", *MASKS, *owners}
    if set(values) - known:
        loading.report.note(f"{name}: ignored {schemas.quoted_list(sorted(set(values) - known))}")
    split = _masks(values, name, n, loading.report)
    nodes = Nodes(compact(x, columns.SPARSE_BELOW), y, classes, (), split, owned)
    return _assemble(path.stem, nodes, ends, loading)


def _tensor_edges(values: Tensors, name: str, n: int, loading: Loading) -> Ends:
    index = _array(values, "edge_index", name, 2, "two rows: sources and targets")
    if index.shape[0] != 2 or index.dtype.kind not in "iu":  # signed or unsigned
        advice = "it must be whole numbers of shape (2, edges)"
        raise DataError(f"edge_index of '{name}' is {index.dtype} of shape {index.shape}; {advice}")
    weight, count = None, index.shape[1]
    if values.get("edge_weight") is not None:
        weight = _array(values, "edge_weight", name, 1, "one number for each edge", n=count)
        weight = check_weights(weight, lambda edge: f"'{name}' edge {edge}")

    def sentence(edge: int) -> str:
        joined = f"'{name}' edge {edge} joins {index[0, edge]} and {index[1, edge]}"
        return f"{joined}, but nodes are numbered 0 to {n - 1}"

    source, target = index.astype(np.int64)
    return no_dangling(Ends(source, target, weight), n, sentence, loading)


def _read_tensors(path: Path) -> Tensors:
    """Load the file's content by name. Code in it is refused, never run."""
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    # The context unregisters its classes when it ends, so it gets none that PyG registered itself.
    known = torch.serialization.get_safe_globals()
    needed = [c for c in (Data, DataEdgeAttr, DataTensorAttr, GlobalStorage) if c not in known]
    try:
        _check_not_packed(path)
        with warnings.catch_warnings(), torch.serialization.safe_globals(needed):
            warnings.simplefilter("ignore")  # about old pickle protocols
            content = torch.load(path, map_location="cpu", weights_only=True)
            content = content.to_dict() if isinstance(content, Data) else content
    except DataError:
        raise
    except Exception as problem:  # a broken or hostile file may cause any error
        if code := re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(problem)):
            refusal = f"'{path.name}' needs '{code[1]}' while it loads, and such code is refused"
            raise DataError(f"{refusal}; save a PyG Data or a dict of tensors") from None
        advice = "save a PyG Data or a dict of tensors with torch.save"
        raise DataError(f"'{path.name}' is not readable as a .pt file; {advice}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        advice = "save one PyG Data or a dict of tensors with x, edge_index and y"
        raise DataError(f"'{path.name}' holds a {type(content).__name__}; {advice}")
    return content


def _check_not_packed(path: Path) -> None:
    """Refuse a file that unpacks to more than its own size. torch.save does not compress."""
    with suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as parts:
        size, whole = path.stat().st_size, sum(part.file_size for part in parts.infolist())
        if whole > size:
            problem = f"'{path.name}' has {size} bytes and unpacks to {whole}"
            raise DataError(f"{problem}; save it with torch.save, which does not compress")


def _array(
    values: Tensors, key: str, name: str, dims: int, meaning: str, *, n: int | None = None
) -> np.ndarray:
    """Convert one tensor to an array of the right shape. (N, 1) is accepted as (N,)."""
    tensor = values.get(key)
    if not isinstance(tensor, torch.Tensor):
        found = "no" if tensor is None else f"a {type(tensor).__name__} as"
        raise DataError(f"'{name}' has {found} {key}; it must be a tensor: {meaning}")
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
        raise DataError(f"{key} of '{name}' is sparse, complex or quantized; save it dense")
    tensor = tensor.detach()
    if dims == 1 and tensor.dim() == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.dim() != dims or (n is not None and tensor.shape[0] != n):
        length = "" if n is None else f" and length {n}"
        advice = f"it must have {dims} dimension(s){length}: {meaning}"
        raise DataError(f"{key} of '{name}' has the shape {tuple(tensor.shape)}; {advice}")
    if tensor.is_floating_point():
        tensor = tensor.double() if key == "y" else tensor.float()
    return np.asarray(tensor.numpy())


def _masks(values: Tensors, name: str, n: int, report: OwnReport) -> np.ndarray | None:
    """Read roles from train_mask, val_mask and test_mask, or return None if all are missing."""
    split, found = np.full(n, UNUSED, dtype=np.int8), False
    for key, role in MASKS.items():
        if (mask := values.get(key)) is None:
            continue
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] > 1:
            report.note(f"{key} holds {mask.shape[1]} splits; the first was used")
            mask = mask[:, 0]
        chosen = _array({key: mask}, key, name, 1, "true or false for each node", n=n) != 0
        twice = chosen & (split != UNUSED)
        if twice.any():
            node = f"node {int(np.argmax(twice))}, which another mask holds too"
            count = f"({int(twice.sum())} such nodes)"
            raise DataError(f"{key} of '{name}' holds {node} {count}; a node has one role")
        split[chosen], found = role, True
    return split if found else None


def load_new(
    path: Path,
    encoder: Encoder,
    options: OwnOptions,
    old: Source | None = None,
    client: str | None = None,
) -> tuple[Source, OwnReport]:
    """Read the tables in a folder with the encoder of the training tables. Return graph and report.

    With the training graph `old` the result is one graph, and the old nodes come first. An edge of
    the new tables may then join new and old nodes. If clients use the same ids, the edges of a
    single folder refer to old nodes of `client`.
    """
    if not path.is_dir():
        raise DataError(f"'{path}' is no folder; give one with tables like the training tables")
    _check_schema(path, encoder.schema, options)
    # The encoder contains the directions of the training, including --own directed.
    known = encoder.schema.with_options(replace(options, directed=None))
    joined, parts = old is not None, find_parts(path)
    loading = Loading(known, options, encoder=encoder, client=client, joined=joined)
    nodes, ids = read_nodes(parts, loading)
    name, classes = path.resolve().name, len(encoder.classes)
    size, places = len(nodes.y), None
    if old is not None:
        ids, places = _with_old(parts, ids, old, client)
        size += old.num_nodes
    ends = read_edges(parts, ids, loading, places)
    if dropped := loading.report.dangling_edges:
        hint = "" if joined else f"; {JOIN}"
        loading.report.note(f"{dropped} edges to missing nodes were dropped{hint}")
    edges, weight = clean_edges(ends, size, loading)
    new = Source(name, nodes.x, edges, nodes.y, classes, weight, None, nodes.columns)
    new = replace(new, class_names=encoder.classes, encoder=encoder, settled=True)
    return (new if old is None else _joined(old, new)).checked(), loading.report


def _check_schema(path: Path, trained: Schema, options: OwnOptions) -> None:
    """Refuse a schema.toml in the folder of the new tables that differs from the run's schema."""
    file = path / "schema.toml"
    given = schemas.read_schema(file).with_options(options) if file.is_file() else trained
    for name in (field.name for field in fields(Schema) if field.name != "file"):
        one, two = getattr(given, name), getattr(trained, name)
        if one != two:
            differ = f"gives {name} = {one}, but the model was trained with {two}"
            raise ConfigError(f"'{file}' {differ}; remove it, or train again")


def _with_old(
    parts: Sequence[Part], ids: Sequence[pa.ChunkedArray], old: Source, client: str | None
) -> tuple[list[pa.ChunkedArray], list[np.ndarray]]:
    """Return, for each part, the ids that its edges may name, and the node number of each.

    These are the part's own ids and the ids of old nodes.
    """
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
        own_nodes = owner == (part.client or client) if shared else np.ones(old.num_nodes)
        pool = np.flatnonzero(own_nodes)
        mine = known.take(pa.array(pool))
        if (again := columns.lookup(own, mine) >= 0).any():
            named = schemas.quoted(own[columns.first(again)].as_py())
            problem = f"gives the id {named}, a node of the training graph"
            count = f"({int(again.sum())} such rows in all)"
            raise DataError(f"{part.nodes.name} {problem} {count}; list new nodes only")
        kind = own.type if own.type == mine.type else pa.large_string()
        chunks = [*own.cast(kind).chunks, mine.cast(kind)]
        every.append(pa.chunked_array(chunks, kind))
        places.append(np.concatenate([np.arange(start, start + len(own)), pool]))
        start += len(own)
    return every, places


def _joined(old: Source, new: Source) -> Source:
    """Join both graphs, nodes of `old` first. Edges of `new` already use the joint numbers."""
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
    joined = {}
    for name in {**old.columns, **new.columns}:
        pair = [s.columns.get(name, np.full(s.num_nodes, "")) for s in sides]
        alike = pair[0].dtype.kind == pair[1].dtype.kind
        joined[name] = np.concatenate([p if alike else p.astype(str) for p in pair])
    edges = np.concatenate([old.edges, new.edges], axis=1)
    y = np.concatenate([old.y, new.y])
    return replace(new, x=x, edges=edges, y=y, weight=weight, columns=joined)
