"""New tables for a trained model: alone, or joined to the training graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import AtollError
from atoll.data.own.new_tables import load_new
from atoll.data.own.reader import load_own
from atoll.data.own.schema import OwnOptions
from atoll.data.source import Source

from .graphs import EDGES, NODES, RAW, folder, pairs

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
    with pytest.raises(AtollError, match="holds 'z', not a node of"):
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
