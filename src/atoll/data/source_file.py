"""A loaded source in one file of safetensors: arrays, and the rest as JSON."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from atoll.data.source import GraphGroup, GraphSet, Source

SPARSE = ("data", "indices", "indptr")


def save_source(source: Source | GraphSet | GraphGroup, path: Path) -> None:
    """Write a source without an encoder, which only a user's own tables have."""
    parts = source.sets if isinstance(source, GraphGroup) else (source,)
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {"kind": type(source).__name__, "name": source.name, "parts": []}
    for number, part in enumerate(parts):
        values = {field.name: getattr(part, field.name) for field in fields(part)}
        values |= {f"columns.{name}": one for name, one in values.pop("columns", {}).items()}
        if not isinstance(x := values["x"], np.ndarray):
            del values["x"]
            values |= {f"x.{name}": getattr(x, name) for name in SPARSE} | {"x.shape": x.shape}
        plain = {}
        for name, value in values.items():
            if isinstance(value, np.ndarray) and value.dtype.kind not in "UO":
                arrays[f"{number}.{name}"] = np.ascontiguousarray(value)
            else:
                plain[name] = value.tolist() if isinstance(value, np.ndarray) else value
        about["parts"].append(plain)
    save_file(arrays, path, metadata={"about": json.dumps(about)})


def load_source(path: Path) -> Source | GraphSet | GraphGroup:
    """The source that `save_source` wrote."""
    with safe_open(path, framework="np") as file:
        about = json.loads(file.metadata()["about"])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    parts: list[Any] = []
    for number, plain in enumerate(about["parts"]):
        start = f"{number}."
        values = plain | {
            k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)
        }
        if about["kind"] == "Source":
            values["columns"] = {
                name.removeprefix("columns."): np.array(values.pop(name))
                for name in [name for name in values if name.startswith("columns.")]
            }
            values["class_names"] = tuple(values["class_names"])
        if "x.shape" in values:
            import scipy.sparse as sp

            entries = tuple(values.pop(f"x.{name}") for name in SPARSE)
            values["x"] = sp.csr_array(entries, shape=tuple(values.pop("x.shape")))
        parts.append((Source if about["kind"] == "Source" else GraphSet)(**values))
    if about["kind"] == "GraphGroup":
        return GraphGroup(about["name"], tuple(parts))
    found: Source | GraphSet = parts[0]
    return found
