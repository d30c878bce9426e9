"""Broken graphs of a user: each is refused with its own clear sentence, and no code is run."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import networkx as nx
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.data import HeteroData

from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.data.own.reader import from_networkx, load_own
from atoll.data.own.schema import OwnOptions
from atoll.data.source import TRAIN, UNUSED


def folder(path: Path, nodes: str | bytes, edges: str | bytes, schema: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.joinpath("nodes.csv").write_bytes(nodes if isinstance(nodes, bytes) else nodes.encode())
    path.joinpath("edges.csv").write_bytes(edges if isinstance(edges, bytes) else edges.encode())
    if schema:
        path.joinpath("schema.toml").write_text(schema)
    return path


G = "id,f,label\na,1,x\nb,2,y\nc,3,x\n"
E = "source,target\na,b\n"
W = "source,target,weight\na,b,1\n"
TABLES: dict[str, tuple[str | bytes, str, str, str]] = {
    # nodes.csv, edges.csv, schema.toml, the sentence
    "empty file": ("", E, "", "nodes.csv is empty; its first line must name the columns"),
    "empty edge file": (G, "", "", "edges.csv is empty"),
    "header only": ("id,f,label\n", E, "", "nodes.csv has a header but no rows"),
    "no id": ("key,f,label\na,1,x\n", E, "", "nodes.csv has no id column: its columns are 'key'"),
    "semicolons": ("id;f;label\na;1;x\n", E, "", "no id column (separate the columns with commas)"),
    "no label": ("id,f\na,1\nb,2\n", E, "", "nodes.csv has no label column"),
    "no source": (G, "a,b\na,b\n", "", "edges.csv has no source column"),
    "no target": (G, "source,b\na,b\n", "", "edges.csv has no target column"),
    "two labels": (
        "id,f,label,y\na,1,x,1\n",
        E,
        "",
        "'label' and 'y', and either could be the label",
    ),
    "open quote": ('"' + G, E, "", "nodes.csv has a column name of several lines; close its quote"),
    "column twice": ("id,f,f,label\na,1,1,x\n", E, "", "two columns named 'f'"),
    "duplicate ids": (G + "b,4,x\n", E, "", "nodes.csv row 5 gives the id 'b' again (1 such"),
    "no value": ("id,f,label\na,1,x\nb,,y\n", E, "", "nodes.csv row 3, column 'f' has no value"),
    "no id value": ("id,f,label\na,1,x\n,2,y\n", E, "", "row 3, column 'id' has no value"),
    "no owner": (
        "id,f,label,client\na,1,x,\nb,2,y,p\n",
        E,
        "",
        "row 2, column 'client' has no value",
    ),
    "no category": ("id,f,label\na,u,x\nb, ,y\n", E, "", "row 3, column 'f' has no value"),
    "nan": ("id,f,label\na,nan,x\nb,2,y\n", E, "", "nodes.csv row 2, column 'f' holds nan"),
    "inf": ("id,f,label\na,1,x\nb,-inf,y\n", E, "", "row 3, column 'f' holds -inf (1 such"),
    "too large": ("id,f,label\na,1,x\nb,1e99,y\n", E, "", "holds 1e+99"),
    "text among numbers": (
        "id,f,label\na,1,x\nb,NA,y\nc,3,x\n",
        E,
        "",
        "nodes.csv row 3, column 'f' holds 'NA', but most of its values are numbers",
    ),
    "text for a number": (
        "id,f,label\na,u,x\nb,v,y\n",
        E,
        '[nodes]\nfeatures = ["f"]',
        "nodes.csv row 2, column 'f' holds 'u', but schema.toml says",
    ),
    "a date": ("id,f,label\na,2020-01-01,x\nb,2020-01-02,y\n", E, "", "is of type date32"),
    "ragged row": (G + "d,4\n", E, "", "nodes.csv row 5 has 2 values, but the header names 3"),
    "ragged edge": (G, "source,target\na,b\na,b,c\n", "", "edges.csv row 3 has 3 values"),
    "not UTF-8": (b"id,f,label\na,1,x\nb,2,\xe9\n", E, "", "nodes.csv row 3 is not UTF-8 text"),
    "header not UTF-8": (b"id,\xe9,label\na,1,x\n", E, "", "nodes.csv row 1 is not UTF-8"),
    "dangling edge": (
        G,
        "source,target\na,b\nb,zz\nzz,a\n",
        "",
        "edges.csv row 3, column 'target' holds 'zz', not a node of nodes.csv (2 such edges",
    ),
    "half an edge": (G, "source,target\na,\n", "", "edges.csv row 2, column 'target' has no value"),
    "unknown split": (
        "id,f,label,split\na,1,x,trian\nb,2,y,val\n",
        E,
        "",
        "holds 'trian'; a split",
    ),
    "no training node": (
        "id,f,label,split\na,1,x,val\nb,2,y,test\n",
        E,
        "",
        "no labelled training",
    ),
    "negative weight": (G, W + "b,c,-2\n", "", "edges.csv row 3 has the weight -2.0 (1 such"),
    "nan weight": (G, W + "b,c,nan\n", "", "edges.csv row 3 has no weight"),
    "empty weight": (G, W + "b,c,\n", "", "edges.csv row 3 has no weight"),
    "text weight": (G, W + "b,c,much\n", "", "edges.csv row 3, column 'weight' holds 'much'"),
    "one class": ("id,f,label\na,1,x\nb,2,x\n", E, "", "holds only the class 'x'"),
    "no labels": ("id,f,label\na,1,\nb,2,\n", E, "", "holds no label at all"),
    "fraction label": (
        "id,f,label\na,1,0.5\nb,2,1\n",
        E,
        "",
        "row 2, column 'label' holds the fraction",
    ),
    "missing mark": ("id,f,label\na,1,\nb,2,N/A\nc,3,x\n", E, "", "reads like a missing label"),
    "no features": ("id,label\na,x\nb,y\n", E, "", "nodes.csv has no feature column"),
    "schema key": (G, E, "[nodes]\nlable = 'label'", "[nodes] key 'lable'; did you mean 'label'?"),
    "schema section": (
        G,
        E,
        "[node]\nid = 'id'",
        "section of schema.toml 'node'; did you mean 'nodes'",
    ),
    "schema value": (
        G,
        E,
        "[nodes]\nfeatures = 'f'",
        "features is 'f'; it must be a list of texts",
    ),
    "schema column": (G, E, "[nodes]\nlabel = 'lobel'", "does not have; did you mean 'label'?"),
    "schema feature": (G, E, "[nodes]\nfeatures = ['q']", "its columns are 'id', 'f', 'label'"),
    "schema twice": (G, E, "[nodes]\nlabel = 'f'\nfeatures = ['f']", "as label and as features"),
    "schema target": (
        G,
        E,
        "target = 'f'\n[nodes]\nlabel = 'label'",
        "schema.toml gives target = 'f' and [nodes] label = 'label', but both name the column to "
        "predict; leave one of them out",
    ),
    "schema target column": (G, E, "target = 'lobel'", "does not have; did you mean 'label'?"),
    "schema target kind": (
        G,
        E,
        "target = ['label']",
        "schema.toml target is ['label']; it must be",
    ),
    "schema task": (
        G,
        E,
        "task = 'nodes'",
        "unknown task in schema.toml 'nodes'; did you mean 'node'?",
    ),
    "schema task of graphs": (
        G,
        E,
        "task = 'graph'",
        "schema.toml gives task = 'graph', but nodes and edges are tables of one graph",
    ),
    "schema top key": (
        G,
        E,
        "targt = 'f'",
        "section of schema.toml 'targt'; did you mean 'target'?",
    ),
    "schema syntax": (G, E, "[nodes\n", "schema.toml' is not readable as TOML"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_refused_tables(tmp_path: Path, kind: str) -> None:
    nodes, edges, schema, sentence = TABLES[kind]
    with pytest.raises(AtollError) as caught:
        load_own(folder(tmp_path / "g", nodes, edges, schema))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_refusal_has_its_own_sentence() -> None:
    assert len({sentence for *_, sentence in TABLES.values()}) >= 40


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (OwnOptions(self_loops="error"), "the graph has 1 self-loops, which self_loops = error"),
        (
            OwnOptions(duplicate_edges="error"),
            "the graph has 1 duplicate edges, which duplicate_edges",
        ),
        (OwnOptions(max_categories=2), "holds 3 different texts; at most 2 can become categories"),
        (
            OwnOptions(max_categories=1),
            "holds 2 different labels for 3 nodes; at most 1 are allowed",
        ),
        (
            OwnOptions(owner="bnak"),
            "option owner names column 'bnak', which nodes.csv does not have",
        ),
    ],
)
def test_refused_by_option(tmp_path: Path, options: OwnOptions, sentence: str) -> None:
    with pytest.raises(AtollError) as caught:
        load_own(
            folder(
                tmp_path,
                G.replace(",1,", ",u,").replace(",2,", ",v,").replace(",3,", ",w,"),
                "source,target\na,a\na,b\na,b\n",
            ),
            options=options,
        )
    assert sentence in str(caught.value)


def test_unknown_choices_of_an_option() -> None:
    with pytest.raises(
        ConfigError, match="unknown choice for dangling 'dorp'; did you mean 'drop'"
    ):
        OwnOptions(dangling="dorp")
    with pytest.raises(ConfigError, match="max_categories is 0"):
        OwnOptions(max_categories=0)


def test_refused_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no '.*nowhere'; give a folder with nodes.csv"):
        load_own(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no nodes.csv or nodes.parquet, and no sub-folder"):
        load_own(tmp_path)
    tmp_path.joinpath("g.txt").write_text("x")
    with pytest.raises(DataError, match=r"'g.txt' is not a graph that can be loaded; give"):
        load_own(tmp_path / "g.txt")
    data = folder(tmp_path / "data", G, E)
    with pytest.raises(DataError, match=r"'nodes.csv' is .* \(give the folder that holds it\)"):
        load_own(data / "nodes.csv")
    with pytest.raises(ConfigError, match="no schema file"):
        load_own(data, schema=tmp_path / "absent.toml")
    data.joinpath("edges.csv").unlink()
    with pytest.raises(DataError, match=r"has no edges.csv or edges.parquet"):
        load_own(data)
    data.joinpath("nodes.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match=r"has nodes.csv and nodes.parquet; keep one"):
        load_own(data)


def test_refused_parquet(tmp_path: Path) -> None:
    tmp_path.joinpath("edges.csv").write_text(E)
    file = tmp_path / "nodes.parquet"
    file.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"^nodes.parquet is not readable as Parquet"):
        load_own(tmp_path)
    table = {"id": ["a", "b"], "f": [[1, 2], [3]], "label": ["x", "y"]}
    pa.parquet.write_table(pa.table(table), file)
    with pytest.raises(DataError, match=r"column 'f' is of type list<.*store one text or number"):
        load_own(tmp_path)
    pa.parquet.write_table(pa.table({**table, "f": [1, 2], "id": [0.5, 1]}), file)
    with pytest.raises(DataError, match=r"column 'id' is of type double; ids are text or whole"):
        load_own(tmp_path)


def test_refused_clients(tmp_path: Path) -> None:
    folder(tmp_path / "p", "id,f,label\na,1,x\n", "source,target\n")
    q = tmp_path / "q"
    folder(q, "id,f,g,label\na,1,1,y\n", "source,target\n")
    with pytest.raises(DataError, match=r"^q/nodes.csv has the column 'g' and p/nodes.csv has not"):
        load_own(tmp_path)
    folder(q, "id,f,label\na,u,y\n", "source,target\n")
    with pytest.raises(DataError, match=r"column 'f' is of type int64 in p/nodes.csv and of type"):
        load_own(tmp_path)
    folder(q, "id,f,label\na,1,y\n", "source,target,weight\na,a,1\n")
    with pytest.raises(DataError, match=r"^q/edges.csv has weights and p/edges.csv has none"):
        load_own(tmp_path)
    folder(q, "id,f,label\nb,1,y\n", "source,target\nb,a\n")
    with pytest.raises(
        DataError, match=r"^q/edges.csv row 2, column 'target' holds 'a', not a node"
    ):
        load_own(tmp_path)
    folder(q, G, E, schema="[nodes]\n")
    with pytest.raises(ConfigError, match=r"^client folder 'q' has its own schema.toml"):
        load_own(tmp_path)
    q.joinpath("schema.toml").unlink()
    q.joinpath("nodes.csv").unlink()
    with pytest.raises(DataError, match=r"q' has no nodes.csv or nodes.parquet; a graph needs"):
        load_own(tmp_path)


class Hostile:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(Path("hostile-code-ran").resolve()),)


def tensors(**changes: Any) -> dict[str, Any]:
    good = {
        "x": torch.ones(3, 2),
        "edge_index": torch.tensor([[0, 1], [1, 2]]),
        "y": torch.tensor([0, 1, 0]),
    }
    return {key: value for key, value in {**good, **changes}.items() if value is not None}


MASK = torch.tensor([True, False, False])
TENSORS: dict[str, tuple[object, str]] = {
    "no x": (tensors(x=None), "has no x; it must be a tensor: one row of numbers for each node"),
    "no y": (tensors(y=None), "has no y"),
    "x of one dimension": (tensors(x=torch.ones(3)), "x of 'g.pt' has the shape (3,); it must"),
    "x is a list": (tensors(x=[1, 2]), "has a list as x"),
    "x is sparse": (tensors(x=torch.eye(3).to_sparse()), "x of 'g.pt' is sparse, complex"),
    "x holds nan": (tensors(x=torch.full((3, 2), torch.nan)), "NaN or infinite feature at node 0"),
    "y too short": (
        tensors(y=torch.tensor([0, 1])),
        "y of 'g.pt' has the shape (2,); it must have",
    ),
    "y of many labels": (tensors(y=torch.ones(3, 2)), "y of 'g.pt' has the shape (3, 2)"),
    "y negative": (tensors(y=torch.tensor([0, 1, -7])), "y of 'g.pt' holds -7"),
    "y of one class": (tensors(y=torch.zeros(3)), "holds only the class '0'"),
    "edges transposed": (
        tensors(edge_index=torch.zeros(5, 2).long()),
        "it must be whole numbers of",
    ),
    "edges of floats": (tensors(edge_index=torch.zeros(2, 2)), "edge_index of 'g.pt' is float32"),
    "edge out of range": (
        tensors(edge_index=torch.tensor([[0, 1], [1, 3]])),
        "'g.pt' edge 1 joins 1 and 3, but nodes are numbered 0 to 2 (1 such edges in all)",
    ),
    "weight": (tensors(edge_weight=torch.tensor([1.0, -1])), "'g.pt' edge 1 has the weight -1.0"),
    "weight length": (
        tensors(edge_weight=torch.ones(3)),
        "edge_weight of 'g.pt' has the shape (3,)",
    ),
    "masks overlap": (tensors(train_mask=MASK, val_mask=MASK), "val_mask of 'g.pt' holds node 0"),
    "mask length": (tensors(train_mask=MASK[:2]), "train_mask of 'g.pt' has the shape (2,)"),
    "empty graph": (tensors(x=torch.ones(0, 2)), "'g.pt' holds no nodes"),
    "a list": ([1, 2], "'g.pt' holds a list; save one PyG Data or a dict"),
    "hetero": (HeteroData(), "while it loads, and such code"),
    "code": ({"x": Hostile()}, "such code is refused; save a PyG Data or a dict of tensors"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_refused_tensors(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content, sentence = TENSORS[kind]
    torch.save(content, tmp_path / "g.pt")
    with pytest.raises(DataError) as caught:
        load_own(tmp_path / "g.pt")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not tmp_path.joinpath("hostile-code-ran").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04broken", pickle.dumps(Hostile())])
def test_refused_files_that_are_no_tensors(tmp_path: Path, content: bytes) -> None:
    tmp_path.joinpath("g.pt").write_bytes(content)
    with pytest.raises(DataError, match=r"'g.pt' (is not readable as a .pt file|needs )"):
        load_own(tmp_path / "g.pt")


def test_a_schema_for_tensors_is_refused(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "g.pt")
    with pytest.raises(ConfigError, match=r"'g.pt' was given with a schema"):
        load_own(tmp_path / "g.pt", schema=tmp_path / "schema.toml")


def test_many_masks_use_the_first(tmp_path: Path) -> None:
    torch.save(tensors(train_mask=torch.stack([MASK, ~MASK], 1)), tmp_path / "g.pt")
    source, report = load_own(tmp_path / "g.pt")
    assert source.split is not None
    assert source.split.tolist() == [TRAIN, UNUSED, UNUSED]
    assert "train_mask holds 2 splits; the first was used" in report.messages


def test_refused_graphs(tmp_path: Path) -> None:
    graph = nx.path_graph(3)
    with pytest.raises(DataError, match="holds no nodes"):
        from_networkx(nx.Graph())
    nx.set_node_attributes(graph, 1.0, "f")
    nx.write_graphml(graph, tmp_path / "g.graphml")
    with pytest.raises(
        DataError, match=r"^g.graphml has no label attribute: its attributes are 'f'"
    ):
        load_own(tmp_path / "g.graphml")
    nx.set_node_attributes(graph, {0: "x", 1: "y", 2: "x"}, "label")
    graph.edges[0, 1]["weight"] = 2.0
    with pytest.raises(DataError, match="networkx edge 1 to 2 has no weight; give a weight to"):
        from_networkx(graph)
    graph.edges[1, 2]["weight"] = "heavy"
    with pytest.raises(DataError, match="an edge weight of networkx is not a number"):
        from_networkx(graph)
    del graph.nodes[1]["f"]
    with pytest.raises(DataError, match=r"^networkx node 1, column 'f' has no value"):
        from_networkx(graph)
    graph.nodes[1]["f"] = "text"
    with pytest.raises(DataError, match="attribute 'f' holds float and str"):
        from_networkx(graph)
    tmp_path.joinpath("g.graphml").write_text("<graphml><node")
    with pytest.raises(DataError, match=r"^'g.graphml' is not readable as GraphML"):
        load_own(tmp_path / "g.graphml")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_damage_loads_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    files = [b"id,f,g,label,split\na,1,u,x,train\nb,2.5,v,y,val\nc,-3,u,x,\n", W.encode()]
    which = data.draw(st.integers(0, 1))
    for _ in range(data.draw(st.integers(1, 3))):
        text = files[which]
        at = data.draw(st.integers(0, len(text)))
        junk = data.draw(
            st.one_of(st.binary(max_size=3), st.sampled_from([b",", b"\n", b'"', b"nan"]))
        )
        files[which] = text[:at] + junk + text[at + data.draw(st.integers(0, 2)) :]
    options = OwnOptions(dangling=data.draw(st.sampled_from(["error", "drop"])))
    with contextlib.suppress(AtollError):
        load_own(folder(tmp_path, files[0], files[1]), options=options)
