"""Conversion of trees to bytes and back, without pickle, for the wire and for checkpoints.

Arrays are stored as safetensors, and the structure as JSON in the same file. Only record types that
Atoll or the method declared can be decoded, so bytes can never run code.
A checkpoint file is the SHA-256 of its content, then the content, and is written atomically.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import save as save_arrays
from safetensors.torch import load, save
from torch import Tensor

from atoll.core.errors import DataError, WireError
from atoll.core.files import write_atomically
from atoll.core.tree import RECORDS, Tree, named_leaves, stack, structure, unstack
from atoll.engines.recording import shapes

LIMIT = 1 << 30  # bytes of the largest message that is accepted
PLAIN = (type(None), bool, int, float, str)  # values that are allowed in addition to tensors
DEPTH = 64  # most levels of a tree; deeper trees would exhaust Python's stack later
DIMENSIONS = 64  # most dimensions of a tensor; torch loads more, but most operations then fail
FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
TYPES = frozenset(FLOATS | WHOLE)
"""Accepted types. In other types (8-bit floats, complex numbers) a NaN cannot be found."""
ARRAYS = TYPES - {torch.bfloat16}  # types that numpy supports
MOVED = {
    "atoll.core.layers": "atoll.core.private_layers",
    "atoll.nn.places": "atoll.nn.neighgen_slots",
}
"""Modules of record types, by their names in checkpoints of earlier versions."""
RETIRED = {("atoll.core.graph.Graph", "batch_size")}
"""Fields of records in files of earlier versions that are now ignored."""


def encode(tree: Tree) -> bytes:
    """Encode a tree as bytes."""
    tensors: dict[str, Tensor] = {}
    plan = json.dumps(_plan(tree, tensors))
    taken: set[int] = set()
    for name, leaf in tensors.items():
        own = leaf.detach().cpu().contiguous()
        # safetensors refuses two tensors that share their memory.
        own = own.clone() if own.untyped_storage().data_ptr() in taken else own
        taken.add(own.untyped_storage().data_ptr())
        tensors[name] = own
    # It also refuses a file without arrays, so an empty tree contains one empty array.
    tensors = tensors or {"": torch.zeros(0)}
    if all(leaf.dtype in ARRAYS and leaf.dim() <= 32 for leaf in tensors.values()):
        # The same bytes as `save`, which caches memory for every new size, and histories grow.
        return save_arrays({k: v.numpy() for k, v in tensors.items()}, metadata={"tree": plan})
    return save(tensors, metadata={"tree": plan})


def decode(data: bytes, *, limit: int = LIMIT, finite: bool = True) -> Tree:
    """Decode a tree that `encode` wrote. Raise a `WireError` for any other bytes.

    More than `limit` bytes are an error, and with `finite` also NaN and infinite numbers.
    """
    if len(data) > limit:
        raise WireError(f"a message of {len(data)} bytes was refused; the limit is {limit} bytes")
    try:
        tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        plan = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["tree"])
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise WireError("a message was refused: it is not an Atoll message") from error
    for name, leaf in tensors.items():
        if leaf.dtype not in TYPES:
            raise WireError(f"a message was refused: '{name}' is {leaf.dtype}")
        if leaf.dim() > DIMENSIONS:
            raise WireError(f"a message was refused: '{name}' has {leaf.dim()} dimensions")
        if finite and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise WireError(f"a message was refused: '{name}' holds a NaN or infinite number")
    return _build(plan, tensors)


def check_like(tree: Tree, template: Tree, free: Mapping[str, str]) -> None:
    """Refuse a reply that differs from the template in structure, types or shapes.

    Fields that the step discloses (`free`, with reasons) may differ in shape.
    """
    names, declared = ([name for name, _ in named_leaves(t)] for t in (tree, template))
    if structure(tree) != structure(template) or names != declared:
        raise WireError(
            f"a reply was refused: it holds {names}, but the method declares {declared}"
        )
    for (name, leaf), (_, like) in zip(named_leaves(tree), named_leaves(template), strict=True):
        if leaf.dtype != like.dtype:
            raise WireError(f"a reply was refused: '{name}' is {leaf.dtype}, declared {like.dtype}")
        if leaf.shape != like.shape and name.split(".")[0] not in free:
            raise WireError(
                f"a reply was refused: '{name}' has shape {tuple(leaf.shape)}, declared "
                f"{tuple(like.shape)}; a node or edge axis must be declared with its reason "
                f"(client_step(discloses=...))"
            )


def _plan(tree: Tree, tensors: dict[str, Tensor], path: str = "") -> dict[str, object]:
    """Return the structure as JSON, and collect the tensors under their paths."""
    name = type(tree).__module__ + "." + type(tree).__qualname__
    if isinstance(tree, Tensor):
        while path in tensors or path == "__metadata__":  # a key may have a dot, or be reserved
            path += "'"
        tensors[path] = tree
        return {"tensor": path}
    if type(tree) in PLAIN:
        return {"value": tree}
    # Compare exact types: a subclass (a named tuple, an ordered dict) would lose its type.
    if type(tree) is dict and all(type(key) is str for key in tree):
        items = {k: _plan(v, tensors, f"{path}.{k}".lstrip(".")) for k, v in tree.items()}
        return {"dict": items}
    if type(tree) in (list, tuple):
        rows = [_plan(v, tensors, f"{path}.{i}".lstrip(".")) for i, v in enumerate(tree)]
        return {type(tree).__name__: rows}
    if name in RECORDS:
        # Omit a static field with its default value, because it need not be a plain value then.
        written = [
            part.name
            for part in fields(tree)
            if not (part.metadata.get("static") and getattr(tree, part.name) == part.default)
        ]
        items = {k: _plan(getattr(tree, k), tensors, f"{path}.{k}".lstrip(".")) for k in written}
        return {"record": name, "fields": items}
    raise WireError(
        f"a {name} cannot be sent: use tensors, records, lists, tuples and dicts with names as keys"
    )


def _build(plan: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Tree:
    """Build the tree that a plan describes."""
    if depth > DEPTH:
        raise WireError(f"a message was refused: it has more than {DEPTH} levels")
    try:
        if "tensor" in plan:
            return tensors[plan["tensor"]]
        if "value" in plan:
            if type(plan["value"]) not in PLAIN:
                raise TypeError("it is not a plain value")
            return plan["value"]
        if "dict" in plan:
            return {k: _build(v, tensors, depth + 1) for k, v in plan["dict"].items()}
        if "list" in plan:
            return [_build(v, tensors, depth + 1) for v in plan["list"]]
        if "tuple" in plan:
            return tuple(_build(v, tensors, depth + 1) for v in plan["tuple"])
        module, _, kind = plan["record"].rpartition(".")
        name = f"{MOVED.get(module, module)}.{kind}"
        items = {
            k: _build(v, tensors, depth + 1)
            for k, v in plan["fields"].items()
            if (name, k) not in RETIRED
        }
        return RECORDS[name](**items)
    except (KeyError, TypeError, AttributeError) as error:
        raise WireError("a message was refused: its structure is not one Atoll knows") from error


def save_checkpoint(path: Path, tree: Tree, mode: int = 0o644) -> None:
    """Write a checkpoint. Its file has the permissions `mode`."""
    data = encode(tree)
    write_atomically(path, hashlib.sha256(data).digest() + data, mode)


def load_checkpoint(path: Path) -> Tree:
    """Read a checkpoint. Raise a `DataError` if it is missing, damaged or of another version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise DataError(
            f"checkpoint {path} is damaged (its checksum does not match); delete it to start this "
            "seed again from round 0"
        )
    try:
        return decode(data[32:], limit=1 << 40, finite=False)
    except WireError as error:
        raise DataError(f"checkpoint {path} was written by another version of Atoll") from error


def pack_states(states: Tree) -> Tree:
    """Pack private states for a checkpoint. States of equal shape are stacked to save space."""
    if not isinstance(states, list):
        return states  # from an engine whose clients store their states elsewhere
    alike: dict[object, list[int]] = {}
    for position, state in enumerate(states):
        alike.setdefault(shapes(state), []).append(position)
    return [
        {"clients": torch.tensor(group), "states": stack([states[p] for p in group])}
        for group in alike.values()
    ]


def unpack_states(packed: Tree) -> Tree:
    """Undo `pack_states`: return the private states in the clients' order."""
    if not isinstance(packed, list):
        return packed
    found: dict[int, Tree] = {}
    for group in packed:
        clients = group["clients"].tolist()
        found |= zip(clients, unstack(group["states"], len(clients)), strict=True)
    return [found[position] for position in range(len(found))]
