"""From sets of graphs to a federation: nothing lost, nothing shared, and bad clients refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import atoll
from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.core.graph import Graph, Sparse
from atoll.core.minibatch import is_cut
from atoll.data.divide import federate
from atoll.data.load import is_own, load
from atoll.data.public.registry import parse_name, plain_name, task_of_data
from atoll.data.source import GraphGroup, GraphSet, check_graph_set


def toy_set(
    graphs: int, features: int = 4, classes: int = 2, seed: int = 0, name: str = "toys"
) -> GraphSet:
    """Cycles of 3 to 7 nodes; the class decides the mean feature."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 8, graphs)
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    y = np.arange(graphs) % classes
    graph = np.repeat(np.arange(graphs), sizes)
    inside = np.arange(ptr[-1]) - ptr[graph]
    following = ptr[graph] + (inside + 1) % sizes[graph]
    one_way = np.stack([np.arange(ptr[-1]), following])
    edges = np.concatenate([one_way, one_way[::-1]], axis=1)
    column = (rng.integers(0, features, ptr[-1]) + y[graph]) % features
    x = np.eye(features, dtype=np.float32)[column]
    return GraphSet(name, x, edges[:, rng.permutation(edges.shape[1])], ptr, y, classes)


def dense(x: torch.Tensor | Sparse) -> torch.Tensor:
    return x.to_dense() if isinstance(x, Sparse) else x


def check_client(graph: Graph, source: GraphSet, ids: list[int]) -> None:
    """Features, edges, labels and sizes are the source's own, for exactly these graphs."""
    assert graph.roots is not None
    assert graph.root is not None
    owner = source.graph_of_node()
    nodes = graph.ids.long().numpy()
    assert owner[graph.at_roots(graph.ids).long().numpy()].tolist() == ids
    x = dense(graph.x).numpy()
    assert np.array_equal(x[:, : source.num_features], source.x[nodes])
    assert not x[:, source.num_features :].any()
    for root, g in zip(graph.roots.tolist(), ids, strict=True):
        mine = (graph.root == root).numpy()
        assert nodes[mine].tolist() == list(range(source.node_ptr[g], source.node_ptr[g + 1]))
        assert int(graph.y[root]) == source.y[g]
    ours = {(int(nodes[u]), int(nodes[v])) for u, v in graph.edges.T.tolist()}
    wanted = np.isin(owner[source.edges[0]], ids)
    assert ours == set(map(tuple, source.edges[:, wanted].T.tolist()))
    assert graph.edges.shape[1] == wanted.sum()
    assert (graph.edges[0].diff() >= 0).all()


@settings(max_examples=25, deadline=None)
@given(
    recipe=st.sampled_from(["gcfl-oneds", "random", "dirichlet:least=4", "topology-skew"]),
    split=st.sampled_from(["stratified", "random", "gcfl", "openfgl"]),
    seed=st.integers(0, 10_000),
    batch_size=st.integers(0, 40),
)
def test_clients_hold_their_own_graphs_and_no_others(recipe, split, seed, batch_size) -> None:
    source = toy_set(120, seed=seed)
    try:
        found = federate(
            source, clients=3, partition=recipe, split=split, seed=seed, batch_size=batch_size
        )
    except DataError as error:
        assume("cannot stratify" not in str(error))
        raise
    owner, seen = source.graph_of_node(), []
    for graph in found.graphs:
        ids = owner[graph.at_roots(graph.ids).long().numpy()].tolist()
        check_client(graph, source, ids)
        seen += ids
        roles = torch.stack([graph.train, graph.val, graph.test])
        assert torch.equal(roles.sum(0), torch.zeros(graph.num_nodes).index_fill(0, graph.roots, 1))
        train = int(graph.train.sum())
        assert train > 0
        assert is_cut(graph, found.batching) == (0 < batch_size < train)
        assert int(graph.size("nodes")) == len(ids)
        assert int(graph.size("train")) == train
    assert sorted(seen) == list(range(120))
    assert found.about["graphs"] == [int(graph.size("nodes")) for graph in found.graphs]
    assert found.task.name == "graph"
    again = federate(source, clients=3, partition=recipe, split=split, seed=seed)
    assert again.about["sha1"] == found.about["sha1"]


def group() -> GraphGroup:
    return GraphGroup("pair", (toy_set(30, 4, 2, 1, "a"), toy_set(20, 13, 3, 2, "b")))


def test_a_group_gives_a_set_to_each_client_and_says_what_each_has() -> None:
    found = federate(group(), batch_size=10)
    assert (len(found), found.features, found.classes) == (2, 13, 3)
    assert found.about["sets"] == ["a", "b"]
    assert found.about["partition"] == "by-set"
    for graph, source in zip(found.graphs, group().sets, strict=True):
        check_client(graph, source, list(range(source.num_graphs)))
        assert isinstance(graph.x, Sparse)  # one of thirteen columns
        assert graph.has_features is not None
        assert graph.has_features.tolist() == [1] * source.num_features + [0] * (
            13 - source.num_features
        )
        assert graph.has_classes is not None
        assert int(graph.has_classes.sum()) == source.classes
    assert repr(found) == "<Federation pair: 2 clients of 20 to 30 graphs, 13 features, 3 classes>"


def test_overlapping_clients_may_hold_a_graph_twice() -> None:
    source = toy_set(60)
    recipe = "gcfl-oneds:overlap=true,compat=replacement"
    found = federate(source, clients=2, partition=recipe, seed=1, split="random")
    graph = found.graphs[0]
    owner = source.graph_of_node()
    ids = owner[graph.at_roots(graph.ids).long().numpy()]
    assert len(set(ids.tolist())) < len(ids) == found.about["graphs"][0]
    assert graph.edges.shape[1] == 2 * graph.num_nodes  # every copy has its own edges


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"partition": "louvain"}, "partition 'louvain' divides one graph, but 'toys' is a set"),
        ({"partition": "by-set"}, "unknown partition 'by-set'"),
        ({"batch_size": -1}, "batch_size is -1; give 0"),
        ({"clients": 500}, "has 40 graphs, too few for 500 clients"),
        ({"split": "given"}, "comes without a split"),
    ],
)
def test_bad_options(options: dict, problem: str) -> None:
    with pytest.raises(AtollError, match=problem):
        federate(toy_set(40), **{"clients": 2, **options})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"partition": "random"}, "group 'pair' has one client for each data set; leave out"),
        ({"clients": 3}, "group 'pair' has 2 data sets and one client for each; leave out"),
    ],
)
def test_a_group_is_not_divided(options: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        federate(group(), **options)


def test_clients_that_cannot_take_part() -> None:
    source = replace(toy_set(40), y=np.repeat([0, 1], 20))
    with pytest.raises(DataError, match=r"client 0 of 2 \(20 graphs of 'toys'\) has graphs of a s"):
        federate(source, clients=2)
    assert len(federate(source, clients=2, allow=("single-class",))) == 2
    bare = replace(toy_set(40), edges=np.zeros((2, 0), dtype=np.int64))
    with pytest.raises(DataError, match="has no edge"):
        federate(bare, clients=2)
    unknown = replace(toy_set(40), y=np.concatenate([np.full(20, -1), [0, 1] * 10]))
    with pytest.raises(DataError, match=r"client 0 of 2 .* has no training graph"):
        federate(unknown, clients=2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"y": np.zeros(0, np.int64), "node_ptr": np.zeros(1, np.int64)}, "has no graphs"),
        ({"node_ptr": np.array([0, 0, 3]), "y": np.array([0, 1])}, "graph 0 has no nodes"),
        ({"y": np.array([0, 7])}, "graph 1 has label 7; labels are 0 to 1"),
        ({"x": np.array([[1.0], [np.nan], [0.0]])}, "NaN or infinite feature at node 1"),
        ({"edges": np.array([[0], [2]])}, "an edge from one graph to another"),
        ({"edges": np.array([[0], [9]])}, "an edge to a node that is not there"),
    ],
)
def test_sets_that_cannot_be_used(change: dict, problem: str) -> None:
    good = GraphSet(
        "tiny", np.ones((3, 1), np.float32), np.array([[0, 1], [1, 0]]), np.array([0, 2, 3]),
        np.array([0, 1]), 2,
    )  # fmt: skip
    assert check_graph_set(good) is good
    with pytest.raises(DataError, match=problem):
        check_graph_set(replace(good, **change))


def test_undirected_graphs_have_both_directions_once() -> None:
    source = toy_set(10)
    half = source.edges[:, source.edges[0] < source.edges[1]]
    loops = np.stack([np.arange(5), np.arange(5)])
    messy = replace(source, edges=np.concatenate([half, half, loops], axis=1))
    made = messy.undirected_simple().edges
    assert set(map(tuple, made.T.tolist())) == set(map(tuple, source.edges.T.tolist()))
    assert made.shape == source.edges.shape


def test_partition_in_python() -> None:
    assert len(atoll.partition(toy_set(200))) == 5
    assert len(atoll.partition(toy_set(60), "random", clients=3, batch_size=0)) == 3
    assert len(atoll.partition(group())) == 2


def test_names_with_options() -> None:
    assert parse_name("PROTEINS:features=degree,max_degree=7") == (
        "PROTEINS",
        {"features": "degree", "max_degree": 7},
    )
    assert parse_name("tu:COIL-DEL") == ("tu:COIL-DEL", {})
    assert parse_name("TU:COIL-DEL:features=degree") == ("TU:COIL-DEL", {"features": "degree"})
    assert plain_name("molecules:features=degree") == "molecules"
    names = ("nci1:features=degree", "tu:X", "Molecules", "cora", "lagoon:nodes=3", "a/b:c")
    assert [task_of_data(name) for name in names] == [*["graph"] * 3, *["node"] * 3]
    assert not is_own("molecules:features=degree")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("cora:features=degree", "data set 'cora' takes no options, but got 'features'"),
        ("MUTAG:feature=degree", "unknown option of a set of graphs 'feature'; did you mean"),
        ("MUTAG:features=degrees", "unknown value of features 'degrees'; did you mean 'degree'"),
        ("molecules:max_degree=much", "max_degree is much; give a whole number"),
        ("moleculs", "unknown data set 'moleculs'; did you mean 'molecules'"),
    ],
)
def test_bad_names(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(name)


def test_a_group_names_all_that_is_missing(tmp_path) -> None:
    with pytest.raises(DataError) as caught:
        load("Molecules", root=tmp_path)
    assert str(caught.value) == (
        f"group 'molecules' needs data sets that are not in {tmp_path}: MUTAG, BZR, COX2, DHFR, "
        "PTC_MR, AIDS, NCI1; get them with: atoll data fetch MUTAG BZR COX2 DHFR PTC_MR AIDS NCI1"
    )
