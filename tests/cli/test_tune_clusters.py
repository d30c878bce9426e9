"""`atoll tune-clusters`: its output, its files and its refusals."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

THREE_BANKS = Path(__file__).resolve().parents[2] / "examples" / "three-banks"
TUNE = (
    "tune-clusters", "--data", "lagoon:nodes=300", "--clients", 4, "--rounds", 8, "--epochs", 1,
    "--set", "hidden=8",
)  # fmt: skip


def test_tuning_proposes_and_says_how_to_go_on(cli) -> None:
    result = cli(*TUNE, "--set", "min_round=4", "--grid", "--out", "t")
    lines = result.stdout.splitlines()
    text = " ".join(result.stdout.split())
    assert "gcfl without splits: lagoon:nodes=300, 4 clients, column:owner, 8 rounds" in text
    assert "eps1 | eps2" in result.stdout
    go_on = next(line for line in lines if line.startswith("  atoll run gcfl"))
    assert max(len(line) for line in lines if line not in (go_on, lines[-1])) <= 80
    run = cli(*shlex.split(go_on)[1:], "--rounds", 2, "--json", "--quiet")
    assert json.loads(run.stdout)["method"] == "gcfl"
    names = sorted(path.name for path in Path("t").iterdir())
    assert names == ["norms.csv", "tune-clusters.json", "tune-clusters.png"]


def test_tuning_takes_a_graph_of_your_own_and_prints_json(cli) -> None:
    tune = ("tune-clusters", "--data", THREE_BANKS, "--partition", "column:bank", "--rounds", 8)
    found = json.loads(cli(*tune, "--json").stdout)
    assert len(found["clients"]) == 3
    assert found["eps1"] > 0
    assert f"--data {THREE_BANKS} --partition column:bank" in found["command"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("local",), "local does not split clusters; this command needs gcfl"),
        (("--rounds", 3), "rounds is 3; give at least 8 to see where it ends"),
        (("--set", "eps1"), "--set takes key=value, but got 'eps1'; write --set KEY=VALUE"),
        (("--out", "file"), None),
    ],
)
def test_mistakes_in_tuning_are_one_sentence(cli, arguments, sentence: str | None) -> None:
    Path("file").write_text("")
    result = cli(*TUNE, *arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    if sentence is not None:
        assert result.stderr == f"error: {sentence}\n"
