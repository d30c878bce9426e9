"""A site's data, from a client file or from tables."""

from __future__ import annotations

import pytest

from atoll.core.errors import ConfigError, DataError
from atoll.deploy.site_data import read_site_data


def test_a_site_that_lacks_a_class_numbers_the_others_as_all_do(tmp_path, tables):
    whole = read_site_data(tables(tmp_path / "a", "xyz"))
    part = read_site_data(tables(tmp_path / "b", "xz"), classes=["x", "y", "z"])
    assert whole.words == part.words
    assert part.classes == 3
    assert set(part.graph.y.tolist()) == {0, 2}
    with pytest.raises(ConfigError, match="class 'z', which --classes does not name"):
        read_site_data(tmp_path / "b", classes=["x", "y"])
    for names in (["x", "z", "x"], ["x", "z", ""]):
        with pytest.raises(ConfigError, match="has an empty name or one twice"):
            read_site_data(tmp_path / "b", classes=names)


def test_a_site_may_have_one_class_if_it_lists_all(tmp_path, tables):
    alone = read_site_data(tables(tmp_path / "a", "x"), classes=["x", "y"])
    assert (alone.classes, set(alone.graph.y.tolist())) == (2, {0})
    assert set(read_site_data(tmp_path / "a", classes=["w", "x"]).graph.y.tolist()) == {1}
    for classes in ((), ["x"]):
        with pytest.raises(DataError, match=r"only the class 'x'; list all .* with --classes"):
            read_site_data(tmp_path / "a", classes=classes)


def test_a_file_that_is_no_clients_data_is_refused(tmp_path):
    from atoll.engines.codec import save_checkpoint

    save_checkpoint(tmp_path / "x.atoll", {"server": 1})
    with pytest.raises(DataError, match="is not a client's data"):
        read_site_data(tmp_path / "x.atoll")


def test_a_site_hides_nodes_that_are_not_for_training(tmp_path, tables):
    graph = read_site_data(tables(tmp_path / "a", "xyz"), split="inductive").graph
    assert graph.since.tolist() == (graph.val + 2 * graph.test).tolist()
    assert graph.edge_since.tolist() == graph.since[graph.edges].amax(0).tolist()
