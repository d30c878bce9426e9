"""Views against PyG's normalisation and dense products, and the sparse product in blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import to_dense_adj

from atoll.core.graph import Graph, Sparse, make_graph, sparse_matrix
from atoll.nn import views


@pytest.fixture(autouse=True, scope="module")
def _float64() -> Iterator[None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


def dense(matrix: Tensor | Sparse) -> Tensor:
    return matrix.to_dense() if isinstance(matrix, Sparse) else matrix


def assert_same(ours: Tensor, plain: Tensor) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def make(edges: list[tuple[int, int]], weight: list[float] | None = None, nodes: int = 5) -> Graph:
    ends = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T
    x = torch.arange(nodes * 4, dtype=torch.float64).reshape(nodes, 4) - 7
    weights = None if weight is None else torch.tensor(weight)
    return make_graph(x, ends, torch.zeros(nodes, dtype=torch.int64), edge_weight=weights)


def by_pyg(graph: Graph) -> Tensor:
    """PyG's normalised adjacency, target by source."""
    edges, weight = gcn_norm(graph.edges, graph.edge_weight, graph.num_nodes)
    return to_dense_adj(edges, edge_attr=weight, max_num_nodes=graph.num_nodes)[0].T


PATH = [(0, 1), (1, 0), (1, 2), (2, 1)]
NAMED = {
    "a path and isolated nodes": make(PATH),
    "no edge at all": make([]),
    "directed and repeated": make([(0, 1), (0, 1), (2, 1), (3, 0)]),
    "weighted": make(PATH, [0.5, 0.5, 2.0, 3.0]),
    "a self-loop": make([*PATH, (2, 2)]),
    "a heavy self-loop": make([*PATH, (2, 2)], [1, 1, 1, 1, 4.0]),
    "a self-loop of an isolated node": make([*PATH, (4, 4)], [1, 1, 1, 1, 0.25]),
    "two self-loops: the last one counts": make([(2, 2), *PATH, (2, 2)], [9, 1, 1, 1, 1, 3.0]),
}


@pytest.mark.parametrize("graph", list(NAMED.values()), ids=list(NAMED))
def test_gcn_adjacency_equals_pyg(graph):
    assert_same(dense(views.gcn_adjacency(graph)), by_pyg(graph))


@pytest.mark.parametrize("graph", list(NAMED.values()), ids=list(NAMED))
def test_bare_adjacency_equals_pyg_without_self_loops(graph):
    edges, weight = gcn_norm(graph.edges, graph.edge_weight, graph.num_nodes, add_self_loops=False)
    plain = to_dense_adj(edges, edge_attr=weight, max_num_nodes=graph.num_nodes)[0].T
    assert_same(dense(views.bare_adjacency(graph)), plain)


def test_degrees_count_edges_but_not_self_loops_or_padding():
    graph = make([*PATH, (2, 2), (3, 1), (0, 4)], [1, 1, 7.0, 1, 1, 1, 0])
    assert views.degrees(graph).tolist() == [1, 3, 1, 0, 0]
    assert views.gcn_degrees(graph).tolist() == [2, 4, 8, 1, 1]


@given(st.integers(0, 2**20), st.integers(1, 8), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_gcn_adjacency_equals_pyg_on_random_graphs(seed, nodes, edges):
    g = torch.Generator().manual_seed(seed)
    ends = torch.randint(nodes, (edges, 2), generator=g).tolist()
    weight = (torch.rand(edges, generator=g) + 0.1).tolist()
    graph = make(ends, weight, nodes)
    assert_same(dense(views.gcn_adjacency(graph)), by_pyg(graph))


def test_edges_of_weight_zero_are_no_edges():
    padded = make([*PATH, (0, 3), (4, 4), (2, 2)], [1, 1, 1, 1, 0, 0, 0])
    for view in (views.plain_adjacency, views.loop_adjacency, views.sum_adjacency):
        assert_same(dense(view(padded)), dense(view(make(PATH))))
    for view in (views.gcn_adjacency, views.bare_adjacency, views.mean_adjacency):
        assert_same(dense(view(padded)), dense(view(make(PATH))))


def test_weights_that_cancel_cut_a_node_off():
    out = dense(views.gcn_adjacency(make([(0, 1)], [-1.0])))
    assert torch.isfinite(out).all()
    assert not out[1].any()


def test_adjacencies_by_hand():
    graph = make([(0, 1), (2, 1), (1, 1)], [2.0, 4.0, 3.0], nodes=3)
    plain = torch.tensor([[0, 0, 0], [2, 3, 4], [0, 0, 0.0]])
    assert_same(dense(views.plain_adjacency(graph)), plain)
    assert_same(dense(views.sum_adjacency(graph)), plain + torch.eye(3))
    loops = torch.tensor([[1, 0, 0], [2, 1, 4], [0, 0, 1.0]])
    assert_same(dense(views.loop_adjacency(graph)), loops)
    mean = torch.tensor([[0, 0, 0], [1, 1, 1], [0, 0, 0.0]]) / 3
    assert_same(dense(views.mean_adjacency(graph)), mean)


ADJACENCIES = {"gcn": views.gcn_adjacency, "mean": views.mean_adjacency, "sum": views.sum_adjacency}


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("name", ADJACENCIES)
def test_features_equal_the_dense_product(name, share, sparse):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(20, 30, generator=g) * (torch.rand(20, 30, generator=g) < share)
    edges = torch.randint(18, (2, 40), generator=g)
    given_x = views.sparse_features(x) if sparse else x
    graph = make_graph(given_x, edges, torch.zeros(20, dtype=torch.int64))
    out = views.product_features(name, ADJACENCIES[name], graph)
    assert_same(dense(out), dense(ADJACENCIES[name](graph)) @ x)
    assert isinstance(out, Sparse) == (int((dense(out) != 0).sum()) <= views.DENSE_ABOVE * 600)
    assert_same(dense(views.features(graph)), x)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("hops", [0, 1, 3])
def test_hop_features_equal_a_power(hops, sparse):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(20, 30, generator=g) * (torch.rand(20, 30, generator=g) < 0.01)
    edges = torch.randint(18, (2, 20), generator=g)
    given_x = views.sparse_features(x) if sparse else x
    graph = make_graph(given_x, edges, torch.zeros(20, dtype=torch.int64))
    power = torch.linalg.matrix_power(dense(views.gcn_adjacency(graph)), hops)
    assert_same(dense(views.hop_features(graph, hops)), power @ x)


@given(
    st.integers(0, 2**20),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(0, 15), st.integers(0, 15)),
    st.sampled_from([1, 4, 1 << 22]),
)
@example(0, (2, 3, 4), (0, 5), 4)
@example(0, (2, 3, 4), (5, 0), 4)
@settings(max_examples=40, deadline=None)
def test_sparse_product_equals_the_dense_one(seed, shape, entries, terms):
    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, size: int) -> Sparse:
        at = (torch.randint(end, (size,), generator=g) for end in (rows, columns))
        values = torch.randn(size, generator=g)
        return sparse_matrix(*at, values, (rows, columns), square=False)

    rows, inner, columns = shape
    a, x = matrix(rows, inner, entries[0]), matrix(inner, columns, entries[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "MAX_TERMS", terms)
        out = views._sparse_product(a, x)
    assert_same(out.to_dense(), a.to_dense() @ x.to_dense())
    places = set(zip(out.rows.tolist(), out.columns.tolist(), strict=True))
    assert len(places) == out.values.shape[0]
