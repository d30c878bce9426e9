"""Partitions by chance, by a column, and with skew."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from atoll.data.partition import Partition, divide
from atoll.data.source import GraphSet, Source


def two_cliques(size: int = 4) -> Source:
    """Nodes 0..size-1 and size..2·size-1, all joined inside, one bridge between."""
    inside = [(i, j) for i in range(size) for j in range(size) if i != j]
    edges = [
        *inside,
        *((i + size, j + size) for i, j in inside),
        (size - 1, size),
        (size, size - 1),
    ]
    n = 2 * size
    y = np.repeat([0, 1], size)
    return Source("cliques", np.ones((n, 1), np.float32), np.array(edges).T, y, 2)


def graph_set(graphs: int = 130) -> GraphSet:
    """Graph g is a path of 2 + g % 5 nodes whose features are all -g."""
    lengths = 2 + np.arange(graphs) % 5
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    tails = np.concatenate([np.arange(a, b - 1) for a, b in pairwise(ptr)])
    edges = np.stack([np.r_[tails, tails + 1], np.r_[tails + 1, tails]])
    x = -np.repeat(np.arange(graphs), lengths)[:, None].astype(np.float32)
    return GraphSet("paths", x, edges, ptr, np.arange(graphs) % 2, 2)


def kept_edges(source: Source, partition: Partition) -> list[int]:
    """Undirected edges inside each client of a disjoint partition."""
    owner = np.empty(source.num_nodes, dtype=np.int64)
    for client, ids in enumerate(partition.parts):
        owner[ids] = client
    inside = owner[source.edges[0]] == owner[source.edges[1]]
    sizes = np.bincount(owner[source.edges[0, inside]], minlength=len(partition.parts))
    return (sizes // 2).tolist()


@pytest.mark.data
def test_cora_dirichlet_alpha_is_the_skew(cora_source):
    def largest_class(alpha: float) -> float:
        parts = divide(cora_source, "dirichlet", 10, 0, alpha=alpha).parts
        return float(np.mean([np.bincount(cora_source.y[i]).max() / len(i) for i in parts]))

    assert largest_class(0.1) > 0.5
    assert largest_class(100.0) < 0.4


def test_column_is_followed_in_ascending_order():
    bank = np.array(["b", "a", "b", "c", "a", "a", "c", "b"])
    source = replace(two_cliques(), columns={"bank": bank})
    partition = divide(source, "column:bank")
    assert [ids.tolist() for ids in partition.parts] == [[1, 4, 5], [0, 2, 7], [3, 6]]
    assert (partition.recipe, len(partition.parts)) == ("column:bank", 3)
    assert divide(source, "column:bank", 3).sha1 == partition.sha1


def test_gcfl_chunks_in_file_order_then_draws_like_the_public_code():
    partition = divide(graph_set(130), "gcfl-oneds", 2, seed=123)
    stream = np.random.RandomState(123)
    drawn = np.array([stream.randint(low=0, high=2, size=1)[0] for _ in range(30)])
    for client, ids in enumerate(partition.parts):
        chunk = np.arange(50 * client, 50 * client + 50)
        assert ids.tolist() == [*chunk, *(100 + np.flatnonzero(drawn == client))]


def test_gcfl_overlap_repeats_a_graph_only_with_compat():
    source = graph_set(200)
    for compat, repeats in ((None, False), ("replacement", True)):
        partition = divide(source, "gcfl-oneds", 4, 123, overlap=True, compat=compat)
        assert all(50 <= size < 150 for size in partition.sizes)
        found = [len(np.unique(ids)) < len(ids) for ids in partition.parts]
        assert all(found) if repeats else not any(found)


def test_feature_and_topology_skew_cut_sorted_runs():
    by_feature = divide(graph_set(13), "feature-skew", 3)
    assert [ids.tolist() for ids in by_feature.parts] == [
        [12, 11, 10, 9],
        [8, 7, 6, 5],
        [4, 3, 2, 1, 0],
    ]
    by_degree = divide(graph_set(12), "topology-skew", 3)
    assert [(ids % 5).tolist() for ids in by_degree.parts] == [
        [0, 0, 0, 1],
        [1, 1, 2, 2],
        [3, 3, 4, 4],
    ]
