"""`atoll inspect`: tables, plots and numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

THREE_BANKS = Path(__file__).resolve().parents[2] / "examples" / "three-banks"


def test_inspect_writes_plots_and_numbers(cli, tmp_path: Path) -> None:
    options = ("inspect", "--data", "lagoon:nodes=150", "--clients", 3)
    result = cli(*options, "--out", "look")
    assert sorted(path.name for path in (tmp_path / "look").iterdir()) == [
        "divergence.png", "heterogeneity.json", "homophily.png", "labels.png", "sizes.png",
    ]  # fmt: skip
    for path in (tmp_path / "look").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "look" / "heterogeneity.json").read_text())
    assert numbers["about"]["clients"] == 3
    assert "Clients of lagoon" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_inspect_takes_own_data(cli) -> None:
    text = cli("inspect", "--data", THREE_BANKS).stdout
    assert "Clients of three-banks" in text
    assert "15 duplicate edges were dropped" in text
    assert (
        len(re.findall(r"^│ +\d │ +80 │", text, re.MULTILINE)) == 3
    )  # by bank, as the schema says
