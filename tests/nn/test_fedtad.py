"""FedTAD's similarity of neighbours against hand-computed numbers, dense powers and bad graphs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.graph import make_graph
from atoll.core.random import make_key, uniform
from atoll.data.divide import federate
from atoll.data.public.registry import load_dataset
from atoll.nn import fedtad as walks
from atoll.nn.fedtad import (
    _both_ways,
    nearest_neighbours,
    neighbour_similarity,
    visited_similarity,
    walk_returns,
)
from atoll.nn.views import sparse_features
from atoll.testing import double_precision

X = [[1.0, 0, 1], [1, 1, 0], [0, 1, 1], [0, 1, 0], [1, 0, 0]]
Y = [0, 0, 1, 1, 0]
ONE_WAY = torch.tensor([[0, 0, 1, 2, 3], [1, 2, 2, 3, 4]])
LOOPS = torch.arange(5).expand(2, -1)


@pytest.fixture(autouse=True)
def _double():
    with double_precision():
        yield


def card_graph(*, sparse=False, loops=False):
    both = [ONE_WAY, ONE_WAY.flip(0), *([LOOPS] if loops else [])]
    x = torch.tensor(X)
    train = torch.tensor([1, 0, 1, 1, 0])
    x = sparse_features(x) if sparse else x
    return make_graph(x, torch.cat(both, dim=1), torch.tensor(Y), train=train)


def by_class(graph, each):
    return [float((each * graph.train)[graph.y == c].sum()) for c in range(2)]


def test_returns_of_walks():
    expected = [
        [0, 0.416667, 0.166667, 0.270833, 0.194444], [0, 0.416667, 0.166667, 0.270833, 0.194444],
        [0, 0.5, 0.166667, 0.416667, 0.208333], [0, 0.666667, 0, 0.5, 0.027778],
        [0, 0.5, 0, 0.333333, 0],
    ]  # fmt: skip
    assert torch.allclose(walk_returns(card_graph(), 5), torch.tensor(expected), atol=1e-6)


def test_returns_of_walks_that_may_stay():
    found = walk_returns(card_graph(loops=True), 5)
    assert found[2].tolist() == pytest.approx(
        [0.25, 0.3125, 0.279514, 0.279948, 0.276247], abs=1e-6
    )
    assert found[4].tolist() == pytest.approx(
        [0.5, 0.416667, 0.347222, 0.303241, 0.267747], abs=1e-6
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 7), st.integers(1, 30))
def test_returns_equal_the_diagonals_of_dense_powers(seed, length, size):
    with double_precision():
        ends = (uniform(make_key(seed), (2, 3 * size), torch.float64) * size).long()
        graph = make_graph(
            torch.zeros(size, 1), torch.cat([ends, ends.flip(0)], 1), torch.zeros(size).long()
        )
        dense = torch.zeros(size, size).index_put((ends[0], ends[1]), torch.ones(3 * size))
        dense = ((dense + dense.T) > 0).double()
        step = dense / dense.sum(0).clamp(min=1)
        powers = [torch.linalg.matrix_power(step, q).diagonal() for q in range(1, length + 1)]
        assert torch.allclose(walk_returns(graph, length), torch.stack(powers, 1), atol=1e-12)


def test_blocks_change_nothing(monkeypatch):
    whole = walk_returns(card_graph(), 4), neighbour_similarity(card_graph(), 4)
    monkeypatch.setattr(walks, "BLOCK", 7)
    split = walk_returns(card_graph(), 4), neighbour_similarity(card_graph(), 4)
    assert all(torch.allclose(a, b, atol=1e-15) for a, b in zip(whole, split, strict=True))


@pytest.mark.parametrize("sparse", [False, True])
def test_reliability_of_each_class(sparse):
    graph = card_graph(sparse=sparse)
    found = by_class(graph, neighbour_similarity(graph, 5))
    assert found == pytest.approx([0.573027, 1.177289], abs=1e-6)


def test_an_isolated_training_node_is_not_reliable_and_gives_no_nan():
    graph = make_graph(torch.eye(3), torch.zeros(2, 0).long(), torch.zeros(3).long(),
                       train=torch.ones(3))  # fmt: skip
    assert neighbour_similarity(graph, 5).tolist() == [0, 0, 0]
    assert visited_similarity(graph, 5).tolist() == [1, 1, 1]


def test_a_node_without_features_has_no_direction():
    graph = make_graph(torch.zeros(2, 3), torch.tensor([[0, 1], [1, 0]]), torch.zeros(2).long(),
                       train=torch.ones(2))  # fmt: skip
    assert torch.isfinite(neighbour_similarity(graph, 1)).all()


def test_the_public_codes_similarity_is_nearly_a_count():
    # It is dominated by node numbers: every training node adds almost the same.
    size = 400
    ends = (uniform(make_key(1), (2, 4 * size)) * size).long()
    x = (uniform(make_key(2), (size, 50)) < 0.1).double()
    graph = make_graph(x, torch.cat([ends, ends.flip(0)], 1), torch.zeros(size).long(),
                       train=torch.ones(size))  # fmt: skip
    found = visited_similarity(graph, 5)
    assert 0.75 < found.mean() < 0.95
    assert found.std() < 0.1
    assert torch.equal(found, visited_similarity(graph, 5))


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("cosine", [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]),
        ("dot", [[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]),
    ],
)
def test_nearest_neighbours(by, expected):
    x = torch.tensor([[1, 0], [0.8, 0.6], [0, 1], [-1, 0.5]])
    (source, target), weight = nearest_neighbours(x, 2, by)
    assert torch.equal(weight, torch.ones(len(source)))
    found = torch.zeros(4, 4).index_put((target, source), torch.ones(len(source)))
    assert found.tolist() == expected


def test_more_neighbours_than_nodes_are_all_nodes():
    assert nearest_neighbours(torch.eye(3), 5, "cosine")[0].shape == (2, 9)


def test_edges_of_zero_weight_in_the_place_of_a_count():
    # On a GPU edges are not counted: a reverse edge that already exists has weight zero.
    x = uniform(make_key(3), (40, 5)) - 0.5
    unit = x / x.norm(dim=1, keepdim=True)
    picks = (unit @ unit.T).topk(6, dim=1).indices
    picks[7] = (picks[7] + 1) % 40  # a row that is not among its own picks any more
    forward = torch.stack([picks, torch.arange(40).unsqueeze(1).expand_as(picks)]).flatten(1)
    edges, weight = _both_ways(picks, forward, torch.ones(240))
    found = torch.zeros(40, 40).index_put((edges[1], edges[0]), weight, accumulate=True)
    chosen = torch.zeros(40, 40).scatter(1, picks, 1.0)
    assert torch.equal(found, torch.maximum(chosen, chosen.T).fill_diagonal_(1.0))
    assert edges.shape == (2, 240 + 240 + 40)


def test_reliabilities_on_the_published_partition(real_data):
    source = load_dataset("cora", real_data("cora")).undirected_simple()
    seeds = {"partition_seed": 2024, "seed": 2024}
    clients = federate(source, clients=10, partition="louvain-fedtad", split="fedtad", **seeds)
    paper, code, count = (
        torch.stack([_phi(graph, view) for graph in clients.graphs])
        for view in (neighbour_similarity, visited_similarity, lambda graph, _: graph.real)
    )
    assert paper[0].tolist() == pytest.approx([0, 0, 7.8834, 0.1568, 0, 0, 1.1269], abs=1e-4)
    assert paper[9].tolist() == pytest.approx(
        [2.2384, 0, 0, 5.5269, 1.2039, 0.9279, 0.2028], abs=1e-4
    )
    shares = torch.stack([(phi / phi.sum(0)).flatten() for phi in (count, code, paper)])
    # What the public code computes is, for all purposes, the number of labelled nodes.
    assert torch.corrcoef(shares)[0].tolist() == pytest.approx([1, 0.9996, 0.987], abs=1e-3)


def _phi(graph, view):
    each = view(graph, 5) * graph.train
    return torch.zeros(7, dtype=each.dtype).index_add(0, graph.y, each)
