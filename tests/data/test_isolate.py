"""Only one kind of heterogeneity: the parts that clients keep, and the random parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.graph import make_graph
from atoll.data.isolate import vary_federation
from atoll.data.measure.heterogeneity import describe
from atoll.data.source import undirected_pairs


@pytest.fixture(scope="module")
def federation() -> Federation:
    return atoll.partition(atoll.load("lagoon:nodes=240", clients=3), "column:owner")


def pairs_of(graph) -> set[tuple[int, int]]:
    return set(map(tuple, undirected_pairs(graph.edges.numpy(), graph.num_nodes)[0].T.tolist()))


def homophily(federation: Federation) -> np.ndarray:
    return describe(federation, walks=1, random_graphs=0, path_sources=1).class_homophily


def test_none_changes_nothing(federation) -> None:
    assert vary_federation(federation, "none") is federation


def test_nodes_loses_the_edges_and_nothing_else(federation) -> None:
    varied = vary_federation(federation, "nodes")
    for before, after in zip(federation.graphs, varied.graphs, strict=True):
        assert after.edges.shape == (2, 0)
        assert after.edge_weight.shape == (0,)
        for name in ("x", "y", "train", "val", "test", "ids"):
            assert getattr(after, name) is getattr(before, name)
    assert varied.numbers == federation.numbers
    assert varied.about["edges"] == [0, 0, 0]


@pytest.mark.parametrize("vary", ["topology", "class-topology"])
def test_every_client_gets_one_clients_nodes(federation, vary: str) -> None:
    base = federation.graphs[1]
    varied = vary_federation(federation, vary, client=1)
    for graph in varied.graphs:
        for name in ("x", "y", "train", "val", "test", "ids"):
            assert getattr(graph, name) is getattr(base, name)
        both = torch.cat([graph.edges, graph.edges.flip(0)], dim=1)
        assert len(torch.unique(both, dim=1).T) == graph.edges.shape[1]  # both ways, none twice
        assert pairs_of(base) < pairs_of(graph) or graph.edges.shape == base.edges.shape
        assert (graph.edges[0] != graph.edges[1]).all()
        assert graph.edge_weight.shape == (graph.edges.shape[1],)


def test_topology_grows_from_client_to_client(federation) -> None:
    count = len(pairs_of(federation.graphs[0]))
    varied = vary_federation(federation, "topology", ratio=0.4)
    assert torch.equal(varied.graphs[0].edges, federation.graphs[0].edges)
    assert [len(pairs_of(graph)) for graph in varied.graphs] == [
        count + round(i * 0.4 * count) for i in range(3)
    ]
    first, second, third = np.nanmean(homophily(varied), axis=1)
    assert first > second > third


def test_class_topology_hurts_each_clients_own_classes(federation) -> None:
    varied = vary_federation(federation, "class-topology", ratio=1.0)
    base = pairs_of(federation.graphs[0])
    labels = federation.graphs[0].y.numpy()
    present = np.unique(labels)
    for place, graph in enumerate(varied.graphs):
        new = np.array(sorted(pairs_of(graph) - base))
        ends = labels[new]
        assert len(new) == len(base)
        assert (ends[:, 0] != ends[:, 1]).all()
        assert np.isin(ends, present[place::3]).any(axis=1).all()
    found = homophily(varied)
    for place, label in enumerate(present):
        assert found[:, label].argmin() == place % 3


def test_more_clients_than_classes_leaves_some_as_they_are(federation) -> None:
    many = Federation(federation.graphs * 4, federation.classes)
    varied = vary_federation(many, "class-topology")
    assert torch.equal(varied.graphs[-1].edges, federation.graphs[0].edges)


def test_draws_follow_the_seed_and_the_clients_number(federation) -> None:
    one, same, other = (
        vary_federation(federation, "topology", seed=seed).graphs[2].edges for seed in (3, 3, 4)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_new_edges_weigh_as_much_as_the_old_ones(federation) -> None:
    graphs = [replace(g, edge_weight=g.edge_weight * 7) for g in federation.graphs]
    varied = vary_federation(replace(federation, graphs=tuple(graphs)), "topology")
    assert torch.allclose(varied.graphs[2].edge_weight, torch.tensor(7.0))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"vary": "edges"}, "unknown value of --vary 'edges'"),
        ({"vary": "nodes", "client": 3}, "client 3 is not among the 3 clients; give .* 0 to 2"),
        ({"vary": "nodes", "client": -1}, "client -1 is not among"),
        ({"vary": "topology", "ratio": -1.0}, "ratio is -1.0; give a finite number"),
        ({"vary": "topology", "ratio": float("nan")}, "ratio is nan"),
    ],
)
def test_what_is_refused(federation, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        vary_federation(federation, **options)


@pytest.mark.parametrize(
    ("vary", "ratio"), [("topology", 1e12), ("topology", 12), ("class-topology", 20)]
)
def test_more_edges_than_there_is_room_for(federation, vary: str, ratio: float) -> None:
    with pytest.raises(DataError, match=r"edges do not fit among 90 nodes with 166 .* --ratio"):
        vary_federation(federation, vary, ratio=ratio)


def test_a_graph_can_be_filled_to_the_last_pair() -> None:
    at = torch.arange(6)
    ring = make_graph(torch.eye(6), torch.stack([at, (at + 1) % 6]), at % 2, train=at >= 0)
    ring = replace(ring, edges=torch.cat([ring.edges, ring.edges.flip(0)], dim=1))
    ring = replace(ring, edge_weight=torch.ones(12))
    varied = vary_federation(Federation((ring, ring), 2), "topology", ratio=1.5)
    assert len(pairs_of(varied.graphs[1])) == 15


def test_a_client_without_edges_has_no_topology_to_vary(federation) -> None:
    bare = vary_federation(federation, "nodes")
    with pytest.raises(DataError, match="has no edge, so that its topology cannot be varied"):
        vary_federation(bare, "topology")


def test_a_federation_of_one(federation) -> None:
    alone = Federation(federation.graphs[:1], federation.classes)
    with pytest.raises(DataError, match="has no other client; give two clients or more"):
        vary_federation(alone, "nodes")
