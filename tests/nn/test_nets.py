"""Every network against stock PyG layers, and the laws that let engines pad, stack and renumber."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv, SGConv

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, Sparse, make_graph, with_views
from atoll.core.losses import cross_entropy
from atoll.core.method import Net, embedder
from atoll.core.random import fold, make_key
from atoll.core.task import NODES
from atoll.core.tree import Tree, leaves, stack, take, tree_map
from atoll.engines.stacking import make_buckets, outline, stack_graphs
from atoll.methods.fedath import FedATH
from atoll.nn import GCN, nets_for
from atoll.nn.nets import EdgeGNN
from atoll.nn.views import sparse_features
from atoll.testing import small_federation

NODE_NETS = nets_for(NODES.name)

FEATURES, CLASSES = 90, 3


@pytest.fixture(autouse=True, scope="module")
def _float64() -> Iterator[None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


def make_net(name: str, layers: int = 3) -> Net:
    if name == "sgc":
        return NODE_NETS[name](FEATURES, CLASSES, hops=layers)
    if name == "disengcn":
        return NODE_NETS[name](FEATURES, CLASSES, hidden=4, routing=layers)
    more = {"heads": 4} if name == "gat" else {}
    return NODE_NETS[name](FEATURES, CLASSES, hidden=8, layers=layers, **more)


nets = pytest.mark.parametrize("name", list(NODE_NETS))
kinds = pytest.mark.parametrize("kind", ["dense", "sparse"])


def make(seed: int, nodes: int, edges: int, kind: str = "dense") -> Graph:
    """A directed graph with self-loops and repeated edges, whose last three nodes are isolated."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, FEATURES, generator=g)
    if kind == "sparse":
        # So few that they stay sparse after two or three hops.
        x = x * (torch.rand(nodes, FEATURES, generator=g) < 0.01)
    return make_graph(
        sparse_features(x) if kind == "sparse" else x,
        torch.randint(max(nodes - 3, 1), (2, edges), generator=g),
        torch.randint(CLASSES, (nodes,), generator=g),
        train=torch.rand(nodes, generator=g) < 0.6,
        ids=torch.randperm(10 * nodes, generator=g)[:nodes].to(torch.int32),
    )


def perturbed(net: Net, seed: int) -> Tree:
    """Initial parameters, with biases that are not zero."""
    key = make_key(seed)
    noise = torch.Generator().manual_seed(seed)
    return tree_map(lambda p: p + 0.1 * torch.randn(p.shape, generator=noise), net.init(key))


def loaded(module: torch.nn.Module, **state: Tensor) -> Any:
    module.load_state_dict({name.replace("__", "."): value for name, value in state.items()})
    return module.eval()


def stock_gcn(layer: Tree, _: bool) -> Callable[..., Tensor]:
    conv = GCNConv(*layer["weight"].shape)
    return loaded(conv, lin__weight=layer["weight"].T, bias=layer["bias"])


def stock_sage(layer: Tree, _: bool) -> Callable[..., Tensor]:
    conv = SAGEConv(*layer["self"].shape)
    weights = {"lin_l__weight": layer["neighbour"].T, "lin_r__weight": layer["self"].T}
    return loaded(conv, lin_l__bias=layer["bias"], **weights)


def stock_gat(layer: Tree, last: bool) -> Callable[..., Tensor]:
    heads, width = layer["source"].shape
    assert heads == (1 if last else 4)
    return loaded(
        GATConv(layer["weight"].shape[0], width, heads=heads),
        lin__weight=layer["weight"].T,
        att_src=layer["source"].unsqueeze(0),
        att_dst=layer["target"].unsqueeze(0),
        bias=layer["bias"],
    )


def linear(layer: Tree) -> Any:
    module = torch.nn.Linear(*layer["weight"].shape)
    return loaded(module, weight=layer["weight"].T, bias=layer["bias"])


def stock_gin(layer: Tree, last: bool) -> Callable[..., Tensor]:
    if last:
        return lambda x, edges: linear(layer)(x)
    shapes = layer["inner"]["weight"].shape, layer["outer"]["weight"].shape
    first, second = (torch.nn.Linear(*shape) for shape in shapes)
    return loaded(
        GINConv(torch.nn.Sequential(first, torch.nn.ReLU(), second)),
        eps=torch.zeros(1),
        nn__0__weight=layer["inner"]["weight"].T,
        nn__0__bias=layer["inner"]["bias"],
        nn__2__weight=layer["outer"]["weight"].T,
        nn__2__bias=layer["outer"]["bias"],
    )


def stock_sgc(layer: Tree, _: bool) -> Callable[..., Tensor]:
    conv = SGConv(*layer["weight"].shape, K=3)
    return loaded(conv, lin__weight=layer["weight"].T, lin__bias=layer["bias"])


def stock_mlp(layer: Tree, _: bool) -> Callable[..., Tensor]:
    return lambda x, edges: linear(layer)(x)


STOCK = {
    "gcn": stock_gcn,
    "sage": stock_sage,
    "gat": stock_gat,
    "gin": stock_gin,
    "sgc": stock_sgc,
    "mlp": stock_mlp,
}


layered = pytest.mark.parametrize("name", list(STOCK))


def stock_logits(name: str, params: Tree, graph: Graph) -> Tensor:
    h = graph.x.to_dense() if isinstance(graph.x, Sparse) else graph.x
    for layer in params[:-1]:
        h = STOCK[name](layer, False)(h, graph.edges)
        h = torch.nn.functional.elu(h) if name == "gat" else torch.relu(h)
    return STOCK[name](params[-1], True)(h, graph.edges)


def assert_same(ours: Tensor, plain: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


def assert_same_tree(ours: Tree, plain: Tree) -> None:
    for left, right in zip(leaves(ours), leaves(plain), strict=True):
        assert_same(left, right)


@kinds
@layered  # PyG has no DisenGCN: test_disengcn.py; test_polynomials.py compares ChebNet
def test_logits_equal_stock_layers(name, kind):
    net = make_net(name)
    graph = with_views(make(1, 14, 30, kind), net.views)
    params = perturbed(net, 2)
    with torch.no_grad():
        assert_same(net(params, graph), stock_logits(name, params, graph))


@pytest.mark.parametrize("name", [name for name in STOCK if name != "sgc"])
def test_one_layer_is_enough(name):
    net = make_net(name, layers=1)
    graph = with_views(make(1, 14, 30), net.views)
    params = perturbed(net, 2)
    with torch.no_grad():
        assert_same(net(params, graph), stock_logits(name, params, graph))


def loss(net: Net) -> Callable[[Tree, Graph, Tensor], Tensor]:
    return lambda params, graph, key: cross_entropy(net(params, graph, key), graph)


@kinds
@nets
def test_stacked_clients_equal_the_loop_with_dropout(name, kind):
    net = make_net(name)
    sizes = [(9, 12), (4, 0), (14, 40)]
    graphs = [with_views(make(k, *size, kind), net.views) for k, size in enumerate(sizes)]
    params = [perturbed(net, k) for k in range(3)]
    keys = [fold(make_key(5), k) for k in range(3)]
    # A view may be dense for one client and sparse for another; such clients are not stacked.
    for members in make_buckets(outline(graphs), range(3), 3):
        together = (
            stack_graphs([graphs[k] for k in members]),
            torch.stack([keys[k] for k in members]),
        )
        own = stack([params[k] for k in members])
        logits = vmap(net)(own, *together)
        slopes = vmap(grad(loss(net)))(own, *together)
        shared = vmap(grad(loss(net)), in_dims=(None, 0, 0))(params[0], *together)
        for row, k in enumerate(members):
            assert_same(logits[row, : sizes[k][0]], net(params[k], graphs[k], keys[k]))
            assert_same_tree(take(slopes, row), grad(loss(net))(params[k], graphs[k], keys[k]))
            assert_same_tree(take(shared, row), grad(loss(net))(params[0], graphs[k], keys[k]))


@nets
def test_many_models_on_one_graph_equal_the_loop(name):
    # A method may ask every client's model about a graph that all of them know.
    net = make_net(name)
    graph = with_views(make(1, 14, 30), net.views)
    params = [perturbed(net, k) for k in range(3)]
    keys = torch.stack([fold(make_key(5), k) for k in range(3)])
    logits = vmap(net, in_dims=(0, None, 0))(stack(params), graph, keys)
    for k in range(3):
        assert_same(logits[k], net(params[k], graph, keys[k]))


@nets
def test_renumbered_nodes_give_renumbered_logits_with_dropout(name):
    net = make_net(name)
    graph = make(3, 14, 30)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(1))
    moved = replace(
        graph, x=graph.x[order], edges=torch.argsort(order)[graph.edges], ids=graph.ids[order]
    )
    params, key = perturbed(net, 2), make_key(9)
    expected = net(params, with_views(graph, net.views), key)[order]
    assert_same(net(params, with_views(moved, net.views), key), expected)


@pytest.mark.parametrize("more", [0, 1, 60])
@nets
def test_padding_changes_nothing(name, more):
    net = make_net(name)
    graph = with_views(make(3, 14, 30), net.views)
    other = with_views(make(4, 14 + more, 30 + 5 * more), net.views)
    params, key = perturbed(net, 2), make_key(9)
    run = vmap(net, in_dims=(None, 0, None))
    padded = run(params, stack_graphs([graph, other]), key)[0, :14]
    assert_same(padded, net(params, graph, key), 1e-12)


@nets
def test_a_key_turns_dropout_on_and_repeats_it(name):
    net = make_net(name)
    graph = with_views(make(3, 14, 30), net.views)
    params = perturbed(net, 2)
    calm, noisy = net(params, graph), net(params, graph, make_key(1))
    assert torch.equal(noisy, net(params, graph, make_key(1)))
    assert torch.equal(calm, noisy) == (name == "sgc")


@nets
def test_initial_parameters_follow_the_key_and_are_in_range(name):
    net = make_net(name)
    first, again, other = net.init(make_key(1)), net.init(make_key(1)), net.init(make_key(2))
    for one, same in zip(leaves(first), leaves(again), strict=True):
        assert torch.equal(one, same)
    # Zeros and GAMLP's slope are no draws.
    drawn, changed = ([x for x in leaves(one) if x.unique().numel() > 1] for one in (first, other))
    assert not any(torch.equal(a, b) for a, b in zip(drawn, changed, strict=True))
    # Two leaves of one shape that are equal would have been drawn from one key.
    for i, leaf in enumerate(drawn):
        assert not any(leaf.shape == b.shape and torch.equal(leaf, b) for b in drawn[:i])
    assert all(leaf.dtype == torch.float64 and leaf.abs().max() <= 1.3 for leaf in drawn)


@nets
def test_networks_and_views_travel_and_are_pure(name):
    net = make_net(name)
    assert pickle.loads(pickle.dumps(net)) == net
    graph = make(3, 14, 30)
    sent = pickle.loads(pickle.dumps(dict(net.views)))
    before = [leaf.clone() for leaf in leaves(graph)]
    once, twice = with_views(graph, net.views), with_views(graph, sent)
    assert all(torch.equal(a, b) for a, b in zip(leaves(once), leaves(twice), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(leaves(graph), before, strict=True))


def test_views_of_one_name_have_one_meaning():
    # A method merges the views of its networks, so that a name must not mean two things.
    small, large = make_net("sgc", layers=1), make_net("sgc", layers=2)
    assert not set(small.views) & set(large.views)


def test_a_linear_head_reads_no_edges():
    net = NODE_NETS["gcn"](FEATURES, CLASSES, hidden=8, layers=3, head="linear")
    graph = with_views(make(3, 12, 30), net.views)
    params = tree_map(lambda leaf: leaf + 0.01, net.init(make_key(4)))
    read = torch.relu(net.embed(params, graph))
    torch.testing.assert_close(
        net(params, graph), read @ params[-1]["weight"] + params[-1]["bias"], rtol=1e-12, atol=0
    )
    # Its range is that of a linear layer, and the convolutions are those of a network without it.
    convolutions = replace(net, head="conv").init(make_key(4))
    assert all(map(torch.equal, leaves(net.init(make_key(4))[:-1]), leaves(convolutions[:-1])))
    assert float(net.init(make_key(4))[-1]["weight"].abs().max()) <= 8**-0.5
    with pytest.raises(ConfigError, match="head=linear needs a convolution"):
        NODE_NETS["gcn"](FEATURES, CLASSES, layers=1, head="linear")


def test_heads_must_share_the_width():
    with pytest.raises(ConfigError, match=r"hidden = 10 .* heads = 4"):
        NODE_NETS["gat"](FEATURES, CLASSES, hidden=10, heads=4)


@pytest.mark.parametrize("name", [name for name in NODE_NETS if name != "sgc"])
def test_a_call_is_the_last_layer_on_the_embedding(name):
    net, graph = make_net(name), make(1, 20, 60)
    graph = with_views(graph, net.views)
    params, key = perturbed(net, 3), make_key(5)
    for noise in (None, key):
        hidden = embedder(net).embed(params, graph, noise)
        torch.testing.assert_close(
            net.logits(params, hidden, graph, noise), net(params, graph, noise), rtol=0, atol=0
        )
    assert hidden.shape == (20, getattr(net, "width", 8))


def test_a_network_without_hidden_layer_has_no_embedding():
    for net in (make_net("sgc"), make_net("gcn", layers=1)):
        with pytest.raises(ConfigError, match="no hidden layer"):
            embedder(net)


def prepared(method, size=13):
    graph = small_federation((size,)).graphs[0]
    return with_views(graph, method.views)


def test_the_evaluator_sees_direction():
    """Scores of i -> j and j -> i differ: the input is an ordered pair."""
    scorer = EdgeGNN(11, 3, hidden=8)
    method = FedATH(GCN(11, 3, hidden=8), evaluator="gnn")
    graph = prepared(method)
    score = scorer(scorer.init(make_key(3)), graph)
    loops = graph.views["loops"]
    found = {
        (r, c): s
        for r, c, s in zip(loops.rows.tolist(), loops.columns.tolist(), score.tolist(), strict=True)
    }
    assert any(abs(found[r, c] - found[c, r]) > 1e-6 for r, c in found if r != c)


@nets
def test_a_node_hears_only_the_nodes_that_point_to_it(name: str) -> None:
    def logits(x: Tensor) -> Tensor:
        net = make_net(name, layers=2)
        graph = with_views(
            make_graph(x, torch.tensor([[0], [1]]), torch.zeros(2).long()), net.views
        )
        return net(net.init(make_key(3)), graph)

    x = torch.rand(2, FEATURES)
    first, second = (torch.cat([x[:1] + more, x[1:] + 1 - more]) for more in (0, 1))
    changed = (logits(first) - logits(x)).abs().sum(1) > 1e-9
    assert changed.tolist() == [False, True]  # the second node's features changed
    changed = (logits(second) - logits(x)).abs().sum(1) > 1e-9
    # A symmetric normalisation without self-loops ignores a source that nothing points to.
    assert changed.tolist() == [True, name not in ("mlp", "chebnet")]
