"""Checks before the work, and numbers for JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from atoll.experiment.folder import check_folder
from atoll.present.chart_png import need_matplotlib


def check_output(out: Path) -> None:
    """Refuse before the work if files or pictures cannot be written."""
    check_folder(out, resuming=True)
    need_matplotlib()


def plain_json(value: Any) -> Any:
    """Arrays as lists and undefined numbers as None, all the way down."""
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain_json(value.tolist())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, int | str) else str(value)
