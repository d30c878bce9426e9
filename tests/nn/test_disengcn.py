"""DisenGCN against golden numbers and a dense loop, and the laws that let engines pad and stack."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, make_graph, with_views
from atoll.core.losses import cross_entropy
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree, leaves, stack, take
from atoll.engines.stacking import stack_graphs
from atoll.methods import FedAvg, Local
from atoll.nn import disengcn
from atoll.nn.disengcn import DisenGCN, _Route, neighbours, route
from atoll.nn.views import sparse_features
from atoll.testing import check_method, double_precision

FEATURES, CLASSES = 7, 3


@pytest.fixture(autouse=True)
def _double():
    with double_precision():
        yield


def make(seed: int, nodes: int, edges: int, kind: str = "dense") -> Graph:
    """A directed graph with self-loops and repeated edges, whose last two nodes are isolated."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, FEATURES, generator=g)
    x = x * (torch.rand(nodes, FEATURES, generator=g) < 0.1) if kind == "sparse" else x
    return make_graph(
        sparse_features(x) if kind == "sparse" else x,
        torch.randint(max(nodes - 2, 1), (2, edges), generator=g),
        torch.randint(CLASSES, (nodes,), generator=g),
        train=torch.rand(nodes, generator=g) < 0.6,
        ids=torch.randperm(10 * nodes, generator=g)[:nodes].to(torch.int32),
    )


def plain_route(adjacency: Tensor, x: Tensor, factors: int, iterations: int) -> Tensor:
    """The layer as its formula, with a dense (K, target, source) tensor of shares."""
    start = functional.normalize(x.reshape(len(x), factors, -1), dim=-1)
    u = start
    for _ in range(iterations):
        share = torch.softmax(torch.einsum("tkh,skh->kts", u, start), dim=0) * adjacency
        u = functional.normalize(start + torch.einsum("kts,skh->tkh", share, start), dim=-1)
    return u.flatten(1)


def plain_net(net: DisenGCN, params: Tree, graph: Graph) -> Tensor:
    x = graph.x if isinstance(graph.x, Tensor) else graph.x.to_dense()
    adjacency = neighbours(graph).to_dense()
    h = functional.leaky_relu(x @ params["encoder"]["weight"] + params["encoder"]["bias"])
    for _ in range(net.base_layers):
        h = functional.leaky_relu(plain_route(adjacency, h, net.factors, net.iterations))
    return h @ params["classifier"]["weight"] + params["classifier"]["bias"]


def loss(net: DisenGCN):
    return lambda params, graph, key: cross_entropy(net(params, graph, key), graph)


def assert_same(ours: Tree, plain: Tree, tolerance: float = 1e-10) -> None:
    for one, other in zip(leaves(ours), leaves(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_routing_golden_numbers():
    x = torch.tensor([[1, 0, 0.5, 0.5], [0, 2, 1, -1], [1, 1, 0, 1.0]])
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    e = neighbours(make_graph(x, edges, torch.zeros(3, dtype=torch.long)))
    out, shares = _Route.apply(
        2, 2, x, e.offsets, e.columns, e.rows, e.values, e.t_offsets, e.t_columns, e.t_order
    )
    # The card lists edges by source; the matrix by target.
    first = [[0.5, 0.5], [0.5, 0.5], [0.804430, 0.195570], [0.804430, 0.195570]]
    second = [[0.491956, 0.508044], [0.5, 0.5], [0.816366, 0.183634], [0.755807, 0.244193]]
    for number, listed in enumerate((first, second)):
        expected = torch.tensor([listed[i] for i in (1, 0, 3, 2)])
        torch.testing.assert_close(shares[number].T, expected, atol=1e-6, rtol=0)
    expected = torch.tensor(
        [[0.894427, 0.447214, 0.948683, 0.316228], [0.555987, 0.831191, 0.995307, -0.096765],
         [0.421004, 0.907059, 0.147592, 0.989048]]
    )  # fmt: skip
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("factors", "iterations"), [(1, 2), (2, 1), (3, 6)])
def test_routing_and_its_gradient_equal_the_formula(factors, iterations):
    edges = neighbours(make(1, 9, 25))
    x = torch.randn(9, 12, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(9, 12, generator=torch.Generator().manual_seed(1))
    dense = edges.to_dense()

    def ours(x):
        return (route(edges, x, factors, iterations) * weight).sum()

    def plain(x):
        return (plain_route(dense, x, factors, iterations) * weight).sum()

    assert_same(ours(x), plain(x))
    assert_same(grad(ours)(x), grad(plain)(x))


def test_routing_gradient_by_finite_differences():
    edges = neighbours(make(2, 6, 14))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: route(edges, x, 2, 3), x)


def test_zero_vectors_stay_zero_and_have_a_finite_gradient():
    edges = neighbours(make(1, 6, 12))
    x = torch.randn(6, 4)
    x[4:] = 0  # isolated nodes
    x[1, :2] = 0  # one factor of a node with neighbours
    x.requires_grad_()
    out = route(edges, x, 2, 3)
    assert not out[4:].any()
    out.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert not x.grad[4:].any()


def test_second_derivatives_are_refused():
    edges = neighbours(make(1, 6, 12))
    with pytest.raises(RuntimeError, match="second derivatives"):
        grad(lambda x: grad(lambda x: route(edges, x, 2, 1).sum())(x).sum())(torch.randn(6, 4))


def test_neighbours_are_zeros_and_ones_without_loops():
    graph = make_graph(
        torch.eye(3), torch.tensor([[0, 0, 1, 2, 2], [1, 1, 1, 0, 1]]), torch.zeros(3).long(),
        edge_weight=torch.tensor([3.0, 1.0, 1.0, 0.5, 0.0]),
    )  # fmt: skip
    expected = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.equal(neighbours(graph).to_dense(), expected)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("routing", [1, 5])
def test_logits_equal_the_formula(kind, routing):
    net = DisenGCN(FEATURES, CLASSES, hidden=4, factors=3, routing=routing)
    graph = with_views(make(1, 12, 40, kind), net.views)
    params = net.init(make_key(2))
    assert_same(net(params, graph), plain_net(net, params, graph))


@pytest.mark.parametrize("cached", [1, 150, 1 << 20])  # one client, some, or all at once
def test_stacked_clients_equal_the_loop_with_dropout(cached, monkeypatch):
    monkeypatch.setattr(disengcn, "CACHED", cached)
    net = DisenGCN(FEATURES, CLASSES, hidden=3)
    sizes = [(9, 12), (4, 0), (14, 40)]  # the second has no edge
    graphs = [with_views(make(k, *size), net.views) for k, size in enumerate(sizes)]
    params = [net.init(make_key(k)) for k in range(3)]
    keys = [fold(make_key(5), k) for k in range(3)]
    together = (stack_graphs(graphs), torch.stack(keys))
    logits = vmap(net)(stack(params), *together)
    slopes = vmap(grad(loss(net)))(stack(params), *together)
    shared = vmap(grad(loss(net)), in_dims=(None, 0, 0))(params[0], *together)
    for k in range(3):
        assert_same(logits[k, : sizes[k][0]], net(params[k], graphs[k], keys[k]))
        assert_same(take(slopes, k), grad(loss(net))(params[k], graphs[k], keys[k]))
        assert_same(take(shared, k), grad(loss(net))(params[0], graphs[k], keys[k]))


@pytest.mark.parametrize("cached", [1, 1 << 20])
def test_many_models_on_one_graph_equal_the_loop(cached, monkeypatch):
    monkeypatch.setattr(disengcn, "CACHED", cached)
    net = DisenGCN(FEATURES, CLASSES, hidden=3)
    graph = with_views(make(1, 10, 30), net.views)
    params = [net.init(make_key(k)) for k in range(3)]
    keys = torch.stack([fold(make_key(5), k) for k in range(3)])
    logits = vmap(net, in_dims=(0, None, 0))(stack(params), graph, keys)
    slopes = vmap(grad(loss(net)), in_dims=(0, None, 0))(stack(params), graph, keys)
    for k in range(3):
        assert_same(logits[k], net(params[k], graph, keys[k]))
        assert_same(take(slopes, k), grad(loss(net))(params[k], graph, keys[k]))


@pytest.mark.parametrize("more", [0, 1, 60])
def test_padding_changes_nothing(more):
    net = DisenGCN(FEATURES, CLASSES, hidden=3)
    graph = with_views(make(3, 10, 30), net.views)
    other = with_views(make(4, 10 + more, 30 + 5 * more), net.views)
    params, key = net.init(make_key(2)), make_key(9)
    padded = vmap(net, in_dims=(None, 0, None))(params, stack_graphs([graph, other]), key)[0, :10]
    assert_same(padded, net(params, graph, key), 1e-12)


def test_renumbered_nodes_give_renumbered_logits_with_dropout():
    net = DisenGCN(FEATURES, CLASSES, hidden=3)
    graph = make(3, 12, 30)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    moved = replace(
        graph, x=graph.x[order], edges=torch.argsort(order)[graph.edges], ids=graph.ids[order]
    )
    params, key = net.init(make_key(2)), make_key(9)
    expected = net(params, with_views(graph, net.views), key)[order]
    assert_same(net(params, with_views(moved, net.views), key), expected)


def test_heads_differ_by_dropout_alone():
    net = DisenGCN(FEATURES, CLASSES, hidden=3)
    graph = with_views(make(3, 12, 30), net.views)
    h = net.embed(net.init(make_key(2)), graph)
    assert torch.equal(net.head(h, graph, None, "a"), net.head(h, graph, None, "b"))
    key = make_key(1)
    assert not torch.equal(net.head(h, graph, key, "a"), net.head(h, graph, key, "b"))


def test_one_logit_is_the_binary_cross_entropy():
    net = DisenGCN(FEATURES, 2, hidden=3)
    graph = make(3, 12, 30)
    graph = with_views(replace(graph, y=graph.y % 2), net.views)
    params = net.init(make_key(2))
    assert params["classifier"]["weight"].shape == (6, 1)

    def binary(params):
        logit = net(params, graph)[:, 1]
        chosen = graph.train > 0
        y = graph.y[chosen].to(logit.dtype)
        return functional.binary_cross_entropy_with_logits(logit[chosen], y)

    usual = grad(lambda params: cross_entropy(net(params, graph), graph))(params)
    assert_same(cross_entropy(net(params, graph), graph), binary(params), 1e-14)
    assert_same(usual, grad(binary)(params), 1e-14)
    two = DisenGCN(FEATURES, 2, hidden=3, binary="two-logits").init(make_key(0))
    assert two["classifier"]["weight"].shape == (6, 2)


def test_layers_follow_the_public_code():
    layers = [DisenGCN(4, 3, routing=r) for r in (1, 2, 3, 4, 6)]
    assert [net.base_layers for net in layers] == [1, 1, 1, 2, 4]
    assert [net.head_layers for net in layers] == [1, 1, 2, 2, 2]


def test_initial_range_is_that_of_the_output_width():
    params = DisenGCN(40, 3, hidden=32, factors=2).init(make_key(1))
    for leaf in leaves(params):
        assert 0.5 * 64**-0.5 < leaf.abs().max() <= 64**-0.5
    assert not torch.equal(params["encoder"]["bias"], params["encoder"]["weight"][0])


@pytest.mark.parametrize("name", ["factors", "routing", "iterations"])
def test_impossible_numbers_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        DisenGCN(4, 3, **{name: 0})


@pytest.mark.parametrize("method", [FedAvg, Local])
def test_other_methods_can_use_it(method):
    check_method(lambda net: method(DisenGCN(11, 3, hidden=4, routing=1, iterations=2)), rounds=2)
