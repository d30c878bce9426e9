import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph, sparse_matrix
from atoll.data.divide import InducedSubgraphs, federate
from atoll.data.measure.heterogeneity import (
    compare_graphs,
    describe,
    embedding_distance,
    jensen_shannon,
    some_graphs,
)
from atoll.data.public.registry import load_dataset
from atoll.data.source import Source
from atoll.testing import relabelled, small_federation, small_graph_federation

FIVE = torch.tensor([[0, 0, 1, 2, 3], [1, 2, 2, 3, 4]])


def both_ways(edges: torch.Tensor) -> torch.Tensor:
    return torch.cat([edges, edges.flip(0)], dim=1)


def five() -> Graph:
    """The golden graph of FedTAD's card: a triangle with a tail of two."""
    x = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1], [0, 1, 0], [1, 0, 0]]).float()
    roles = torch.tensor([0, 1, 0, 0, 2])
    return make_graph(
        x, both_ways(FIVE), torch.tensor([0, 0, 1, 1, 0]),
        train=roles == 0, val=roles == 1, test=roles == 2,
    )  # fmt: skip


def pair() -> Graph:
    """One edge, given in one direction and twice, a self-loop and an isolated node."""
    x = torch.tensor([[1.0, 0, 0], [0, 0, 2], [0, 0, 0]])
    edges = torch.tensor([[0, 0, 1], [1, 1, 1]])
    return make_graph(x, edges, torch.tensor([1, 1, 2]), train=torch.ones(3))


def two() -> Federation:
    return Federation((five(), pair()), classes=4, name="two", numbers=(7, 3))


def test_counts_of_a_hand_made_federation() -> None:
    found = describe(two(), random_graphs=0)
    assert found.clients.tolist() == [7, 3]
    assert found.nodes.tolist() == [5, 3]
    assert found.edges.tolist() == [5, 1]
    assert found.isolated.tolist() == [0, 1]
    assert found.mean_degree.tolist() == pytest.approx([2, 2 / 3])
    assert found.labels.tolist() == [[3, 2, 0, 0], [0, 2, 1, 0]]
    assert found.roles.tolist() == [[3, 1, 1], [3, 0, 0]]


def test_homophily_is_fedtads_equation_2() -> None:
    found = describe(two(), random_graphs=0)
    assert found.homophily.tolist() == pytest.approx([0.4, 1.0])
    expected = [[0.25, 0.25, np.nan, np.nan], [np.nan, 1, np.nan, np.nan]]
    np.testing.assert_allclose(found.class_homophily, expected)


def test_a_client_without_edges_has_no_homophily_and_no_walks() -> None:
    lonely = make_graph(torch.ones(2, 3), torch.zeros(2, 0).long(), torch.tensor([0, 1]))
    found = describe(Federation((five(), lonely), classes=2), random_graphs=3)
    assert np.isnan(found.homophily[1])
    assert np.isnan(found.structure_divergence[0, 1])
    assert np.isnan(found.feature_divergence[1]).all()
    assert found.isolated[1] == 2
    assert found.shape.real[1, 2] == 0.5  # each node is its own component


def test_labels_outside_every_mask_count_unless_all_of_them_are_unknown() -> None:
    y = torch.tensor([0, 1, -1, -1])
    known = torch.tensor([1, 1, 0, 0])
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    graph = make_graph(torch.ones(4, 1), edges, y, train=known)
    found = describe(Federation((graph,), classes=2), random_graphs=0)
    assert found.labels.tolist() == [[1, 1]]
    assert found.homophily[0] == 0  # only of the pair 0-1
    graph = make_graph(torch.ones(4, 1), edges, torch.tensor([0, 1, 1, 0]), train=known)
    found = describe(Federation((graph,), classes=2), random_graphs=0)
    assert found.labels.tolist() == [[2, 2]]


def test_jensen_shannon_by_hand_and_against_scipy() -> None:
    found = jensen_shannon(np.array([[2, 0], [0, 5], [1, 1], [0, 0]]))
    np.testing.assert_allclose(found[:2, :2], [[0, 1], [1, 0]])
    expected = 0.5 * np.log2(4 / 3) + 0.5 * (0.5 * np.log2(2 / 3) + 0.5)
    assert found[0, 2] == pytest.approx(expected)
    assert np.isnan(found[3]).all()
    rows = np.random.default_rng(0).random((4, 6))
    scipy = [[jensenshannon(p, q, base=2) ** 2 for q in rows] for p in rows]
    np.testing.assert_allclose(jensen_shannon(rows), scipy, atol=1e-12)


def test_label_divergence() -> None:
    found = describe(two(), random_graphs=0)
    distance = jensenshannon([0.6, 0.4, 0, 0], [0, 2 / 3, 1 / 3, 0], base=2)
    assert found.label_divergence[0, 1] == pytest.approx(distance**2)


def test_feature_similarity_of_connected_nodes() -> None:
    # Cosines of the five pairs: 1/2, 1/2, 1/2, 1/sqrt 2, 0; of the single pair: 0.
    found = describe(two(), random_graphs=0, feature_bins=4)
    np.testing.assert_allclose(found.similarity, [[0, 0, 0.2, 0.8], [0, 0, 1, 0]])


def test_pairs_with_a_node_without_features_have_no_similarity() -> None:
    x = torch.tensor([[0.0], [1], [1]])
    graph = make_graph(x, torch.tensor([[0, 1], [1, 2]]), torch.zeros(3).long())
    found = describe(Federation((graph,), classes=1), random_graphs=0, feature_bins=2)
    assert found.similarity.tolist() == [[0, 1]]
    bare = make_graph(torch.ones(3, 0), graph.edges, graph.y)
    found = describe(Federation((bare,), classes=1), random_graphs=0)
    assert np.isnan(found.similarity).all()


def test_sparse_features_and_padding_change_nothing() -> None:
    plain = five()
    rows, columns = torch.nonzero(plain.x, as_tuple=True)
    sparse = sparse_matrix(rows, columns, plain.x[rows, columns], (5, 3), square=False)
    one = torch.tensor([0.0])
    padded = replace(
        plain,
        x=torch.cat([plain.x, torch.ones(1, 3)]),
        edges=torch.cat([plain.edges, torch.tensor([[5, 5], [5, 0]])], dim=1),
        edge_weight=torch.cat([plain.edge_weight, torch.zeros(2)]),
        y=torch.cat([plain.y, torch.tensor([1])]),
        train=torch.cat([plain.train, one]),
        val=torch.cat([plain.val, one]),
        test=torch.cat([plain.test, one]),
        real=torch.cat([plain.real, one]),
        ids=torch.arange(6),
    )
    wanted = describe(Federation((plain,), classes=2))
    for graph in (replace(plain, x=sparse), padded):
        assert_equal(describe(Federation((graph,), classes=2)), wanted)


def assert_equal(one: object, other: object) -> None:
    for field in fields(one):  # type: ignore[arg-type]
        mine, yours = getattr(one, field.name), getattr(other, field.name)
        if field.name == "shape":
            assert_equal(mine, yours)
        else:
            np.testing.assert_array_equal(mine, yours, err_msg=field.name)


def test_the_order_of_the_clients_does_not_matter() -> None:
    federation = two()
    one, other = describe(federation), describe(federation.reordered([1, 0]))
    np.testing.assert_array_equal(one.walks, other.walks[::-1])
    np.testing.assert_array_equal(one.shape.mean, other.shape.mean[::-1])
    np.testing.assert_array_equal(one.structure_divergence, other.structure_divergence[::-1, ::-1])


def test_describe_is_deterministic_and_leaves_the_global_generator_alone() -> None:
    before = np.random.get_state()[1].tolist()
    assert_equal(describe(two(), seed=5), describe(two(), seed=5))
    assert np.random.get_state()[1].tolist() == before
    different = describe(two(), seed=6).walks[0] != describe(two(), seed=5).walks[0]
    assert different.any()


@pytest.mark.parametrize("option", ["walks", "path_sources", "feature_bins", "random_graphs"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is -1; give a whole number from"):
        describe(two(), **{option: -1})


def test_a_client_without_nodes_is_refused() -> None:
    empty = make_graph(torch.ones(0, 3), torch.zeros(2, 0).long(), torch.zeros(0).long())
    with pytest.raises(DataError, match="no nodes"):
        describe(Federation((five(), empty), classes=2))


def ring() -> Source:
    """A ring of six nodes, two owners of three neighbours each."""
    around = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
    return Source(
        "ring", np.eye(6, dtype=np.float32), both_ways(around).numpy(),
        np.arange(6) % 2, classes=2, columns={"owner": np.array([0, 0, 0, 1, 1, 1])},
    )  # fmt: skip


def divided() -> Federation:
    return federate(ring(), clients=None, partition="column:owner", ratios=(1.0, 0.0, 0.0))


def test_edges_lost_are_counted_in_pairs() -> None:
    found = describe(divided(), random_graphs=0)
    assert (found.edges_total, found.edges_lost) == (6, 2)
    assert found.edges_lost_share == pytest.approx(1 / 3)
    assert found.edges.tolist() == [2, 2]


def test_an_edge_that_two_clients_have_is_kept_once() -> None:
    parts = (np.array([0, 1, 2, 3]), np.array([2, 3, 4, 5]))
    graphs = tuple(InducedSubgraphs(ring()).graph(ids, np.zeros(4)) for ids in parts)
    found = describe(replace(divided(), graphs=graphs), random_graphs=0)
    assert found.edges.tolist() == [3, 3]
    assert (found.edges_total, found.edges_lost) == (6, 1)


def test_directed_edges_are_counted_as_they_stand() -> None:
    one_way = replace(five(), edges=FIVE, edge_weight=torch.ones(5))
    other = replace(one_way, ids=torch.arange(5, 10))
    found = describe(Federation((one_way, other), 2, about={"edges_total": 14}), random_graphs=0)
    assert (found.edges_total, found.edges_lost) == (14, 4)
    found = describe(Federation((five(), five()), classes=2), random_graphs=0)
    assert np.isnan([found.edges_total, found.edges_lost, found.edges_lost_share]).all()


def test_embedding_distance_by_hand() -> None:
    pytest.importorskip("ot")
    embeddings = [np.array([[0.0], [1], [9]]), np.array([[2.0], [3]]), np.array([[1.0], [7], [7]])]
    labels = [np.array([0, 0, 1]), np.array([0, 0]), np.array([0, 1, -1])]
    # Class 0: {0, 1} {2, 3}: 2; {0, 1} {1}: 1/2; {2, 3} {1}: 3/2. Class 1: {9} {7}: 2.
    assert embedding_distance(embeddings, labels) == pytest.approx((2 + 0.5 + 1.5 + 2) / 4)
    squared = (2 + np.sqrt(1 / 2) + np.sqrt(5 / 2) + 2) / 4
    assert embedding_distance(embeddings, labels, order=2) == pytest.approx(squared)


def test_embedding_distance_draws_with_its_own_seed() -> None:
    pytest.importorskip("ot")
    rng = np.random.default_rng(0)
    embeddings = [rng.normal(size=(300, 4)), rng.normal(size=(300, 4)) + 1]
    labels = [np.zeros(300, dtype=int)] * 2
    one = embedding_distance(embeddings, labels, samples=50, seed=1)
    assert one == embedding_distance(embeddings, labels, samples=50, seed=1)
    assert one != embedding_distance(embeddings, labels, samples=50, seed=2)
    assert 1.5 < one < 3


def test_embedding_distance_without_a_common_class_is_not_defined() -> None:
    assert np.isnan(embedding_distance([np.ones((2, 1))] * 2, [np.array([0, 0]), np.array([1, 1])]))


def test_embedding_distance_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    ones, zeros = [np.ones((2, 1))] * 2, [np.zeros(2, dtype=int)] * 2
    with pytest.raises(DataError, match="2 arrays of embeddings came with 1 of labels"):
        embedding_distance(ones, zeros[:1])
    with pytest.raises(DataError, match="client 1 has embeddings of shape"):
        embedding_distance(ones, [zeros[0], np.zeros(3, dtype=int)])
    with pytest.raises(ConfigError, match="order is 3"):
        embedding_distance(ones, zeros, order=3)
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(ConfigError, match=r"pip install 'atoll-fgl\[report\]'"):
        embedding_distance(ones, zeros)


@pytest.mark.data
def test_cora_among_ten_clients(real_data: Callable[[str], Path]) -> None:
    source = load_dataset("cora", real_data("cora"))
    assert isinstance(source, Source)
    federation = federate(source, clients=10, partition="louvain")
    found = describe(federation, random_graphs=2)
    assert found.labels.sum(axis=0).tolist() == [351, 217, 418, 818, 426, 298, 180]
    assert found.edges_total == 5278
    assert found.edges.sum() + found.edges_lost == 5278
    for matrix in (found.label_divergence, found.feature_divergence, found.structure_divergence):
        assert np.isfinite(matrix).all()
        assert (np.diag(matrix) == 0).all()
        np.testing.assert_allclose(matrix, matrix.T, atol=1e-15)
    # Louvain's communities are far apart in their labels, and close in features and structure.
    assert found.label_divergence.mean() > 5 * found.feature_divergence.mean()
    assert (found.shape.real[:, 3] > 5 * found.shape.mean[:, 3]).all()


LOG2 = float(np.log(2))


def client(kind: str, graphs: int, alike: bool) -> Graph:
    """Paths of two nodes, or triangles, whose linked nodes have equal or disjoint features."""
    size = 2 if kind == "path" else 3
    ends = [(0, 1)] if kind == "path" else [(0, 1), (1, 2), (0, 2)]
    one_way = torch.tensor([(size * g + a, size * g + b) for g in range(graphs) for a, b in ends]).T
    nodes = size * graphs
    place = torch.zeros(nodes, dtype=torch.int64) if alike else torch.arange(nodes) % size
    root = torch.arange(graphs).repeat_interleave(size) * size
    return make_graph(
        torch.nn.functional.one_hot(place, 3).float(),
        torch.cat([one_way, one_way.flip(0)], dim=1),
        torch.zeros(nodes, dtype=torch.int64),
        train=root == torch.arange(nodes),
        root=root,
    )


def test_by_hand() -> None:
    graphs = (client("path", 4, True), client("path", 3, False), client("triangle", 5, True))
    found = compare_graphs(Federation(graphs, 2), walks=4000)
    # On one edge every walk is 010101; on a triangle it is one of 2^4, that one among them.
    share = 1 / 16
    middle = (1 + share) / 2
    inner = np.log(16) / 2
    spread = -(middle * np.log(middle) + 15 * (share / 2) * np.log(share / 2))
    assert found.structure[0, 1] == 0
    assert found.structure[0, 2] == pytest.approx(np.sqrt(spread - inner), abs=0.01)
    assert found.structure[2, 2] < 0.06  # within a client: only noise of the walks
    assert found.features[0, 2] == 0
    assert found.features[0, 1] == pytest.approx(LOG2)
    np.testing.assert_array_equal(found.features, found.features.T)


def test_clients_with_one_graph_have_no_pair_of_their_own() -> None:
    found = compare_graphs(small_federation(), walks=500)
    assert np.isnan(np.diagonal(found.structure)).all()
    upper = found.structure[np.triu_indices(4, 1)]
    assert ((upper > 0) & (upper < np.sqrt(LOG2))).all()


def test_graphs_are_drawn_and_the_order_of_clients_does_not_matter() -> None:
    federation = small_graph_federation()
    counts = [len(some_graphs(g, 6, np.random.default_rng(0))) for g in federation.graphs]
    assert counts == [6, 6, 6, 5]
    order = [2, 0, 3, 1]
    one = compare_graphs(federation, graphs=4, walks=200)
    other = compare_graphs(federation.reordered(order), graphs=4, walks=200)
    np.testing.assert_allclose(one.structure[np.ix_(order, order)], other.structure)
    np.testing.assert_allclose(one.features[np.ix_(order, order)], other.features)


def test_a_drawn_graph_is_the_clients_own() -> None:
    graph = small_graph_federation().graphs[1]
    everything = some_graphs(graph, 99, np.random.default_rng(0))
    assert sum(one.nodes for one in everything) == graph.num_nodes
    assert 2 * sum(one.pairs.shape[1] for one in everything) == graph.edges.shape[1]
    moved = some_graphs(relabelled(graph, 3), 99, np.random.default_rng(0))
    sizes = [
        sorted((one.nodes, one.pairs.shape[1]) for one in many) for many in (everything, moved)
    ]
    assert sizes[0] == sizes[1]
