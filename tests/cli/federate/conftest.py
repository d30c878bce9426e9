"""A refusal of `atoll federate`, in a folder with two kits: `site` and `admin`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.deploy.kits import ADMIN


@pytest.fixture
def refusal(cli, tmp_path: Path) -> Callable[..., str]:
    """Runs a command of `atoll federate` that exits with 2, and returns its error."""
    for name in ("site", "admin"):
        (tmp_path / name).mkdir()
        about = {"name": ADMIN if name == "admin" else name, "org": "x", "host": "h", "port": 1}
        (tmp_path / name / "kit.json").write_text(json.dumps({**about, "sites": ["site"]}))
    return lambda *words: cli("federate", *words, code=2).stderr
