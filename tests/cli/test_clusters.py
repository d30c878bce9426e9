"""`atoll clusters`: its output, its files and its refusals."""

from __future__ import annotations

import json
from pathlib import Path


def test_clusters_of_a_saved_run(cli) -> None:
    data = ("--data", "lagoon:nodes=300", "--clients", 5, "--rounds", 4, "--set", "hidden=8")
    eager = [word for text in ("eps1=1e9", "eps2=0", "min_round=1") for word in ("--set", text)]
    cli("run", "gcfl", *data, *eager, "--out", "ours", "--quiet")
    cli("run", "local", *data, "--out", "alone", "--quiet")
    result = cli("clusters", "ours", "--against", "alone")
    lines = result.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert "all 5 clients, eps1 1e+09, eps2 0" in lines
    assert "least gain" in result.stdout
    names = sorted(path.name for path in Path("ours/clusters").iterdir())
    assert names == [
        "accuracy.png", "clusters.json", "gains.png", "heterogeneity.png", "losses.png",
        "norms.png", "tree.png",
    ]  # fmt: skip
    found = json.loads(cli("clusters", "ours", "--json", "--out", "there").stdout)
    assert found == json.loads(Path("there/clusters.json").read_text())
    assert found["baseline"] is None
    for arguments in (("alone",), ("nowhere",), ("ours", "--seed", 9), ("ours", "--against", ".")):
        refused = cli("clusters", *arguments, code=2)
        assert refused.stdout == ""
        assert refused.stderr.startswith("error: ")
        assert refused.stderr.count("\n") == 1
    assert not Path("nowhere").exists()
