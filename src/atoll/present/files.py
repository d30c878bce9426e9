"""Write the results of a command (tables, numbers and pictures) into one folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.files import write_atomically
from atoll.experiment.folder import check_folder
from atoll.present.chart import Chart, Panels
from atoll.present.chart_png import image, need_matplotlib
from atoll.present.tables import Table, csv_text, latex, markdown

TABLES: dict[str, Callable[[Table], str]] = {".csv": csv_text, ".md": markdown, ".tex": latex}


def check_output(out: Path) -> None:
    """Raise an error before the work if the folder or matplotlib cannot be used."""
    check_folder(out, resuming=True)
    need_matplotlib()


def write_all(out: str | Path, files: Mapping[str, object]) -> list[Path]:
    """Write files atomically into a folder, and only if every file can be made.

    Text and bytes are written unchanged. The suffix of a name decides the format of a `Table`,
    `Chart` or `Panels`. Any other value of a `.json` file becomes JSON, with null for undefined
    numbers. None deletes an earlier file.
    """
    out = Path(out)
    check_folder(out, resuming=True)
    if any(name.endswith(".png") for name in files):
        need_matplotlib()
    contents = {name: _content(name, value) for name, value in files.items() if value is not None}
    for name in files.keys() - contents.keys():
        (out / name).unlink(missing_ok=True)
    for name, content in contents.items():
        write_atomically(out / name, content)
    return [out / name for name in contents]


def _content(name: str, value: object) -> bytes:
    ending = Path(name).suffix
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, Table) and ending in TABLES:
        return TABLES[ending](value).encode()
    if isinstance(value, Chart | Panels) and ending in (".png", ".svg"):
        return image(value, ending.removeprefix("."))
    if ending == ".json":
        return (json.dumps(plain_json(value), indent=1, allow_nan=False) + "\n").encode()
    raise TypeError(f"'{name}' cannot hold a {type(value).__name__}; give text, a table or a chart")


def plain_json(value: object) -> Any:
    """Convert arrays to lists and undefined numbers to None, recursively."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain_json(value.tolist())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, int | str) else str(value)
