"""Cora through the command line: every protocol for nodes, and sets of graphs refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import atoll
from atoll.cli import main
from atoll.study.protocols import PROTOCOLS

pytestmark = pytest.mark.data


@pytest.fixture
def run(real_data: Callable[[str], Path], tmp_path: Path) -> Callable[..., dict]:
    """`atoll run` on a real data set; the saved result."""

    def call(data: str, *arguments: object, code: int = 0) -> dict | str:
        root = real_data(data)
        options = ["--data", data, "--data-root", root, "--out", tmp_path / "run", "--json"]
        done = CliRunner().invoke(main, [str(a) for a in ("run", *arguments, *options, "--quiet")])
        assert done.exit_code == code, done.output
        if code:
            return done.stderr
        summary = json.loads(done.stdout)
        saved = json.loads((tmp_path / "run" / "result.json").read_text())
        assert saved["metrics"] == summary["metrics"]
        return saved

    return call


@pytest.mark.parametrize("protocol", [n for n, rules in PROTOCOLS.items() if not rules.graphs])
def test_cora_runs_under_every_protocol_for_nodes(run, protocol: str) -> None:
    saved = run("cora", "fedavg", "--protocol", protocol, "--clients", 10, "--rounds", 5)
    assert saved["clients"] == 10
    assert saved["protocol"] == protocol
    assert saved["scored"] == {"deployed": "global", "local": "local"}[PROTOCOLS[protocol].evaluate]
    assert saved["metrics"]["test_accuracy"]["mean"] > 0.2
    connected = 2485 if protocol == "fediih" else 2708
    assert sum(saved["federation"]["nodes"]) == connected


def test_fedtads_partition_and_split_are_the_published_ones(
    real_data: Callable[[str], Path], tmp_path: Path
) -> None:
    root = str(real_data("cora"))
    result = atoll.run("fedavg", "cora", protocol="fedtad", rounds=1, data_root=root)
    assert result.federation["sha1"] == "7a7bf8ee9370"
    assert result.seeds[0].history.counts.sum(0).tolist() == [512, 1056, 1140]


def test_engines_agree_on_cora(run, tmp_path: Path) -> None:
    accuracies = []
    for engine in ("serial", "fused"):
        saved = run("cora", "--clients", 10, "--partition", "louvain", "--rounds", 3, "--engine",
                    engine)  # fmt: skip
        (tmp_path / "run").rename(tmp_path / engine)
        accuracies.append(saved["metrics"]["test_accuracy"]["per_seed"])
    assert accuracies[0] == accuracies[1]


def test_one_graph_under_a_protocol_for_sets_of_graphs(run) -> None:
    assert run("cora", "--protocol", "gcfl", code=2) == (
        "error: protocol 'gcfl' is for sets of graphs, but 'cora' is one graph; choose another "
        "protocol\n"
    )


@pytest.mark.parametrize("protocol", ["strict", "gcfl"])
def test_a_set_of_graphs(run, protocol: str) -> None:
    assert run("MUTAG", "--protocol", protocol, code=2) == (
        "error: 'MUTAG' is a set of graphs with one label each; node classification needs one "
        "graph: see `atoll datasets`\n"
    )
