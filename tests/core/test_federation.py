"""Federations: what their clients must have in common, their order and their numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation, LazyGraphs, each
from atoll.core.graph import Graph, make_graph
from atoll.core.task import GRAPHS, NODES
from atoll.testing import CLASSES, small_federation, small_graph_federation


def small(size: int = 3, features: int = 2) -> Graph:
    edges = torch.zeros(2, 0, dtype=torch.int64)
    return make_graph(torch.ones(size, features), edges, torch.zeros(size, dtype=torch.int64))


def test_a_federation_needs_a_client():
    with pytest.raises(DataError, match="at least one client"):
        Federation((), 2)


def test_clients_must_have_equally_many_features():
    edges = torch.zeros(2, 0, dtype=torch.int64)
    wide = make_graph(torch.ones(3, 4), edges, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match=r"equally many features, but have \[2, 4\]"):
        Federation((small(), wide), 2)


def test_clients_are_numbered_in_order_and_keep_their_numbers():
    graphs = tuple(small() for _ in range(3))
    federation = Federation(graphs, 2, name="abc")
    assert (len(federation), federation.features, federation.numbers) == (3, 2, (0, 1, 2))
    turned = federation.reordered([2, 0, 1])
    assert turned.numbers == (2, 0, 1)
    assert turned.graphs[0] is graphs[2]
    assert turned.name == "abc"
    assert turned.reordered([1, 2, 0]).numbers == (0, 1, 2)


def test_names_follow_their_clients():
    graphs = tuple(small() for _ in range(3))
    plain = Federation(graphs, 2)
    assert plain.reordered([2, 0, 1]).client_names == ("2", "0", "1")
    assert plain.class_names == ("0", "1")
    about = {"client_names": ["north", "south", "west"], "class_names": ["late", "paid"]}
    named = Federation(graphs, 2, about=about).reordered([2, 0])
    assert named.client_names == ("west", "north")
    assert named.class_names == ("late", "paid")
    assert Federation(graphs, 2, about={"sites": ["a", "b"]}).client_names == ("a", "b", "2")


def test_a_prepared_federation_has_every_clients_views():
    federation = Federation((small(), small()), 2)
    prepared = federation.prepared({"x2": lambda g: g.x * 2})
    assert all(torch.equal(g.views["x2"], g.x * 2) for g in prepared.graphs)
    assert federation.graphs[0].views == {}


def test_clients_of_two_tasks_are_refused() -> None:
    mixed = (small_federation().graphs[0], small_graph_federation().graphs[0])
    with pytest.raises(DataError, match="all clients must have one task"):
        Federation(mixed, CLASSES)


def test_a_federation_carries_its_task_and_prints_as_before() -> None:
    assert small_federation().task is NODES
    assert small_graph_federation().task is GRAPHS
    assert "clients of 9 to 22 nodes, 11 features" in repr(small_federation())
    assert "clients of 5 to 9 graphs, " in repr(small_graph_federation())


def test_a_metric_that_the_task_does_not_have_is_refused() -> None:
    assert replace(small_federation(), metric="auc").metric == "auc"
    with pytest.raises(ConfigError, match="unknown metric 'acuracy'; did you mean 'accuracy'"):
        replace(small_federation(), metric="acuracy")


def test_lazy_graphs_are_made_at_each_read_and_changed_then() -> None:
    made: list[int] = []

    def make(number: int) -> Graph:
        made.append(number)
        return small(number + 1)

    graphs = each(lambda graph: replace(graph, task_name="node"), LazyGraphs(4, make))
    assert isinstance(graphs, LazyGraphs)
    assert made == []
    assert [graphs[-1].num_nodes, *(graph.num_nodes for graph in graphs[1:3])] == [4, 2, 3]
    assert made == [3, 1, 2]
    assert graphs[0].task_name == "node"
    with pytest.raises(IndexError):
        graphs[4]
