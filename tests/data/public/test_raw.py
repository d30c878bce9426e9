"""Sets that Atoll reads itself have the arrays that PyG's own classes make of the same files."""

import pickle
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from atoll.data.public import raw
from atoll.data.public.registry import SPARSE_BELOW, dataset_info, load_dataset
from atoll.data.public.untrusted import open_raw
from atoll.data.source import Source, compact

GRAPHS = ["cora", "citeseer", "pubmed", "photo", "cs"]
SETS = ["MUTAG", "PTC_MR", "PROTEINS", "BZR", "IMDB-BINARY"]


def by_pyg(name: str, root: Path):
    info = dataset_info(name)
    with open_raw(info.loader, info.arguments, root / info.folder, root / info.home) as dataset:
        return dataset


def check_equal(found, wanted) -> None:
    if sp.issparse(wanted):
        for part in ("data", "indices", "indptr"):
            check_equal(getattr(found, part), getattr(wanted, part))
        return
    assert isinstance(found, np.ndarray)
    assert found.dtype == wanted.dtype
    assert found.flags.c_contiguous == wanted.flags.c_contiguous
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.data
@pytest.mark.parametrize("name", GRAPHS)
def test_one_graph(name, real_data):
    found = load_dataset(name, real_data(name))
    assert isinstance(found, Source)
    data = by_pyg(name, real_data(name))[0]
    check_equal(found.x, compact(data.x.numpy(), SPARSE_BELOW))
    check_equal(found.edges, data.edge_index.numpy())
    check_equal(found.y, data.y.numpy())
    if "train_mask" in data:
        for role, mask in enumerate(("train_mask", "val_mask", "test_mask")):
            np.testing.assert_array_equal(found.split == role, data[mask].numpy())
    else:
        assert found.split is None


@pytest.mark.data
@pytest.mark.parametrize("name", SETS)
def test_a_set_of_graphs(name, real_data):
    found, dataset = load_dataset(name, real_data(name)), by_pyg(name, real_data(name))
    assert found.num_graphs == len(dataset)
    np.testing.assert_array_equal(found.y, [int(graph.y) for graph in dataset])
    np.testing.assert_array_equal(np.diff(found.node_ptr), [g.num_nodes for g in dataset])
    starts = np.repeat(found.node_ptr[:-1], [graph.num_edges for graph in dataset])
    edges = np.concatenate([graph.edge_index.numpy() for graph in dataset], axis=1)
    check_equal(found.edges, np.ascontiguousarray(edges + starts))
    if dataset.num_node_labels:
        x = np.concatenate([graph.x.numpy() for graph in dataset])
        check_equal(found.x, np.ascontiguousarray(x[:, dataset.num_node_attributes :]))
    assert all(getattr(found, field.name) is not None for field in fields(found))


def write_set(home: Path, **files: str) -> None:
    (home / "raw").mkdir(parents=True)
    for name, text in files.items():
        (home / "raw" / f"S_{name}.txt").write_text(text)


def test_attributes_loops_and_several_labels(tmp_path):
    plain = {"A": "1, 2\n2, 1\n2, 1\n3, 3\n", "graph_indicator": "1\n1\n2\n"}
    write_set(
        tmp_path / "a", **plain, node_attributes="0.5, 1\n2, 3\n4, 5\n", graph_labels="7\n-1\n"
    )
    found = raw.tu_dataset(tmp_path / "a", "S")
    assert found["edges"].tolist() == [[0, 1], [1, 0]]
    assert found["node_ptr"].tolist() == [0, 2, 3]
    assert found["x"].tolist() == [[0.5, 1], [2, 3], [4, 5]]
    assert found["y"].tolist() == [1, 0]
    write_set(tmp_path / "b", **plain, node_labels="3, 0\n5, 1\n3, 0\n", graph_attributes="1\n2\n")
    found = raw.tu_dataset(tmp_path / "b", "S")
    assert found["x"].tolist() == [[1, 0, 0, 1, 0], [0, 0, 1, 0, 1], [1, 0, 0, 1, 0]]
    assert "y" not in found


def test_the_unpickler_knows_no_other_name(tmp_path):
    path = tmp_path / "evil"
    path.write_bytes(pickle.dumps(print))
    with path.open("rb") as file, pytest.raises(KeyError):
        raw._Unpickler(file).load()
