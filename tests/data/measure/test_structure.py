"""The shape of one graph: statistics, random graphs and anonymous walks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from atoll.data.measure.structure import (
    anonymous_walks,
    clustering,
    compare_with_random,
    random_pairs,
    structure_statistics,
    walk_patterns,
)
from atoll.data.public.registry import load_dataset
from atoll.data.source import GraphSet, undirected_pairs

FIVE = np.array([[0, 0, 1, 2, 3], [1, 2, 2, 3, 4]])


def test_statistics_of_a_triangle_with_a_tail() -> None:
    rng = np.random.default_rng(0)
    found = structure_statistics(FIVE, 5, path_sources=100, rng=rng)
    np.testing.assert_allclose(found, [2.5, 1.7, 1.0, 7 / 15])
    regular = structure_statistics(FIVE[:, :3], 3, path_sources=100, rng=rng)
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
    found = anonymous_walks(FIVE, 5, walks=100_000, steps=5, rng=np.random.default_rng(0))
    assert found.sum() == pytest.approx(1)
    np.testing.assert_allclose(found, list(exact.values()), atol=0.006)


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
