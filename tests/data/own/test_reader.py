"""A user's own graph: every format that loads, and files that are refused, without running code."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.data.own.reader import from_networkx, load_new, load_own
from atoll.data.own.schema import OwnOptions
from atoll.data.source import TEST, TRAIN, UNUSED, VAL, Source

from .graphs import EDGES, NODES, RAW, E, G, folder, pairs

EXAMPLE = Path(__file__).parents[3] / "examples" / "three-banks"


def test_a_folder_of_csv(tmp_path: Path) -> None:
    source, report = load_own(folder(tmp_path / "mine"), options=RAW)
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
    assert "1 edge was given in both directions, and only one direction counts" in report.messages
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
    source, report = load_own(tmp_path, options=RAW)
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


def test_unlabelled_nodes_leave_the_split(tmp_path: Path) -> None:
    source, report = load_own(
        folder(tmp_path, NODES.replace("d,4.5,home,,south,", "d,4,home,,s,test"))
    )
    assert source.split is not None
    assert source.split.tolist() == [TRAIN, VAL, TEST, UNUSED]
    assert "1 unlabelled nodes lost their place in the split" in report.messages


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


def test_a_file_that_unpacks_to_more_than_its_size_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(tensors(x=torch.zeros(3, 100_000)), tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "g.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(DataError, match=r"'g.pt' has \d{4} bytes and unpacks to 12\d{5}; save it"):
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


NEW = "id,age,kind,client\ne,1,home,north\nf,2,shop,south\n"


def joined(path: Path, nodes: str = NEW, edges: str = "source,target\ne,a\nf,e\n") -> Source:
    old = load_own(folder(path / "old"), options=RAW)[0]
    new = folder(path / "new", nodes, edges)
    return load_new(new, old.encoder, OwnOptions(), old)[0]


def test_new_nodes_follow_the_old_ones(tmp_path: Path) -> None:
    old, both = load_own(folder(tmp_path / "old"), options=RAW)[0], joined(tmp_path)
    assert both.columns["id"].tolist() == [*"abcdef"]
    assert both.columns["client"].tolist() == ["north", "north", "south", "south", "north", "south"]
    np.testing.assert_array_equal(both.x[:4], old.x)
    np.testing.assert_array_equal(both.x[4:], [[1, 1, 0], [2, 0, 1]])
    assert set(pairs(both)) == {*pairs(old), (4, 0), (0, 4), (5, 4), (4, 5)}
    assert both.y.tolist() == [0, 1, 0, -1, -1, -1]


def test_weights_of_one_side_meet_ones_of_the_other(tmp_path: Path) -> None:
    both = joined(tmp_path, edges="source,target,weight\ne,a,3\n")
    weight = dict(zip(pairs(both), both.weight.tolist(), strict=True))
    assert weight[(4, 0)] == weight[(0, 4)] == 3
    assert weight[(0, 1)] == 1


def test_clients_may_use_the_same_ids(tmp_path: Path) -> None:
    rows = "id,f,label\n1,1,x\n2,2,y\n"
    for client in ("n", "s"):
        folder(tmp_path / "old" / client, rows, "source,target\n1,2\n")
        folder(tmp_path / "new" / client, "id,f\n3,1\n", "source,target\n3,2\n")
    old = load_own(tmp_path / "old")[0]
    both = load_new(tmp_path / "new", old.encoder, OwnOptions(), old)[0]
    assert set(pairs(both)) >= {(4, 1), (5, 3)}
    folder(tmp_path / "one", "id,f\n3,1\n", "source,target\n3,2\n")
    with pytest.raises(AtollError, match="one folder for each client, or name it with --client"):
        load_new(tmp_path / "one", old.encoder, OwnOptions(), old)
    both = load_new(tmp_path / "one", old.encoder, OwnOptions(), old, "s")[0]
    assert (4, 3) in pairs(both)
    assert (4, 1) not in pairs(both)


def test_an_old_node_is_not_a_new_one(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match="gives the id 'a', a node of the training graph"):
        joined(tmp_path, NEW.replace("e,1", "a,1"))


def test_an_edge_to_an_unknown_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match=r"holds 'z', not a node of .*, or remove these edges$"):
        joined(tmp_path, edges="source,target\ne,z\n")
    old = load_own(folder(tmp_path / "old"))[0]
    new = folder(tmp_path / "alone", NEW, "source,target\ne,a\n")
    with pytest.raises(AtollError, match="join the training graph with --joined"):
        load_new(new, old.encoder, OwnOptions())


def test_another_schema_is_refused(tmp_path: Path) -> None:
    old = load_own(folder(tmp_path / "old", NODES, EDGES, '[nodes]\nlabel = "label"\n'))[0]
    new = folder(tmp_path / "new", NEW, "source,target\n", '[nodes]\nlabel = "kind"\n')
    with pytest.raises(
        AtollError, match="gives label = kind, but the model was trained with label"
    ):
        load_new(new, old.encoder, OwnOptions())
    folder(tmp_path / "new", NEW, "source,target\n", '[nodes]\nlabel = "label"\n')
    assert load_new(tmp_path / "new", old.encoder, OwnOptions())[0].num_nodes == 2


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    encoder = load_own(folder(tmp_path / "old"))[0].encoder
    with pytest.raises(AtollError, match="is no folder"):
        load_new(tmp_path / "none", encoder, OwnOptions())


@pytest.mark.parametrize(("place", "byte"), [(6, 255), (46, 0x81)])
def test_a_damaged_archive_of_tensors_is_refused_in_one_sentence(tmp_path, place, byte):
    """A version of ZIP that no reader knows, and a name that is no text."""
    file = tmp_path / "a.pt"
    torch.save({"x": torch.zeros(3, 2)}, file)
    content = bytearray(file.read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at + 9] |= 8  # the name of this file is UTF-8
    content[at + place] = byte
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"'a.pt' is not readable as a .pt file"):
        load_own(file)
