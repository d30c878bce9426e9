"""An exported model gives the logits of the run without Atoll."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import metadata

import numpy as np
import pytest
import tomli_w
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import atoll
from atoll.core.errors import AtollError
from atoll.experiment.export import export
from atoll.experiment.predict import predict
from atoll.experiment.threshold import Threshold
from tests.data.own.graphs import folder
from tests.experiment.test_run import rings

ALONE = """
import importlib.util, json, runpy, sys
sys.path.append(sys.argv[2])
others = "atoll", "sklearn", "pandas", "pyarrow"
there = [name for name in others if importlib.util.find_spec(name)]
assert not there, there
import torch
for folder, data in json.loads(sys.argv[1]):
    model = runpy.run_path(folder + "/model.py")
    net, about = model["load"](folder)
    graph = model["read_graph"](data + "/nodes.csv", data + "/edges.csv", about)
    with torch.no_grad():
        print(json.dumps(net(*graph[1:]).tolist()))
"""
CASES = [
    ("fedavg", {"net": "gcn", "layers": 3}, "", "weighted"),
    ("fedprox", {"net": "gcn", "head": "linear"}, "", "plain"),
    ("fedavg", {"net": "sage"}, "", "plain"),
    ("fedavg", {"net": "gat", "hidden": 16, "heads": 4}, "", "plain"),
    ("fedavg", {"net": "sgc"}, "", "weighted"),
    ("fedavg", {"net": "mlp"}, "", "plain"),
    ("fedper", {}, "1", "plain"),
    ("fedpub", {}, "1", "plain"),
    ("fedgta", {}, "1", "plain"),
    ("local", {}, "1", "plain"),
    ("fedtad", {}, "", "plain"),
    ("fedavg", {"net": "residual"}, "", "weighted"),
    ("fedprox", {"net": "residual", "norm": "none", "jump": True}, "", "plain"),
    ("fedavg", {"net": "duo"}, "", "plain"),
    ("reef", {}, "1", "weighted"),
    ("moon", {}, "", "plain"),
    ("fedavg", {}, "", "owners"),
    ("fedavg", {}, "south", "owners"),
]


def fresh(path):
    """A folder with torch, torch_geometric and what these two require, and no other package."""
    wanted, seen = ["torch", "torch_geometric"], set()
    path.mkdir()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        for line in found.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                wanted.append(needed.name)
        for part in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (path / part).exists():
                (path / part).symlink_to(found.locate_file(part))
    return path


def write(path, weighted=False, owners=False):
    rows = [
        f"{i:03},{'xy'[i % 2]},{'uvw'[i % 3]},{i * 0.37 % 1:.3f},{i % 5 > 2}" for i in range(60)
    ]
    if owners:
        rows = [f"{row},{'north' if i < 25 else 'south'}" for i, row in enumerate(rows)]
    ends = [f"{i:03},{(i + step) % 60:03}" for i in range(60) for step in (1, 2, 5, 0)]
    ends = [f"{pair},{1 + k % 3}" for k, pair in enumerate(ends)] if weighted else ends
    head = "source,target,weight" if weighted else "source,target"
    columns = "id,label,kind,size,big,owner" if owners else "id,label,kind,size,big"
    tables = [columns, *rows, ""], [head, *ends, ""]
    return folder(path, *map("\n".join, tables))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables")
    kinds = ("plain", "weighted", "owners")
    return {kind: write(path / kind, kind == "weighted", kind == "owners") for kind in kinds}


@pytest.fixture(scope="module")
def found(tables, tmp_path_factory):
    """The logits of every case, of the exported models (in one process) and of the runs."""
    path, pairs, expected = tmp_path_factory.mktemp("exports"), [], []
    for number, (method, settings, client, kind) in enumerate(CASES):
        data, run, out = tables[kind], path / f"run-{number}", path / f"model-{number}"
        divided = {} if kind == "owners" else {"clients": 2, "partition": "random"}
        atoll.run(method, str(data), out=run, rounds=2, set=settings, **divided)
        export(run, out, client=client)
        pairs.append((str(out), str(data)))
        expected.append(predict(run, data, client=client or None).logits)
    alone = fresh(path / "packages")
    # No site-packages, no variables, no user's folder: only the folder given is searched.
    words = [sys.executable, "-I", "-S", "-c", ALONE, json.dumps(pairs), str(alone)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "note: 16 edges between owners were removed\n"
    return list(zip(map(json.loads, done.stdout.splitlines()), expected, strict=True))


@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(case[:2]) for case in CASES])
def test_the_exported_model_gives_the_logits(found, case):
    alone, expected = found[case]
    np.testing.assert_allclose(np.array(alone), expected, rtol=0, atol=1e-6)


def test_the_file_is_a_program(tables, tmp_path):
    atoll.run("fedavg", str(tables["plain"]), out=tmp_path / "run", clients=2, rounds=1)
    file = tmp_path / "run/model/seed-0/model.toml"
    chosen = Threshold("max_f1", 0.0, 1, 0.5, 0.5, 0.5).plain()
    file.write_text(tomli_w.dumps({**tomllib.loads(file.read_text()), "threshold": chosen}))
    export(tmp_path / "run", tmp_path / "model")
    words = [
        tmp_path / "model/model.py",
        *(tables["plain"] / f"{n}.csv" for n in ("nodes", "edges")),
    ]
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "id,class,alert,p_x,p_y"
    assert len(lines) == 61
    assert all(",yes," in line for line in lines[1:])
    assert lines[1].startswith("000,")
    about = json.loads((tmp_path / "model/model.json").read_text())
    assert about["run"]["method"] == "fedavg"


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("fedath", "fedath computes more than its network does"),
        ("moon", "moon computes more than its network does"),
        ("fediih", "network DisenGCN has no layers of PyG"),
        ("fedper", "fedper has a model for each client"),
    ],
)
def test_a_model_that_pyg_cannot_express_is_refused(tables, tmp_path, method, sentence):
    options = {"clients": 2, "partition": "random", "rounds": 1}
    options |= {"set": {"head": 4}} if method == "moon" else {}
    atoll.run(method, str(tables["plain"]), out=tmp_path / "run", **options)
    client = "0" if method == "fediih" else ""
    with pytest.raises(AtollError, match=sentence):
        export(tmp_path / "run", tmp_path / "model", client=client)
    assert not (tmp_path / "model").exists()


def test_other_wishes_are_refused(tables, tmp_path):
    atoll.run("fedavg", str(tables["plain"]), out=tmp_path / "run", clients=2, rounds=1)
    with pytest.raises(AtollError, match="unknown form of an export 'onnx'"):
        export(tmp_path / "run", tmp_path / "model", to="onnx")
    with pytest.raises(AtollError, match="exists and is not empty"):
        export(tmp_path / "run", tmp_path)
    graphs = {"protocol": "gcfl", "clients": 3, "rounds": 1}
    atoll.run("fedavg", rings(60, 3, 0), out=tmp_path / "graphs", **graphs)
    with pytest.raises(AtollError, match="fedavg has a model for each client"):
        export(tmp_path / "graphs", tmp_path / "model")


@pytest.mark.parametrize(("method", "client"), [("fedavg", ""), ("fedper", "1")])
def test_a_result_gives_its_model_as_a_module(tables, tmp_path, method, client):
    options = {"clients": 2, "partition": "random", "rounds": 2}
    result = atoll.run(method, str(tables["plain"]), out=tmp_path / "run", **options)
    net = result.model(client)
    source = atoll.load(str(tables["plain"])).undirected_simple()
    with torch.no_grad():
        logits = net(torch.from_numpy(source.x), torch.from_numpy(source.edges))
    expected = result.predict(str(tables["plain"]), client=client or None).logits
    np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=1e-6)
    assert not net.training
    assert {leaf.device.type for leaf in net.parameters()} == {"cpu"}
    kinds = {type(one).__module__.split(".")[0] for one in net.layers}
    assert kinds == {"torch_geometric"}


def test_a_result_that_was_not_saved_has_no_model():
    result = atoll.run("fedavg", "lagoon:nodes=200", clients=2, rounds=1)
    with pytest.raises(AtollError, match="was not saved, so it has no model"):
        result.model()
