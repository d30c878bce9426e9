"""The file that an export copies: it reads tables as the loader does, and refuses others."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atoll.data.own.reader import load_own
from atoll.experiment import exported
from atoll.experiment.exported import Network, read_graph
from tests.data.own.graphs import folder

NODES = "id, age,kind,ok,label\na,1.5,shop,true,x\nb,-2,home,False,y\nc,3,shop,true,x\n"
EDGES = "source,target,weight\na,b,2\nb,a,7\nc,c,1\nb,c,3\n"


def about(path: Path):
    source, _ = load_own(folder(path / "old", NODES, EDGES))
    return source, {"encoder": source.encoder.plain()}


def test_tables_become_the_tensors_of_the_loader(tmp_path):
    source, known = about(tmp_path)
    ids, x, edges, weight = read_graph(
        tmp_path / "old/nodes.csv", tmp_path / "old/edges.csv", known
    )
    simple = source.undirected_simple()
    assert ids == ["a", "b", "c"]
    torch.testing.assert_close(x, torch.from_numpy(source.x))
    assert edges.tolist() == simple.edges.tolist()
    assert weight.tolist() == simple.weight.tolist()


MIXED = """id,age,kind,ok,since,paid,far,label
a,1.5,shop,yes,2020-01-05,"1.000,5",3,x
b,,home,,2021-06-30,"2,25",-7,y
c,NA,farm,no,,"7",12,x
d,4,,yes,1999-12-31,"0",5,y
"""
RULES = """
[columns]
age = {missing = "own category", empty = ["NA"], scale = "robust"}
kind = {kind = "category", values = ["shop"], other = "rest", missing = "own category"}
ok = {kind = "boolean", missing = "mean"}
since = {kind = "date", parts = ["days", "year", "week", "day"], missing = "median"}
paid = {kind = "number", decimal = ",", scale = "log"}
far = {scale = "range", range = [0, 10]}
"""


def test_rules_of_columns_are_applied_as_by_the_loader(tmp_path):
    source, _ = load_own(folder(tmp_path, MIXED, EDGES, RULES))
    known = {"encoder": source.encoder.plain()}
    _, x, _, _ = read_graph(tmp_path / "nodes.csv", tmp_path / "edges.csv", known)
    assert x.shape[1] == 15
    torch.testing.assert_close(x, torch.from_numpy(source.x), rtol=1e-6, atol=1e-6)
    folder(tmp_path, MIXED.replace("2,25", ""), EDGES)
    with pytest.raises(ValueError, match="paid has no value in a row"):
        read_graph(tmp_path / "nodes.csv", tmp_path / "edges.csv", known)


def test_edges_between_owners_are_left_out(tmp_path, capsys):
    _, known = about(tmp_path)
    lines = zip(NODES.splitlines(), ("shop", "n", "n", "s"), strict=True)
    folder(tmp_path / "new", "\n".join(f"{line},{owner}" for line, owner in lines), EDGES)
    files = tmp_path / "new/nodes.csv", tmp_path / "new/edges.csv"
    _, _, edges, weight = read_graph(*files, known | {"owner": "shop"})
    assert edges.tolist() == [[0, 1], [1, 0]]
    assert weight.tolist() == [2, 2]
    assert capsys.readouterr().err == "note: 1 edge between owners was removed\n"
    assert read_graph(*files, known | {"owner": "bank"})[2].shape[1] == 4
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("repeated", ["drop", "sum", "count"])
@pytest.mark.parametrize("directed", [True, False])
def test_directions_and_parallel_edges_are_those_of_the_loader(tmp_path, directed, repeated):
    edges = "source,target,weight\na,b,2\na,b,3\nb,a,7\nc,c,1\nb,c,3\n"
    schema = f"[edges]\ndirected={str(directed).lower()}\nduplicate_edges='{repeated}'\n"
    schema += "self_loops='keep'\n"
    source, _ = load_own(folder(tmp_path, NODES, edges, schema))
    known = {"encoder": source.encoder.plain()}
    _, _, pairs, weight = read_graph(tmp_path / "nodes.csv", tmp_path / "edges.csv", known)
    assert pairs.tolist() == source.edges.tolist()
    assert weight.tolist() == source.weight.tolist()


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        (NODES.replace("home", "farm"), "kind is 'farm', a category that training never saw"),
        (NODES.replace("age", "years"), "lacks the columns age"),
        (NODES + "b,1,shop,true,x\n", "nodes.csv has several rows with the id 'b'"),
        (NODES.replace("-2", "nan"), "age is 'nan' in a row; the model needs a finite number"),
        (NODES.replace("-2", "-inf"), "age is '-inf' in a row"),
        (NODES.replace("-2", "two"), "age is 'two' in a row"),
        (NODES.replace("id", "name"), "lacks the columns id"),
        (NODES.replace("c,3", "d,3"), "edges.csv names 'c', which is not in .*nodes.csv"),
        (NODES.partition("\n")[0], "nodes.csv has no rows"),
        (NODES.replace("b,-2", ",-2"), "nodes.csv has a row without an id"),
        (NODES.replace("-2", "1e39"), "nodes.csv has a number that is too large, in row 3"),
        (NODES.replace("ok", "age"), "nodes.csv has several columns 'age'"),
        (NODES.replace("b,-2", "b,-2,5"), "nodes.csv has 6 values in row 3, not 5"),
        (NODES.replace("b,-2", "b"), "nodes.csv has 4 values in row 3, not 5"),
        (NODES.replace("home", "h" * 200_000), "nodes.csv cannot be read as CSV: field larger"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, nodes, sentence):
    _, known = about(tmp_path)
    folder(tmp_path / "new", nodes, EDGES)
    with pytest.raises(ValueError, match=sentence):
        read_graph(tmp_path / "new/nodes.csv", tmp_path / "new/edges.csv", known)


@pytest.mark.parametrize(
    ("edges", "sentence"),
    [
        (EDGES.replace("target", "b"), "edges.csv lacks a column for the target of an edge"),
        (EDGES.replace("a,b,2", "a,b,1e39"), "the weight of an edge is too large"),
    ],
)
def test_edges_that_do_not_fit_are_refused(tmp_path, edges, sentence):
    _, known = about(tmp_path)
    folder(tmp_path / "new", NODES, edges)
    with pytest.raises(ValueError, match=sentence):
        read_graph(tmp_path / "new/nodes.csv", tmp_path / "new/edges.csv", known)


def test_a_model_without_tables_takes_tensors(tmp_path):
    with pytest.raises(ValueError, match="call the network with tensors"):
        read_graph(tmp_path, tmp_path, {"encoder": None})
    net = Network({"layers": [["gcn", 4, 8, 1], ["linear", 8, 3, 1]], "activation": "relu"})
    assert net(torch.ones(5, 4), torch.tensor([[0, 1], [1, 0]])).shape == (5, 3)


def test_the_file_imports_only_torch_and_pyg():
    tree = ast.parse(Path(exported.__file__).read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    tops = {name.partition(".")[0] for name in found}
    assert tops == {
        "__future__",
        "csv",
        "datetime",
        "json",
        "math",
        "sys",
        "pathlib",
        "typing",
        "torch",
        "torch_geometric",
    }


@pytest.mark.parametrize("weight", ["nan", "inf", "", "much"])
def test_a_weight_that_is_no_number_is_refused(tmp_path, weight):
    _, known = about(tmp_path)
    folder(tmp_path / "new", NODES, EDGES.replace("b,c,3", f"b,c,{weight}"))
    with pytest.raises(ValueError, match=f"weight is '{weight}' in a row"):
        read_graph(tmp_path / "new/nodes.csv", tmp_path / "new/edges.csv", known)


def test_the_program_prints_one_sentence(tmp_path):
    _, known = about(tmp_path)
    layers = {"layers": [["linear", 4, 2, 1]], "activation": "relu", "classes": ["x", "y"]}
    (tmp_path / "model.json").write_text(json.dumps(known | layers | {"alert": None}))
    torch.save(Network(layers).state_dict(), tmp_path / "weights.pt")
    (tmp_path / "model.py").write_text(Path(exported.__file__).read_text())
    folder(tmp_path / "new", NODES + "b,1,shop,true,x\n", EDGES)
    files = [str(tmp_path / "new" / name) for name in ("nodes.csv", "edges.csv")]
    for given in (files, []):
        command = [sys.executable, str(tmp_path / "model.py"), *given]
        found = subprocess.run(command, check=False, capture_output=True, text=True)
        assert found.returncode == 1
        assert found.stderr.startswith("error: ")
        assert found.stderr.count("\n") == 1
        assert found.stdout == ""
