"""Comparisons: the same clients and seeds for all, grids decided by validation, tables, tests."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.core.errors import ConfigError
from atoll.methods import FedAvg, FedProx
from atoll.nn import GCN
from atoll.studies.compare.comparison import command, read_request
from atoll.studies.compare.plan import make_request

SMALL: dict[str, Any] = {"data": "lagoon:nodes=150", "clients": 3, "rounds": 2, "seeds": 2}


def test_all_methods_get_the_clients_and_seeds_of_plain_runs(tmp_path: Path) -> None:
    found = atoll.compare(["fedavg", "fedprox:mu=0.1"], out=tmp_path, **SMALL)
    assert found.folder == tmp_path
    for name, settings in (("fedavg", {}), ("fedprox", {"mu": 0.1})):
        alone = atoll.run(name, set=settings, **SMALL).metrics()["test_accuracy"]
        row = next(row for row in found.tables[0].rows if row.method.startswith(name))
        assert row.scores.tolist() == alone["per_seed"]
        assert (row.mean, row.std) == pytest.approx((alone["mean"], alone["std"]))
    cells = sorted((tmp_path / "cells").iterdir())
    for seed in range(2):
        first, second = (cell / f"seed-{seed}" / "partition.npz" for cell in cells)
        assert first.read_bytes() == second.read_bytes()
    assert json.loads((tmp_path / "compare.json").read_text()) == found.summary()
    again = atoll.compare(["fedavg", "fedprox:mu=0.1"], out=tmp_path, **SMALL)
    assert again.table() == found.table()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["begin", "end"] * 2


def test_nothing_is_left_behind_without_a_folder(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = atoll.compare(["local", "fedavg"], **{**SMALL, "seeds": 1})
    assert found.folder is None
    assert list(tmp_path.iterdir()) == []
    assert found.tests()[0]["by"] == "nothing"
    assert "One seed cannot separate a difference from noise" in repr(found)


def test_objects_may_be_compared_too(tmp_path: Path) -> None:
    federation = atoll.partition(atoll.load("lagoon:nodes=150"), "louvain", clients=2)
    net = GCN(federation.features, federation.classes, hidden=8)
    methods = {"weak": FedProx(net=net, mu=0.01), "strong": FedProx(net=net, mu=1.0), "avg":
               FedAvg(net=net)}  # fmt: skip
    found = atoll.compare(methods, federation, rounds=2, seeds=2, out=tmp_path, against="avg")
    assert [row.method for row in found.tables[0].rows] == ["weak", "strong", "avg"]
    alone = atoll.run(methods["strong"], federation, rounds=2, seeds=2).metrics()["test_accuracy"]
    assert found.tables[0].rows[1].scores.tolist() == alone["per_seed"]
    assert [test["against"] for test in found.tests()] == ["avg", "avg"]
    saved = json.loads((tmp_path / "study.json").read_text())["command"]
    assert saved.startswith("# started in Python with objects (weak, strong, avg, lagoon)")
    assert saved.endswith(f"the same call of atoll.compare and out='{tmp_path}'")
    with pytest.raises(ConfigError, match=r"objects \(weak, strong, avg, lagoon\)"):
        read_request(tmp_path)
    with pytest.raises(ConfigError, match=r"was divided with clients .*; remove clients"):
        atoll.compare(methods, federation, clients=3, rounds=2)
    with pytest.raises(ConfigError, match="'avg' is a method object with its own hyper-parameters"):
        atoll.compare({"avg": methods["avg"]}, federation, rounds=2, set={"hidden": 4})


def test_the_saved_command_asks_for_the_same() -> None:
    request = make_request(
        ["fedavg", "fedprox:mu=0.1"], "cora,pubmed", clients=[5, 10], grid={"lr": ["0.1", "1"]},
        options={"set": {"hidden": "8"}, "rounds": 3, "allow": ["no-edge"], "batch_size": 4},
        against="fedavg", alpha=0.1,
    )  # fmt: skip
    assert command(request, Path("s")) == (
        "atoll compare fedavg fedprox:mu=0.1 --data cora,pubmed --clients 5,10 --grid lr=0.1,1 "
        "--seeds 5 --set hidden=8 --rounds 3 --allow no-edge --batch-size 4 --against fedavg "
        "--alpha 0.1 --out s"
    )


def test_labels_of_ones_own_are_part_of_the_saved_command() -> None:
    given = {"weak": "fedprox:mu=0.01", "quite strong": "fedprox:mu=1", "fedavg": "fedavg"}
    request = make_request(given)
    saved = command(request, Path("s"))
    words = shlex.split(saved)[2:5]
    assert words == ["weak=fedprox:mu=0.01", "quite strong=fedprox:mu=1", "fedavg"]
    assert make_request(words) == request
    # A path that contains "=" is no label, and a label without a command becomes a comment.
    assert list(make_request(["a/b=c/mine.py:Mine"]).methods) == ["a/b=c/mine.py:Mine"]
    assert command(make_request({"mu=1": "fedprox:mu=1"}), Path("s")).startswith("# started in Pyt")
