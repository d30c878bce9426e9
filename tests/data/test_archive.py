"""A federation in one file: the same tensors back, and a sentence for every bad file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import atoll
from atoll.core.batching import WHOLE, Batching, Graphs
from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation, LazyGraphs
from atoll.core.tree import named_leaves, structure
from atoll.data.archive import (
    is_federation_file,
    load_federation,
    memory_needed,
    read_header,
    save_federation,
)
from atoll.data.divide import federate
from atoll.data.source import GraphGroup, GraphSet, Source
from atoll.data.synthetic import Archipelago, Lagoon, make_lagoon


def nodes(weighted: bool = False, dense: bool = False) -> Federation:
    source = make_lagoon(Lagoon(nodes=240, words=80), 3, 1)
    x = source.x.toarray() if dense else source.x
    weight = np.arange(source.edges.shape[1], dtype=np.float32) if weighted else None
    whole = Source("lake", x, source.edges, source.y, source.classes, weight, None, source.columns)
    return federate(whole, clients=None, partition="column:owner", seed=2)


def graph_set(name: str, features: int, classes: int, graphs: int = 30) -> GraphSet:
    rng = np.random.default_rng(features)
    ring = np.stack([np.arange(4), (np.arange(4) + 1) % 4])
    edges = np.concatenate([ring + 4 * g for g in range(graphs)], 1)
    edges = np.concatenate([edges, edges[::-1]], 1)
    x = (rng.random((4 * graphs, features)) < (0.05 if features > 9 else 0.9)).astype(np.float32)
    y = np.arange(graphs) % classes
    return GraphSet(name, x, edges, np.arange(0, 4 * graphs + 1, 4), y, classes)


def graphs() -> Federation:
    """Clients with features of their own, dense at one and sparse at the other."""
    group = GraphGroup("pair", (graph_set("few", 3, 2), graph_set("many", 40, 3)))
    return federate(group, batch_size=8)


FEDERATIONS = {
    "sparse": nodes,
    "weighted": lambda: nodes(weighted=True),
    "dense": lambda: nodes(dense=True),
    "graphs": graphs,
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kind", FEDERATIONS)
def test_every_tensor_comes_back(tmp_path: Path, kind: str, lazy: bool) -> None:
    federation = FEDERATIONS[kind]()
    path = save_federation(federation, tmp_path / "some")
    assert path.name == "some.atoll"
    again = load_federation(path, lazy=lazy)
    assert isinstance(again.graphs, LazyGraphs) == lazy
    for name in ("classes", "name", "numbers", "metric", "features", "task", "batching"):
        assert getattr(again, name) == getattr(federation, name)
    assert dict(again.about) == dict(federation.about)
    for one, two in zip(federation.graphs, again.graphs, strict=True):
        assert structure(one) == structure(two)
        for (name, a), (_, b) in zip(named_leaves(one), named_leaves(two), strict=True):
            assert a.dtype == b.dtype, name
            assert torch.equal(a, b), name


def test_the_header_alone_says_what_it_is(tmp_path: Path) -> None:
    federation = graphs()
    path = save_federation(federation, tmp_path / "pair.atoll")
    header = read_header(path)
    assert (header.name, header.clients, header.task) == ("pair", 2, "graph")
    assert header.about["sha1"] == federation.about["sha1"]
    assert is_federation_file(path)
    renamed = path.rename(tmp_path / "pair.bin")
    assert is_federation_file(renamed)
    assert not is_federation_file(tmp_path)
    assert not is_federation_file("cora")


@pytest.mark.parametrize(("sizes", "batching"), [([8, 0], Graphs(8)), ([0, 0], WHOLE)])
def test_a_file_with_a_batch_size_for_each_client_is_still_read(
    tmp_path: Path, sizes: list[int], batching: Batching
) -> None:
    path = save_federation(graphs(), tmp_path / "pair.atoll")
    raw = path.read_bytes()
    assert raw.count(rb"\"batch_sizes\": [8, 8]") == 1
    old = rb"\"batch_sizes\": [%d, %d]" % tuple(sizes)
    path.write_bytes(raw.replace(rb"\"batch_sizes\": [8, 8]", old))
    assert load_federation(path).batching == batching


def test_python_saves_and_loads(tmp_path: Path) -> None:
    federation = atoll.partition(atoll.load("lagoon:nodes=200"), "louvain", clients=2)
    path = atoll.save(federation, tmp_path / "two.atoll")
    again = atoll.load(str(path))
    assert isinstance(again, Federation)
    assert len(again) == 2
    with pytest.raises(ConfigError, match="already a divided federation"):
        atoll.partition(again)


def test_what_exists_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "old.atoll"
    path.write_text("precious")
    with pytest.raises(DataError, match="exists already; delete it, or choose another --out"):
        save_federation(nodes(), path)
    assert path.read_text() == "precious"
    assert [file.name for file in tmp_path.iterdir()] == ["old.atoll"]


def test_lazy_clients_can_be_sliced_and_reordered(tmp_path: Path) -> None:
    path = save_federation(nodes(), tmp_path / "a.atoll")
    lazy = load_federation(path, lazy=True)
    assert [g.num_nodes for g in lazy.graphs[1:]] == [g.num_nodes for g in lazy.graphs][1:]
    turned = lazy.reordered([2, 0, 1])
    assert turned.numbers == (2, 0, 1)
    assert turned.graphs[0].num_nodes == lazy.graphs[2].num_nodes
    with pytest.raises(IndexError):
        lazy.graphs[3]


def test_the_memory_estimate_is_between_the_arrays_and_a_dozen_times_them(tmp_path: Path) -> None:
    federation = federate(
        make_lagoon(Archipelago(), 30, 0), clients=None, partition="column:owner", seed=0
    )
    path = save_federation(federation, tmp_path / "a.atoll")
    assert path.stat().st_size < memory_needed(path) < 16 * path.stat().st_size


def changed(path: Path, change: Mapping[str, Any], header: Mapping[str, Any] | None = None) -> Path:
    """A copy of a federation's file with some arrays, or facts, replaced."""
    arrays = {**load_file(path), **change}
    known = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    metadata = dict(known["__metadata__"])
    if header is not None:
        metadata["header"] = json.dumps({**json.loads(metadata["header"]), **header})
    bad = path.with_name("bad.atoll")
    save_file({k: v for k, v in arrays.items() if v is not None}, bad, metadata=metadata)
    return bad


@pytest.mark.parametrize(
    ("change", "header", "why"),
    [
        ({"y": None}, None, "has no array 'y'"),
        ({"y": torch.zeros(3, dtype=torch.int32)}, None, "array 'y' has shape (3,), not (240,)"),
        ({"y": torch.full((240,), 99, dtype=torch.int32)}, None, "an impossible label"),
        ({"edges": torch.tensor([0, 9, 3, 12])}, None, "array 'edge' has shape"),
        ({"nodes": torch.tensor([0, 200, 100, 240])}, None, "its clients overlap"),
        ({}, {"clients": 4}, "it does not list its clients"),
        ({}, {"surprise": 1}, "its description is not readable"),
    ],
)
def test_a_damaged_file_is_one_sentence(
    tmp_path: Path, change: Mapping[str, Any], header: Mapping[str, Any] | None, why: str
) -> None:
    path = save_federation(nodes(), tmp_path / "good.atoll")
    sentence = re.escape("is damaged (") + ".*" + re.escape(why)
    with pytest.raises(DataError, match=sentence):
        load_federation(changed(path, change, header))


def test_edges_and_features_out_of_range_are_refused(tmp_path: Path) -> None:
    path = save_federation(nodes(), tmp_path / "good.atoll")
    arrays = load_file(path)
    edge = arrays["edge"].clone()
    edge[0, 0] = 1000
    with pytest.raises(DataError, match="client 0 has an impossible edge"):
        load_federation(changed(path, {"edge": edge}))
    column = arrays["x_column"] + 1000
    with pytest.raises(DataError, match="client 0 has impossible features"):
        load_federation(changed(path, {"x_column": column}))


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.atoll"
    save_file({"weight": torch.zeros(2)}, other, metadata={"format": "pt"})
    for content in (other.read_bytes(), b"", b"\xff" * 64, b"nodes and edges"):
        other.write_bytes(content)
        with pytest.raises(DataError, match="is not a federation that Atoll wrote"):
            load_federation(other)
    with pytest.raises(DataError, match="there is no federation"):
        load_federation(tmp_path / "none.atoll")


def test_a_cut_off_file_and_another_version_are_refused(tmp_path: Path) -> None:
    path = save_federation(nodes(), tmp_path / "good.atoll")
    content = path.read_bytes()
    short = tmp_path / "short.atoll"
    short.write_bytes(content[:-100])
    for read in (load_federation, memory_needed):
        with pytest.raises(DataError, match="it is cut off, or was written over"):
            read(short)
    newer = tmp_path / "newer.atoll"
    newer.write_bytes(content.replace(b'"version":"1"', b'"version":"7"'))
    with pytest.raises(DataError, match="a federation of format 7, and this Atoll reads format 2"):
        load_federation(newer)


def test_a_growing_graph_comes_back_and_earlier_versions_refuse_it(tmp_path: Path) -> None:
    source = make_lagoon(Lagoon(nodes=240, words=80), 3, 1)
    clients = federate(source, partition="column:owner", split="inductive", seed=2)
    path = save_federation(clients, tmp_path / "grows")
    again = load_federation(path)
    for one, two in zip(clients.graphs, again.graphs, strict=True):
        assert torch.equal(one.since, two.since)  # type: ignore[arg-type]
        assert torch.equal(one.edge_since, two.edge_since)  # type: ignore[arg-type]
    plain = save_federation(nodes(), tmp_path / "plain")
    assert [b'"version":"2"' in file.read_bytes() for file in (path, plain)] == [True, False]
    made = {"rounds": 2, "set": {"hidden": 8}}
    whole = atoll.run("fedavg", str(path), **made).metrics()  # type: ignore[arg-type]
    assert whole == atoll.run("fedavg", clients, **made).metrics()  # type: ignore[arg-type]
