"""Loading a user's own graph: every form that works, and what the options do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from atoll.core.errors import DataError
from atoll.data.own.edges import Ends, clean_edges
from atoll.data.own.reader import from_networkx, load_own
from atoll.data.own.schema import Loading, OwnOptions
from atoll.data.source import TEST, TRAIN, UNUSED, VAL, Source

NODES = """id,age,kind,label,client,split
a,1.5,shop,x,north,train
b,2.5,home,y,north,val
c,3.5,shop,x,south,test
d,4.5,home,,south,
"""
EDGES = "source,target\na,b\nb,c\nc,d\n"
EXAMPLE = Path(__file__).parents[3] / "examples" / "three-banks"


def folder(path: Path, nodes: str | bytes = NODES, edges: str = EDGES, schema: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.joinpath("nodes.csv").write_bytes(nodes if isinstance(nodes, bytes) else nodes.encode())
    path.joinpath("edges.csv").write_text(edges)
    if schema:
        path.joinpath("schema.toml").write_text(schema)
    return path


def pairs(source: Source) -> list[tuple[int, int]]:
    return [(int(u), int(v)) for u, v in source.edges.T]


# ------------------------------------------------------------------------------ what works


def test_a_folder_of_csv(tmp_path: Path) -> None:
    source, report = load_own(folder(tmp_path / "mine"))
    assert source.name == "mine"
    assert source.x.dtype == np.float32
    np.testing.assert_allclose(source.x, [[1.5, 0, 1], [2.5, 1, 0], [3.5, 0, 1], [4.5, 1, 0]])
    assert report.features == ("age", "kind=home", "kind=shop")
    assert source.y.tolist() == [0, 1, 0, -1]
    assert (source.classes, report.classes) == (2, ("x", "y"))
    assert source.split is not None
    assert source.split.tolist() == [TRAIN, VAL, TEST, UNUSED]
    assert source.columns["client"].tolist() == ["north", "north", "south", "south"]
    assert source.columns["id"].tolist() == ["a", "b", "c", "d"]
    assert pairs(source) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    assert source.weight is None
    assert report.messages == ("column 'kind' became 2 columns, one per category",)


def test_parquet_with_whole_number_ids_matches_csv(tmp_path: Path) -> None:
    nodes = "id,a,b,label\n7,1,true,0\n3,2.5,false,1\n5,-1,true,10\n"
    edges = "src,dst,weight\n7,3,2\n3,5,0.5\n"
    from_csv, _ = load_own(folder(tmp_path / "csv", nodes, edges))
    other = tmp_path / "parquet"
    other.mkdir()
    table = {"id": [7, 3, 5], "a": [1, 2.5, -1], "b": [True, False, True], "label": [0, 1, 10]}
    pa.parquet.write_table(pa.table(table), other / "nodes.parquet")
    table = {"src": [7, 3], "dst": [3, 5], "weight": [2, 0.5]}
    pa.parquet.write_table(pa.table(table), other / "edges.parquet")
    source, report = load_own(other)
    np.testing.assert_array_equal(source.x, from_csv.x)
    np.testing.assert_array_equal(source.y, from_csv.y)
    np.testing.assert_array_equal(source.edges, from_csv.edges)
    np.testing.assert_array_equal(source.weight, from_csv.weight)
    assert source.columns["id"].dtype == np.int64
    assert report.classes == ("0", "1", "10")  # in the order of numbers, not of texts


def test_parquet_nodes_with_csv_edges(tmp_path: Path) -> None:
    folder(tmp_path, edges="source,target\n1,2\n").joinpath("nodes.csv").unlink()
    table = pa.table(
        {"id": [1, 2], "f": [0.5, 1.5], "label": pa.array(["p", "q"]).dictionary_encode()}
    )
    pa.parquet.write_table(table, tmp_path / "nodes.parquet")
    assert pairs(load_own(tmp_path)[0]) == [(0, 1), (1, 0)]


def test_ids_stay_text_where_they_look_like_numbers(tmp_path: Path) -> None:
    nodes = "id,f,label\n007,1,x\n7,2,y\n"
    source, _ = load_own(folder(tmp_path, nodes, "source,target\n 7, 007\n"))
    assert source.columns["id"].tolist() == ["007", "7"]
    assert pairs(source) == [(0, 1), (1, 0)]


def test_a_schema_gives_roles(tmp_path: Path) -> None:
    nodes = (
        "key,note,size,zone,team,bank,why\na,u1,1,10,r,B1,q\nb,u2,2,20,s,B2,q\nc,u3,3,10,r,B1,q\n"
    )
    edges = "p,q,n,when\na,b,2,x\nb,c,1,y\n"
    schema = """
    [nodes]
    id = "key"
    label = "team"
    owner = "bank"
    features = ["size"]
    categories = ["zone"]
    ignore = ["note"]
    [edges]
    source = "p"
    target = "q"
    weight = "n"
    directed = true
    """
    source, report = load_own(folder(tmp_path, nodes, edges, schema))
    assert report.features == ("size", "zone=10", "zone=20")
    assert set(source.columns) == {"id", "bank"}
    assert pairs(source) == [(0, 1), (1, 2)]
    assert source.weight is not None
    assert source.weight.tolist() == [2, 1]
    assert "nodes.csv: ignored 'note', 'why'" in report.messages
    assert "edges.csv: ignored 'when'" in report.messages


def test_a_schema_elsewhere_wins_over_the_folder_s_own(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", schema='[nodes]\nignore = ["age"]\n')
    other = tmp_path / "other.toml"
    other.write_text('[nodes]\nignore = ["kind"]\n')
    assert load_own(data)[1].features == ("kind=home", "kind=shop")
    assert load_own(data, schema=other)[1].features == ("age",)


def test_an_owner_option_keeps_a_column_out_of_the_features(tmp_path: Path) -> None:
    source, report = load_own(folder(tmp_path), options=OwnOptions(owner="kind"))
    assert report.features == ("age",)
    assert source.columns["kind"].tolist() == ["shop", "home", "shop", "home"]


def test_many_categories_become_a_sparse_array(tmp_path: Path) -> None:
    rows = "".join(f"n{i},t{i % 50:02d},{i % 2},{i}\n" for i in range(100))
    source, report = load_own(folder(tmp_path, "id,tag,label,f\n" + rows, "source,target\nn0,n1\n"))
    assert isinstance(source.x, sp.csr_array)
    assert source.x.shape == (100, 51)
    dense = source.x.toarray()
    np.testing.assert_array_equal(dense[:, 50], np.arange(100))
    np.testing.assert_array_equal(dense[:, :50].argmax(1), np.arange(100) % 50)
    assert dense[:, :50].sum() == 100
    assert report.features[0] == "tag=t00"


@pytest.mark.parametrize("saved", ["data", "dict"])
def test_b_tensors(tmp_path: Path, saved: str) -> None:
    values: dict[str, Any] = {
        "x": torch.tensor([[1.0, 2], [3, 4], [5, 6]], dtype=torch.float64),
        "edge_index": torch.tensor([[0, 1, 1], [1, 0, 2]]),
        "y": torch.tensor([[2], [0], [-1]]),
        "edge_weight": torch.tensor([2.0, 2, 3]),
        "train_mask": torch.tensor([True, False, False]),
        "test_mask": torch.tensor([False, True, False]),
        "client": torch.tensor([0, 0, 1]),
        "pos": torch.zeros(3, 3),
    }
    torch.save(Data(**values) if saved == "data" else values, tmp_path / "g.pt")
    source, report = load_own(tmp_path / "g.pt")
    assert (source.name, source.classes, report.classes) == ("g", 2, ("0", "2"))
    np.testing.assert_array_equal(source.x, np.array([[1, 2], [3, 4], [5, 6]], np.float32))
    assert source.y.tolist() == [1, 0, -1]
    assert pairs(source) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert source.weight is not None
    assert source.weight.tolist() == [2, 2, 3, 3]
    assert source.split is not None
    assert source.split.tolist() == [TRAIN, TEST, UNUSED]
    assert source.columns["client"].tolist() == [0, 0, 1]
    assert "1 edges were given in both directions and stand once" in report.messages
    assert "g.pt: ignored 'pos'" in report.messages


def test_c_networkx_and_graphml_agree(tmp_path: Path) -> None:
    graph = nx.DiGraph()
    graph.add_node("a", f=1.0, n=2, kind="k", label="yes")
    graph.add_node("b", f=0.5, n=3, kind="m", label="no")
    graph.add_node("c", f=1.5, n=4, kind="k", label="")
    graph.add_edge("a", "b", weight=2.0)
    graph.add_edge("b", "c", weight=1.0)
    source, report = from_networkx(graph)
    assert report.features == ("f", "n", "kind=k", "kind=m")
    assert source.y.tolist() == [1, 0, -1]
    assert source.weight is not None
    assert source.weight.tolist() == [2, 2, 1, 1]
    assert "networkx is directed" in report.messages[1]
    nx.write_graphml(graph, tmp_path / "g.graphml")
    other, _ = load_own(tmp_path / "g.graphml")
    assert other.name == "g"
    np.testing.assert_array_equal(other.x, source.x)
    np.testing.assert_array_equal(other.edges, source.edges)
    directed, _ = load_own(tmp_path / "g.graphml", options=OwnOptions(directed=True))
    assert pairs(directed) == [(0, 1), (1, 2)]


def test_d_a_folder_per_client_is_a_federation(tmp_path: Path) -> None:
    folder(tmp_path / "north", "id,f,kind,label\n1,1,u,x\n2,2,v,y\n", "source,target\n1,2\n")
    folder(tmp_path / "south", "id,kind,f,label\n1,w,3.5,z\n3,u,4,\n", "source,target\n3,1\n")
    source, report = load_own(tmp_path)
    assert source.columns["client"].tolist() == ["north", "north", "south", "south"]
    assert report.features == ("f", "kind=u", "kind=v", "kind=w")
    assert source.x[:, 0].tolist() == [1, 2, 3.5, 4]
    assert source.x[:, 1].tolist() == [1, 0, 0, 1]
    assert report.classes == ("x", "y", "z")
    assert pairs(source) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert "1 ids are used by more than one client; they stay different nodes" in report.messages


def test_the_example_loads_and_is_what_its_script_writes(tmp_path: Path) -> None:
    source, _ = load_own(EXAMPLE)
    assert (source.num_nodes, source.edges.shape[1], source.classes) == (240, 1140, 3)
    assert sorted(set(source.columns["bank"])) == ["harbour", "meadow", "summit"]
    code = (EXAMPLE / "make.py").read_text()
    tmp_path.joinpath("make.py").write_text(code)
    subprocess.run([sys.executable, str(tmp_path / "make.py")], check=True)
    for name in ("nodes.csv", "edges.csv"):
        assert tmp_path.joinpath(name).read_bytes() == EXAMPLE.joinpath(name).read_bytes()
        assert EXAMPLE.joinpath(name).stat().st_size < 40_000


# ------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    "schema",
    ["target = 'f'", "[nodes]\nlabel = 'f'", "task = 'node'\ntarget = 'f'\n[nodes]\nlabel = 'f'"],
)
def test_target_and_label_name_the_column_to_predict(schema: str, tmp_path: Path) -> None:
    tmp_path.joinpath("nodes.csv").write_text("id,f,label\na,1,x\nb,2,y\nc,1,x\n")
    tmp_path.joinpath("edges.csv").write_text("source,target\na,b\n")
    tmp_path.joinpath("schema.toml").write_text(schema)
    source, report = load_own(tmp_path)
    assert source.y.tolist() == [0, 1, 0]
    assert (report.classes, report.features) == (("1", "2"), ("label=x", "label=y"))


def test_findings_are_counted_and_dropped(tmp_path: Path) -> None:
    nodes = "id,f,label\na,1,x\nb,2,y\na,9,y\nc,3,x\n"
    edges = "source,target\na,a\na,b\na,b\nb,a\nb,zz\nc,b\n"
    options = OwnOptions(dangling="drop", duplicate_nodes="first")
    source, report = load_own(folder(tmp_path, nodes, edges), options=options)
    assert source.x.ravel().tolist() == [1, 2, 3]
    assert pairs(source) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert report.messages == (
        "nodes.csv: 1 rows with an id given before were dropped",
        "1 edges to nodes that are not there were dropped",
        "1 self-loops were dropped",
        "1 duplicate edges were dropped",
        "1 edges were given in both directions and stand once",
    )


@pytest.mark.parametrize(
    ("loops", "repeats", "directed", "expected"),
    [
        ("drop", "drop", True, [(0, 1, 2), (1, 0, 5)]),
        ("drop", "sum", True, [(0, 1, 5), (1, 0, 5)]),
        ("drop", "keep", True, [(0, 1, 2), (0, 1, 3), (1, 0, 5)]),
        ("keep", "drop", True, [(0, 0, 7), (0, 1, 2), (1, 0, 5)]),
        ("drop", "drop", False, [(0, 1, 2), (1, 0, 2)]),
        ("drop", "sum", False, [(0, 1, 10), (1, 0, 10)]),
        ("keep", "sum", False, [(0, 0, 7), (0, 1, 10), (1, 0, 10)]),
        ("drop", "keep", False, [(0, 1, 2), (0, 1, 3), (0, 1, 5), (1, 0, 2), (1, 0, 3), (1, 0, 5)]),
    ],
)
def test_edges_as_the_options_say(
    loops: str, repeats: str, directed: bool, expected: list[tuple[int, int, float]]
) -> None:
    ends = Ends(np.array([0, 0, 0, 1]), np.array([1, 0, 1, 0]), np.array([2, 7, 3, 5], np.float32))
    options = OwnOptions(self_loops=loops, duplicate_edges=repeats, directed=directed)
    edges, weight = clean_edges(ends, 2, Loading(options=options))
    assert weight is not None
    assert [
        (int(u), int(v), float(w)) for (u, v), w in zip(edges.T, weight, strict=True)
    ] == expected


def test_summing_edges_without_weights_counts_them() -> None:
    ends = Ends(np.array([0, 0]), np.array([1, 1]), None)
    _, weight = clean_edges(
        ends, 2, Loading(options=OwnOptions(duplicate_edges="sum", directed=True))
    )
    assert weight is not None
    assert weight.tolist() == [2]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6))), st.booleans())
def test_default_edges_equal_undirected_simple(
    n: int, given_edges: list[tuple[int, int]], weighted: bool
) -> None:
    ends = np.array([(u % n, v % n) for u, v in given_edges], dtype=np.int64).reshape(-1, 2).T
    weight = np.arange(2, 2 + ends.shape[1], dtype=np.float32) if weighted else None
    edges, found = clean_edges(Ends(ends[0], ends[1], weight), n, Loading())
    plain = Source("s", np.zeros((n, 1), np.float32), ends, np.zeros(n, np.int64), 1, weight)
    expected = plain.undirected_simple()
    np.testing.assert_array_equal(edges, expected.edges)
    if found is not None and expected.weight is not None:
        np.testing.assert_array_equal(found, expected.weight)
    assert (found is None) == (expected.weight is None or not expected.weight.size)


def test_unlabelled_nodes_leave_the_split(tmp_path: Path) -> None:
    source, report = load_own(
        folder(tmp_path, NODES.replace("d,4.5,home,,south,", "d,4,home,,s,test"))
    )
    assert source.split is not None
    assert source.split.tolist() == [TRAIN, VAL, TEST, UNUSED]
    assert "1 unlabelled nodes lost their place in the split" in report.messages


def test_a_row_is_the_line_that_an_editor_shows(tmp_path: Path) -> None:
    nodes = 'id,f,label,note\na,1,x,"two\nlines"\n\n\nb,,y,z\nc,3,y,z\n'
    with pytest.raises(DataError, match=r"^nodes.csv row 6, column 'f' has no value"):
        load_own(folder(tmp_path, nodes, "source,target\na,b\n"))


def test_a_parquet_row_counts_from_one(tmp_path: Path) -> None:
    pa.parquet.write_table(
        pa.table({"id": [1, 2], "f": [1.0, None], "label": ["x", "y"]}), tmp_path / "nodes.parquet"
    )
    tmp_path.joinpath("edges.csv").write_text("source,target\n1,2\n")
    with pytest.raises(DataError, match=r"^nodes.parquet row 2, column 'f' has no value \(1 such"):
        load_own(tmp_path)


def test_a_row_of_a_client_names_the_client(tmp_path: Path) -> None:
    folder(tmp_path / "p", "id,f,label\na,1,x\nb,2,y\na,3,y\n", "source,target\n")
    folder(tmp_path / "q", "id,f,label\na,1,x\nb,nan,y\n", "source,target\n")
    with pytest.raises(DataError, match=r"^q/nodes.csv row 3, column 'f' holds nan"):
        load_own(tmp_path, options=OwnOptions(duplicate_nodes="first"))
