import itertools
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph, sparse_matrix
from atoll.data.client_graph import InducedSubgraphs
from atoll.data.divide import federate
from atoll.data.measure.heterogeneity import describe, embedding_distance, jensen_shannon
from atoll.data.measure.structure import (
    anonymous_walks,
    clustering,
    compare_with_random,
    random_pairs,
    structure_statistics,
    walk_patterns,
)
from atoll.data.public.registry import load_dataset
from atoll.data.source import GraphSet, Source, undirected_pairs

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
    assert found.shape.real[1, 2] == 0.5  # each node is a component of its own


def test_labels_outside_every_mask_count_unless_all_of_them_are_unknown() -> None:
    y = torch.tensor([0, 1, -1, -1])
    known = torch.tensor([1, 1, 0, 0])
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    graph = make_graph(torch.ones(4, 1), edges, y, train=known)
    found = describe(Federation((graph,), classes=2), random_graphs=0)
    assert found.labels.tolist() == [[1, 1]]
    assert found.homophily[0] == 0  # of the pair 0-1 alone
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


def test_label_divergence_and_gcfls_units() -> None:
    found = describe(two(), random_graphs=0)
    distance = jensenshannon([0.6, 0.4, 0, 0], [0, 2 / 3, 1 / 3, 0], base=2)
    assert found.label_divergence[0, 1] == pytest.approx(distance**2)
    nats = jensenshannon(*found.walks)
    assert found.gcfl_structure[0, 1] == pytest.approx(nats)
    assert found.gcfl_feature[0, 1] == pytest.approx(jensenshannon(*found.similarity) ** 2)


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


def test_statistics_of_a_triangle_with_a_tail() -> None:
    rng = np.random.default_rng(0)
    found = structure_statistics(FIVE.numpy(), 5, path_sources=100, rng=rng)
    np.testing.assert_allclose(found, [2.5, 1.7, 1.0, 7 / 15])
    regular = structure_statistics(FIVE.numpy()[:, :3], 3, path_sources=100, rng=rng)
    np.testing.assert_allclose(regular, [np.nan, 1, 1, 1])


@pytest.mark.parametrize("seed", range(5))
def test_statistics_agree_with_networkx(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, count = 90, [40, 90, 200, 700, 2000][seed]
    pairs = random_pairs(nodes, count, rng)
    graph = nx.empty_graph(nodes)
    graph.add_edges_from(pairs.T.tolist())
    assert graph.number_of_edges() == count
    inside = graph.subgraph(max(nx.connected_components(graph), key=len))
    found = structure_statistics(pairs, nodes, path_sources=nodes, rng=rng)
    expected = [len(inside) / nodes, nx.average_clustering(graph)]
    np.testing.assert_allclose(found[2:], expected, atol=1e-12)
    # Of several components of equal size any may be the largest.
    if count >= 90:
        assert found[1] == pytest.approx(nx.average_shortest_path_length(inside))
    sampled = structure_statistics(pairs, nodes, path_sources=30, rng=rng)
    assert sampled[1] == pytest.approx(found[1], rel=0.2)


def test_clustering_counts_triangles_around_a_hub() -> None:
    hub = np.array([[0, 0, 0, 0, 1], [1, 2, 3, 4, 2]])
    assert clustering(hub, 5) == pytest.approx((1 / 6 + 1 + 1) / 5)


def test_random_pairs_are_simple_and_uniform() -> None:
    rng = np.random.default_rng(1)
    assert random_pairs(1, 0, rng).shape == (2, 0)
    everything = random_pairs(40, 780, rng)
    assert len(set(map(tuple, everything.T.tolist()))) == 780
    assert (everything[0] < everything[1]).all()
    drawn = np.concatenate([random_pairs(6, 5, rng) for _ in range(3000)], axis=1)
    counts = np.unique(drawn[0] * 6 + drawn[1], return_counts=True)[1]
    assert counts.size == 15
    assert np.abs(counts - 1000).max() < 120  # four standard deviations


def test_comparison_with_random_graphs() -> None:
    clique, _ = undirected_pairs(np.array(list(itertools.combinations(range(8), 2))).T, 20)
    options = {"graphs": 15, "path_sources": 64}
    found = compare_with_random(clique, 20, rng=np.random.default_rng(0), **options)
    assert found.real[2:].tolist() == pytest.approx([0.4, 0.4])
    assert found.z[3] > 3
    assert found.p[3] == pytest.approx(1 / 16)
    assert found.z == pytest.approx((found.real - found.mean) / found.std)
    # A complete graph is its own random graph: nothing varies, nothing is unusual.
    whole, _ = undirected_pairs(np.array(list(itertools.combinations(range(8), 2))).T, 8)
    found = compare_with_random(whole, 8, rng=np.random.default_rng(0), **options)
    assert np.isnan(found.z).all()
    assert found.p[1:].tolist() == [1, 1, 1]


def test_there_are_52_walks_of_five_steps() -> None:
    assert [len(walk_patterns(steps)) for steps in range(1, 7)] == [1, 2, 5, 15, 52, 203]
    assert walk_patterns(3) == (
        (0, 1, 0, 1),
        (0, 1, 0, 2),
        (0, 1, 2, 0),
        (0, 1, 2, 1),
        (0, 1, 2, 3),
    )


def test_walks_on_one_edge_go_to_and_fro() -> None:
    found = anonymous_walks(
        np.array([[0], [2]]), 3, walks=10, steps=5, rng=np.random.default_rng(0)
    )
    assert found[walk_patterns(5).index((0, 1, 0, 1, 0, 1))] == 1


def test_walks_come_close_to_their_exact_probabilities() -> None:
    neighbours = {0: [1, 2], 1: [0, 2], 2: [0, 1, 3], 3: [2, 4], 4: [3]}
    exact = dict.fromkeys(walk_patterns(5), 0.0)
    walks = [((start,), 1 / 5) for start in range(5)]
    for _ in range(5):
        walks = [
            ((*walk, to), share / len(neighbours[walk[-1]]))
            for walk, share in walks
            for to in neighbours[walk[-1]]
        ]
    for walk, share in walks:
        exact[tuple(list(dict.fromkeys(walk)).index(node) for node in walk)] += share
    found = anonymous_walks(FIVE.numpy(), 5, walks=100_000, steps=5, rng=np.random.default_rng(0))
    assert found.sum() == pytest.approx(1)
    np.testing.assert_allclose(found, list(exact.values()), atol=0.006)


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


@pytest.mark.data
def test_gcfls_table_1_comes_out_for_ptc_mr(real_data: Callable[[str], Path]) -> None:
    graphs = load_dataset("PTC_MR", real_data("PTC_MR"))
    assert isinstance(graphs, GraphSet)
    rng, rows = np.random.default_rng(0), []
    owner = graphs.graph_of_node()[graphs.edges[0]]
    for number, (first, last) in enumerate(itertools.pairwise(graphs.node_ptr.tolist())):
        nodes = last - first
        pairs, _ = undirected_pairs(graphs.edges[:, owner == number] - first, nodes)
        rows.append(structure_statistics(pairs, nodes, path_sources=512, rng=rng))
    # The paper counts the kurtosis of a regular graph as zero.
    found = np.nan_to_num(np.array(rows)).mean(axis=0)
    assert found[0] == pytest.approx(2.1535, abs=5e-5)
    assert found[1] == pytest.approx(3.36, abs=5e-3)
    assert found[2] == 1
    assert found[3] == pytest.approx(0.0095, abs=5e-5)
