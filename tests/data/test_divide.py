"""From a graph to a federation: induced edges, attributes of nodes, and bad clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import atoll
from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.core.graph import Graph, Sparse
from atoll.core.minibatch import is_cut
from atoll.data.divide import (
    InducedSubgraphs,
    federate,
    largest_component,
    row_normalized,
    words_normalized,
)
from atoll.data.source import TEST, TRAIN, UNUSED, VAL, GraphGroup, GraphSet, Source
from atoll.data.synthetic import Archipelago, Lagoon, make_lagoon
from tests.data.toys import toy_set

EVERYTHING = ("no-edge", "single-class")


def lagoon(**knobs: float) -> Source:
    return make_lagoon(Lagoon(**{"nodes": 240, "words": 40, **knobs}), 4, 0)


def dense(x: torch.Tensor | Sparse) -> torch.Tensor:
    return x.to_dense() if isinstance(x, Sparse) else x


def toy(owners: list[str], edges: list[tuple[int, int]], y: list[int], **more) -> Source:
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    x = np.arange(len(y) * 2, dtype=np.float32).reshape(-1, 2)
    more = {"columns": {"bank": np.array(owners)}, **more}
    return Source("toy", x, ends, np.array(y), 2, **more)


def check_against_source(graph: Graph, source: Source, ids: np.ndarray) -> None:
    """Features, labels and edges are the source's own, restricted to the client's nodes."""
    ids = ids.astype(int)
    x = source.x.toarray() if sp.issparse(source.x) else source.x
    assert np.array_equal(dense(graph.x).numpy(), x[ids].astype(np.float32))
    assert np.array_equal(graph.y.numpy(), np.maximum(source.y[ids], 0))
    inside = np.isin(source.edges, ids).all(0)
    there = {(int(ids[u]), int(ids[v])) for u, v in graph.edges.T.tolist()}
    assert there == set(map(tuple, source.edges[:, inside].T.tolist()))
    assert graph.edges.shape[1] == inside.sum()


@settings(max_examples=25, deadline=None)
@given(
    recipe=st.sampled_from(["louvain", "metis", "random", "dirichlet", "column:owner"]),
    split=st.sampled_from(["stratified", "random", "openfgl", "fedtad"]),
    seed=st.integers(0, 10_000),
)
def test_clients_hold_their_own_nodes_and_no_others(recipe: str, split: str, seed: int) -> None:
    source = lagoon()
    try:
        found = federate(
            source, clients=4, partition=recipe, split=split, seed=seed, allow=EVERYTHING
        )
    except DataError as error:
        assume("has no training node" not in str(error))
        raise
    owned = np.concatenate([graph.ids.numpy() for graph in found.graphs])
    assert sorted(owned.tolist()) == list(range(source.num_nodes))
    for graph in found.graphs:
        check_against_source(graph, source, graph.ids.numpy())
        roles = torch.stack([graph.train, graph.val, graph.test])
        assert set(roles.unique().tolist()) <= {0.0, 1.0}
        assert (roles.sum(0) == 1).all()  # disjoint, and each node has a label
        assert graph.train.sum() > 0
    assert found.about["nodes"] == [g.num_nodes for g in found.graphs]
    again = federate(source, clients=4, partition=recipe, split=split, seed=seed, allow=EVERYTHING)
    assert again.about == found.about


def test_sparse_and_dense_features_give_the_same_federation() -> None:
    source = lagoon()
    full = replace(source, x=source.x.toarray())
    pairs = zip(federate(source, clients=3).graphs, federate(full, clients=3).graphs, strict=True)
    for sparse, plain in pairs:
        assert isinstance(sparse.x, Sparse)
        assert isinstance(plain.x, torch.Tensor)
        assert torch.equal(sparse.x.to_dense(), plain.x)
        assert torch.equal(sparse.edges, plain.edges)


def test_edge_weights_and_unknown_labels_follow_their_nodes() -> None:
    source = toy(
        list("aabb"), [(0, 1), (1, 0), (1, 2), (3, 2)], [0, 1, -1, 1],
        weight=np.float32([1, 2, 3, 4]), split=np.int8([TRAIN, TEST, TRAIN, VAL]),
    )  # fmt: skip
    first = InducedSubgraphs(source).graph(np.array([1, 0]), np.int8([TEST, TRAIN]))
    assert first.edges.tolist() == [[1, 0], [0, 1]]
    assert first.edge_weight.tolist() == [1, 2]
    assert first.test.tolist() == [1, 0]
    second = InducedSubgraphs(source).graph(np.array([2, 3]), np.int8([TRAIN, VAL]))
    assert second.train.tolist() == [0, 0]  # its label is unknown, so it cannot teach
    assert second.val.tolist() == [0, 1]
    assert second.y.tolist() == [0, 1]


def test_split_seed_and_partition_seed_are_independent() -> None:
    source = lagoon()
    a, b = (
        federate(source, clients=3, partition="random", seed=s, partition_seed=7) for s in (1, 2)
    )
    assert a.about["sha1"] == b.about["sha1"]
    assert not torch.equal(a.graphs[0].train, b.graphs[0].train)


def refusal(source: Source, **options) -> str:
    options = {"clients": None, "partition": "column:bank", "split": "given", **options}
    with pytest.raises((DataError, ConfigError)) as caught:
        federate(source, **options)
    return str(caught.value)


def roles(text: str) -> np.ndarray:
    return np.int8([{"t": TRAIN, "v": VAL, "e": TEST, "-": UNUSED}[c] for c in text])


RING = [(0, 1), (1, 0), (2, 3), (3, 2)]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (
            toy(list("aabb"), RING, [0, 1, 0, 1], split=roles("tvee")),
            ("client 'b' of 2 (2 nodes of 'toy')", "no training node", "fewer clients"),
        ),
        (
            toy(list("aabb"), [(0, 1), (1, 0)], [0, 1, 0, 1], split=roles("tvtv")),
            ("client 'b' of 2", "has no edge", "--allow no-edge"),
        ),
        (
            toy(list("aabb"), RING, [0, 1, 1, 1], split=roles("tvtv")),
            ("client 'b' of 2", "a single class", "--allow single-class"),
        ),
        (
            replace(toy(list("aabb"), RING, [0, 1, 0, 1]), x=np.float32([[1], [2], [np.nan], [4]])),
            ("'toy'", "NaN or infinite feature at node 2, column 0", "1 in all", "replace"),
        ),
        (
            replace(
                toy(list("aabb"), RING, [0, 1, 0, 1]),
                x=sp.csr_array(np.float32([[1, 0], [0, np.inf], [0, 0], [0, 4]])),
            ),
            ("NaN or infinite feature at node 1, column 1", "1 in all"),
        ),
        (
            toy(list("aabb"), RING, [0, 1, 2, 1]),
            ("node 2 has label 2", "labels are 0 to 1", "-1 where unknown"),
        ),
        (
            toy(list("aabb"), RING, [0, 1, -2, 1]),
            ("node 2 has label -2", "labels are 0 to 1"),
        ),
        (toy([], [], []), ("'toy' has no nodes", "at least one node")),
        (
            toy(list("aabb"), [(0, 9)], [0, 1, 0, 1]),
            ("an edge to node 9", "numbered 0 to 3"),
        ),
    ],
)  # fmt: skip
def test_unusable_graphs_and_clients_are_refused_in_one_sentence(source, parts) -> None:
    sentence = refusal(source)
    for part in parts:
        assert part in sentence
    assert "\n" not in sentence


def test_clients_without_edges_or_with_one_class_can_be_allowed() -> None:
    source = toy(list("aabb"), [(0, 1), (1, 0)], [0, 1, 1, 1], split=roles("tvtv"))
    found = federate(source, clients=None, partition="column:bank", split="given", allow=EVERYTHING)
    assert found.about["edges"] == [2, 0]


def test_more_clients_than_nodes() -> None:
    sentence = refusal(lagoon(), clients=999, partition="random", split="stratified")
    assert sentence == (
        "data 'lagoon' has 240 nodes, too few for 999 clients; use at most 240 clients"
    )


def check_graphs_of(graph: Graph, source: GraphSet, ids: list[int]) -> None:
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
        check_graphs_of(graph, source, ids)
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
        check_graphs_of(graph, source, list(range(source.num_graphs)))
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
        ({"partition": "random"}, "group 'pair' has one client for each data set; remove"),
        ({"clients": 3}, "group 'pair' has 2 data sets and one client for each; remove"),
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


def test_partition_in_python() -> None:
    assert len(atoll.partition(toy_set(200))) == 5
    assert len(atoll.partition(toy_set(60), "random", clients=3, batch_size=0)) == 3
    assert len(atoll.partition(group())) == 2


def test_subgraphs_keep_edges_and_their_order_also_where_clients_overlap() -> None:
    source = make_lagoon(Archipelago(own_library=0.5), 3, 1)
    numbers = np.arange(source.edges.shape[1], dtype=np.float32)
    rng = np.random.default_rng(0)
    induced = InducedSubgraphs(replace(source, weight=numbers))
    for _ in range(5):
        ids = rng.permutation(source.num_nodes)[: source.num_nodes // 2]
        inside = np.isin(source.edges, ids).all(0)
        part = induced.part(ids)
        np.testing.assert_array_equal(part.weight, np.flatnonzero(inside))
        np.testing.assert_array_equal(ids[part.edges], source.edges[:, inside])


def graph(n: int, edges: list[tuple[int, int]], **more) -> Source:
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    x = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    return Source("toy", x, ends, np.arange(n) % 2, 2, **more)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12),
    edges=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30),
    data=st.data(),
)
def test_induced_keeps_exactly_the_edges_inside(n, edges, data) -> None:
    source = graph(n, [(u % n, v % n) for u, v in edges])
    ids = np.array(data.draw(st.permutations(range(n))))[: data.draw(st.integers(1, n))]
    found = InducedSubgraphs(source).part(ids)
    wanted = [(u, v) for u, v in source.edges.T.tolist() if u in ids and v in ids]
    assert [(int(ids[u]), int(ids[v])) for u, v in found.edges.T] == wanted
    assert np.array_equal(found.y, source.y[ids])


def test_largest_component_renumbers_and_takes_everything_along() -> None:
    source = graph(
        6,
        [(0, 1), (2, 3), (3, 4)],
        split=np.int8([0, 1, 2, 0, 1, 2]),
        weight=np.float32([1, 2, 3]),
        columns={"bank": np.array(list("aabbcc"))},
    )
    found = largest_component(source)
    assert found.edges.T.tolist() == [[0, 1], [1, 2]]
    assert np.array_equal(found.x, source.x[2:5])
    assert found.y.tolist() == [0, 1, 0]
    assert found.split.tolist() == [2, 0, 1]
    assert found.weight.tolist() == [2, 3]
    assert found.columns["bank"].tolist() == ["b", "b", "c"]


def test_largest_component_of_equals_is_the_first() -> None:
    found = largest_component(graph(4, [(2, 3), (0, 1)]))
    assert found.x[:, 0].tolist() == [0, 2]


def test_row_normalized_sums_to_one_and_leaves_zero_rows() -> None:
    x = np.float32([[1, 3], [0, 0], [2, 2]])
    source = Source("toy", x, np.zeros((2, 0), np.int64), np.zeros(3, np.int64), 1)
    expected = [[0.25, 0.75], [0, 0], [0.5, 0.5]]
    assert row_normalized(source).x.tolist() == expected
    sparse = Source("toy", sp.csr_array(x), source.edges, source.y, 1)
    found = row_normalized(sparse).x
    assert sp.issparse(found)
    assert found.dtype == np.float32
    assert found.toarray().tolist() == expected


def test_only_counts_of_words_are_normalized_for_fedpub() -> None:
    words = replace(graph(1, []), x=np.array([[2.0, 6.0]], np.float32), name="Cora")
    assert words_normalized(words).x.tolist() == [[0.25, 0.75]]
    other = replace(words, name="minesweeper")
    assert words_normalized(other) is other
