"""`atoll demo`: three methods, one table."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_demo_compares_three_methods(cli, tmp_path: Path) -> None:
    result = cli("demo", "--rounds", 2, "--seeds", 1, "--out", "d")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "5 libraries own parts of one citation graph; nobody shows theirs."
    assert [line.split()[0] for line in lines if re.match(r"(local|fedavg|fedath) ", line)] == [
        "local", "fedavg", "fedath",
    ]  # fmt: skip
    assert lines[-1] == "Saved in d"
    for name in ("local", "fedavg", "fedath"):
        assert (tmp_path / "d" / name / "result.json").exists()
    found = cli("demo", "--out", "d", code=2).stderr
    assert "already holds a run" in found
