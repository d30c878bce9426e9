"""GraphGIN against stock PyG layers, and the laws of padding: features, classes, nodes, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import Linear, ReLU, Sequential, functional
from torch_geometric.nn import GINConv, global_add_pool, global_max_pool, global_mean_pool

from atoll.core.errors import ConfigError
from atoll.core.graph import Distinct, Graph, Sparse, make_graph, with_views
from atoll.core.losses import cross_entropy
from atoll.core.optim import Adam
from atoll.core.random import dropout, fold, make_key, normal
from atoll.core.tree import Tree, leaves, stack, take, tree_map, with_leaves
from atoll.engines.prepare import with_dense_views
from atoll.engines.stacking import stack_graphs
from atoll.nn import gin
from atoll.nn.gin import GraphGIN
from atoll.nn.ops import matmul
from atoll.nn.views import pool, sparse_features, sum_adjacency
from atoll.testing import (
    CLASSES,
    FEATURES,
    double_precision,
    relabelled,
    small_federation,
    small_graph_federation,
)

POOLS = {"sum": global_add_pool, "mean": global_mean_pool, "max": global_max_pool}
pools = pytest.mark.parametrize("pool", list(POOLS))


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def net(pool: str = "sum", dropout: float = 0.4) -> GraphGIN:
    return GraphGIN(FEATURES, CLASSES, hidden=6, dropout=dropout, pool=pool)


def clients(pool: str = "sum") -> list[Graph]:
    graphs = list(small_graph_federation().graphs)
    return [with_views(graph, net(pool).views) for graph in graphs]


def linear(layer: Tree, made: Linear | None = None) -> Linear:
    made = made or Linear(*layer["weight"].shape)
    made.load_state_dict({"weight": layer["weight"].T, "bias": layer["bias"]})
    return made


def convolution(layer: Tree) -> GINConv:
    made = GINConv(Sequential(Linear(6, 6), ReLU(), Linear(6, 6)))  # it resets what it is given
    linear(layer["inner"], made.nn[0])
    linear(layer["outer"], made.nn[2])
    return made


def stock(params: Tree, graph: Graph, pool: str) -> Tensor:
    """GCFL's forward pass without dropout, as its public code writes it."""
    h = linear(params["pre"])(graph.x)
    for layer in params["convolutions"]:
        h = torch.relu(convolution(layer)(h, graph.edges))
    h = POOLS[pool](h, torch.unique(graph.root, return_inverse=True)[1])
    return linear(params["readout"])(torch.relu(linear(params["post"])(h)))


@pools
@pytest.mark.parametrize("sparse", [False, True])
def test_logits_at_the_roots_are_those_of_stock_layers(pool, sparse):
    params = net(pool).init(make_key(0))
    for graph in clients(pool):
        x = sparse_features(graph.x) if sparse else graph.x
        given = with_views(replace(graph, x=x, has_classes=None, views={}), net(pool).views)
        logits = net(pool)(params, given)
        assert logits.shape == (graph.num_nodes, CLASSES)
        torch.testing.assert_close(given.at_roots(logits), stock(params, graph, pool))


@pools
def test_gradients_are_those_of_stock_layers(pool):
    graph = clients(pool)[1]
    params = tree_map(lambda p: p.requires_grad_(), net(pool).init(make_key(0)))
    mask, y = graph.at_roots(graph.train) > 0, graph.at_roots(graph.y)
    ours = torch.autograd.grad(cross_entropy(net(pool)(params, graph), graph), leaves(params))
    plain = functional.cross_entropy(stock_of(params, graph, pool)[mask], y[mask])
    theirs = torch.autograd.grad(plain, leaves(params))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def stock_of(params: Tree, graph: Graph, pool: str) -> Tensor:
    """`stock` with the parameters themselves, so that gradients reach them."""

    def through(layer: Tree, h: Tensor) -> Tensor:
        return h @ layer["weight"] + layer["bias"]

    h = through(params["pre"], graph.x)
    for layer in params["convolutions"]:
        gathered = h.index_add(0, graph.edges[1], h[graph.edges[0]])
        h = torch.relu(through(layer["outer"], torch.relu(through(layer["inner"], gathered))))
    h = POOLS[pool](h, torch.unique(graph.root, return_inverse=True)[1])
    return through(params["readout"], torch.relu(through(params["post"], h)))


@pools
def test_stacked_clients_equal_the_loop_with_dropout(pool):
    graphs, model = clients(pool), net(pool)
    params = [model.init(make_key(k)) for k in range(len(graphs))]
    keys = fold(make_key(7), torch.arange(len(graphs)))

    def slope(params: Tree, graph: Graph, key: Tensor) -> Tree:
        return torch.func.grad(lambda p: cross_entropy(model(p, graph, key), graph))(params)

    together = vmap(slope)(stack(params), stack_graphs(graphs), keys)
    for k, graph in enumerate(graphs):
        alone = slope(params[k], graph, keys[k])
        for one, other in zip(leaves(take(together, k)), leaves(alone), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def alike(graph: Graph, first: float = 1) -> Graph:
    """The graph with equal features except at the first node. Other rows encode degrees."""
    x = torch.ones_like(graph.x)
    x[0] = first
    return with_views(replace(graph, x=x, views={}), net().views)


def slopes(params: Tree, graph: Graph, key: Tensor) -> Tree:
    return torch.func.grad(lambda p: cross_entropy(net()(p, graph, key), graph))(params)


def test_rows_that_are_equal_are_stored_once_and_change_nothing(monkeypatch):
    monkeypatch.setattr("atoll.nn.views.REPEATED", 1.5)  # these graphs are small
    graphs = [alike(graph, first=k + 1) for k, graph in enumerate(clients())]
    few = [graph.views["sum_x1"] for graph in graphs]
    assert all(isinstance(view, Distinct) for view in few)
    assert len({len(view.rows) for view in few}) > 1  # so that stacking them has to pad
    assert all(isinstance(graph.views["sum_x1"], Tensor) for graph in clients())
    params = [net().init(make_key(k)) for k in range(len(graphs))]
    keys = fold(make_key(7), torch.arange(len(graphs)))
    together = vmap(slopes)(stack(params), stack_graphs(graphs), keys)
    for k, graph in enumerate(graphs):
        full = slopes(params[k], with_dense_views([graph])[0], keys[k])
        for found in (slopes(params[k], graph, keys[k]), take(together, k)):
            for one, other in zip(leaves(found), leaves(full), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pools
def test_numbering_the_nodes_differently_changes_nothing(pool):
    model, key = net(pool), make_key(3)
    params = model.init(make_key(0))
    for seed, graph in enumerate(clients(pool)):
        moved = with_views(relabelled(replace(graph, views={}), seed), model.views)
        straight, turned = (g.at_roots(model(params, g, key)) for g in (graph, moved))
        order = [moved.at_roots(moved.ids).tolist().index(i) for i in graph.at_roots(graph.ids)]
        torch.testing.assert_close(turned[order], straight)


def unpadded(graph: Graph) -> tuple[GraphGIN, Graph]:
    """The same client with only its own features and classes."""
    width, classes = int(graph.has_features.sum()), int(graph.has_classes.sum())
    own = GraphGIN(width, classes, hidden=6, dropout=0.4)
    bare = replace(graph, x=graph.x[:, :width], has_features=None, has_classes=None, views={})
    return own, with_views(bare, own.views)


def fitted(model: GraphGIN, graph: Graph, steps: int = 5) -> Tree:
    params = {
        "convolutions": model.init(make_key(0))["convolutions"],
        **model.init_private(make_key(1), graph),
    }
    moments = Adam().init(params)
    for step in range(steps):
        key = fold(make_key(2), step)
        slope = torch.func.grad(lambda p, k: cross_entropy(model(p, graph, k), graph))(params, key)
        params, moments = Adam().update(slope, params, moments)
    return params


def test_padded_features_and_classes_train_as_if_they_were_not_there():
    for graph in clients():
        own, bare = unpadded(graph)
        wide, narrow = fitted(net(), graph), fitted(own, bare)
        width, classes = bare.num_features, own.classes
        pre, readout = wide["pre"]["weight"], wide["readout"]["weight"]
        torch.testing.assert_close(pre[:width], narrow["pre"]["weight"])
        torch.testing.assert_close(readout[:, :classes], narrow["readout"]["weight"])
        # Columns that the client does not have start at zero, and weight decay leaves them there.
        assert not pre[width:].any()
        logits, alone = net()(wide, graph), own(narrow, bare)
        torch.testing.assert_close(logits[:, :classes], alone)
        at_roots = graph.at_roots(logits)
        assert (at_roots[:, classes:] <= -1e29).all()
        assert (at_roots.argmax(1) < classes).all()


def test_the_first_layers_range_follows_the_clients_own_features():
    graph = clients()[2]
    wide = GraphGIN(FEATURES, CLASSES, hidden=4000)
    layer = wide.init_private(make_key(0), graph)["pre"]
    own = int(graph.has_features.sum())
    for leaf in (layer["weight"][:own], layer["bias"]):
        assert float(leaf.abs().max()) == pytest.approx(own**-0.5, rel=1e-2)


def test_pools_are_sums_and_means_at_the_roots():
    graph = small_graph_federation().graphs[1]
    member = (graph.root.unsqueeze(0) == graph.roots.unsqueeze(1)).double()
    for mean, expected in ((False, member), (True, member / member.sum(1, keepdim=True))):
        matrix = pool(graph, mean)
        assert isinstance(matrix, Sparse)
        torch.testing.assert_close(matrix.to_dense()[graph.roots], expected)
        assert float(matrix.to_dense().abs().sum()) == pytest.approx(float(expected.sum()))


def test_one_graph_cannot_be_pooled():
    with pytest.raises(ConfigError, match="needs clients with many graphs each"):
        with_views(small_federation().graphs[0], net().views)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_a_convolution_in_one_step_has_the_gradients_of_its_parts(rate, dtype):
    own, wide = net(dropout=rate), 640  # rows are padded from 512 on
    graph = clients()[0]
    times = -(-wide // graph.num_nodes)
    ring = torch.arange(times * graph.num_nodes)
    graph = make_graph(
        graph.x.repeat(times, 1).to(dtype),
        torch.stack([ring, ring.roll(1)]),
        graph.y.repeat(times),
        views={"sum": sum_adjacency},
    )
    layers = tree_map(lambda leaf: leaf.to(dtype), own.init(make_key(0))["convolutions"])
    h, key = normal(make_key(1), (graph.num_nodes, 6), dtype), make_key(2)

    def slopes(convolve):
        tracked = [leaf.clone().requires_grad_() for leaf in (h, *leaves(layers))]
        out = convolve(with_leaves(layers, tracked[1:]), tracked[0])
        return [out.detach(), *torch.autograd.grad((out**2).sum(), tracked)]

    def in_parts(layers, h):
        h = dropout(h, key, graph.ids, rate, "dropout", 0)
        for number, layer in enumerate(layers, start=1):
            h = matmul(graph.views["sum"], h)
            for part in (layer["inner"], layer["outer"]):
                h = torch.relu(h @ part["weight"] + part["bias"])
            h = dropout(h, key, graph.ids, rate, "dropout", number)
        return h

    ours = slopes(lambda layers, h: gin._convolved(layers, h, graph, key, rate))
    torch.testing.assert_close(ours, slopes(in_parts))
