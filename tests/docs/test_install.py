"""Pages and errors install extras in one way, and only extras that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_extras_are_installed_alike_everywhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*/README.md")]
    named = set()
    for path in (*pages, *(ROOT / "src").rglob("*.py")):
        for line in re.findall(r"pip install .*?[\]'\"`\n]", path.read_text()):
            assert "-e '.[" not in line, f"{path.name}: {line}"
        if path.suffix == ".py":  # errors: one function writes the command
            assert ("pip install" in path.read_text()) == (path.name == "errors.py"), path.name
        named |= set(re.findall(r"'atoll-fgl\[([\w,]+)\]'", path.read_text()))
        named |= set(re.findall(r'not_installed\(".*", ".*", "(\w+)"\)', path.read_text()))
    extras = {one for some in named for one in some.split(",")}
    assert {"tune", "federation", "privacy", "ogb"} <= extras <= EXTRAS.keys()
