"""GAMLP and ChebNet against hand-computed numbers, dense formulas and PyG."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.func import vmap
from torch_geometric.nn import ChebConv

from atoll.core.graph import make_graph, with_views
from atoll.core.random import make_key
from atoll.core.tree import leaves, tree_map
from atoll.engines.stacking import stack_graphs
from atoll.nn.polynomials import GAMLP, ChebNet, cut_without_transpose
from atoll.nn.views import gcn_adjacency
from tests.nn.test_nets import assert_same, loaded, make, perturbed

PATH = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])


@pytest.fixture(autouse=True, scope="module")
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def on_path(x, net):
    graph = make_graph(torch.tensor(x), PATH, torch.zeros(3).long(), train=torch.ones(3))
    return with_views(graph, net.views)


def number_of_parameters(net):
    return sum(leaf.numel() for leaf in leaves(net.init(make_key(0).to("meta"))))


RIGHT = (
    [[0.487664, 0.512336], [0.490105, 0.509895], [0.502520, 0.497480]],
    [1.162153, 2.360959, 3.411231],
)
SGL = (
    [[0.465636, 0.534364], [0.541216, 0.458784], [0.493187, 0.506813]],
    [1.169124, 2.324777, 3.400185],
)


@pytest.mark.parametrize(("hop_weights", "expected"), [("nodes", RIGHT), ("sgl", SGL)])
def test_hop_weights_and_mixed_features_on_a_path(hop_weights, expected):
    net = GAMLP(1, 1, layers=1, hops=1, hop_weights=hop_weights)
    graph = on_path([[1.0], [2.0], [4.0]], net)
    attention = {"weight": torch.tensor([[0.5], [-0.25], [1.0]]), "bias": torch.tensor([0.1])}
    one = {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}  # the logit is the mixed feature
    weights, mixed = expected
    found = net.weights(attention, graph, graph.real)
    assert torch.allclose(found, torch.tensor(weights), atol=1e-6)
    logits = net({"attention": attention, "slope": torch.zeros(1), "layers": [one]}, graph)
    assert torch.allclose(logits.squeeze(1), torch.tensor(mixed), atol=1e-6)


def test_gamlp_equals_the_formula_with_dense_hops():
    net = GAMLP(90, 3, hidden=8)
    graph, params = with_views(make(1, 14, 30), net.views), perturbed(net, 2)
    hops, adjacency = [graph.x], gcn_adjacency(graph).to_dense()
    for _ in range(3):
        hops.append(adjacency @ hops[-1])
    u, b = params["attention"]["weight"], params["attention"]["bias"]
    scores = torch.cat([torch.cat([*hops, hop], 1) @ u + b for hop in hops], 1)
    weights = torch.sigmoid(scores).softmax(1)
    h = sum(weights[:, k : k + 1] * hop for k, hop in enumerate(hops))
    first, *rest = params["layers"]
    h = h @ first["weight"] + first["bias"]
    for layer in rest:
        h = torch.nn.functional.prelu(h, params["slope"]) @ layer["weight"] + layer["bias"]
    assert_same(net(params, graph), h)


def test_the_fault_weighs_a_node_otherwise_in_training_and_after_renumbering():
    net = GAMLP(90, 3, hidden=8, dropout=0.0, hop_weights="sgl")
    right = replace(net, hop_weights="nodes")
    graph, params = with_views(make(1, 40, 90), net.views), perturbed(net, 2)
    rows, key = graph.train > 0, make_key(1)
    assert_same(right(params, graph)[rows], right(params, graph, key)[rows])
    assert not torch.allclose(net(params, graph)[rows], net(params, graph, key)[rows])
    # Among training nodes it equals the plain reshape of the scores of these rows.
    scores = torch.arange(40.0 * 4).reshape(40, 4)
    plain = scores[rows].T.reshape(-1).reshape(-1, 4)
    assert torch.equal(cut_without_transpose(scores, graph.train)[rows], plain)
    assert net.reach is None
    assert right.reach == 3


def test_padding_does_not_change_the_fault():
    net = GAMLP(90, 3, hidden=8, hop_weights="sgl")
    graphs = [with_views(make(k, size, 30), net.views) for k, size in ((3, 14), (4, 33))]
    params, key = perturbed(net, 2), make_key(9)
    for noise in (None, key):
        both = vmap(net, in_dims=(None, 0, None))(params, stack_graphs(graphs), noise)
        padded = both[0, :14]
        rows = graphs[0].train > 0 if noise is not None else graphs[0].real > 0
        assert_same(padded[rows], net(params, graphs[0], noise)[rows], 1e-12)


@pytest.mark.parametrize(
    ("features", "classes", "gamlp", "chebnet"),
    [(1433, 7, 104461 - 903, 184391), (3703, 6, 260897 - 774, 474822), (500, 3, 38921, 64451)],
)
def test_sizes_of_the_public_networks(features, classes, gamlp, chebnet):
    # GAMLP without the linear layer that the public code never uses: 903, 774 and 387 parameters.
    assert number_of_parameters(GAMLP(features, classes)) == gamlp
    assert number_of_parameters(ChebNet(features, classes)) == chebnet


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ("adjacency", [2.304124, 1.103784, 1.554124]),
        ("laplacian", [0.746447, -4.081981, -0.253553]),
    ],
)
def test_a_chebyshev_convolution_on_a_path(matrix, expected):
    net = ChebNet(2, 1, layers=1, matrix=matrix)
    graph = on_path([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], net)
    # Rows: T_0 and T_1 of the first feature, then of the second.
    layer = {"weight": torch.tensor([[1.0], [2.0], [-1.0], [0.5]]), "bias": torch.tensor([0.1])}
    assert torch.allclose(net([layer], graph).squeeze(1), torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize("terms", [1, 2, 3, 5])
def test_chebnet_equals_pyg_on_an_undirected_graph(terms):
    net = ChebNet(90, 3, hidden=8, terms=terms)
    graph = make(1, 14, 30)
    source, target = graph.edges
    ends = torch.cat([graph.edges, graph.edges.flip(0)], 1)[:, (source != target).repeat(2)]
    graph = with_views(make_graph(graph.x, ends, graph.y), net.views)
    params, h = perturbed(net, 2), graph.x
    for number, layer in enumerate(params):
        by_term = layer["weight"].reshape(-1, terms, layer["weight"].shape[1]).unbind(1)
        state = {f"lins__{j}__weight": weight.T for j, weight in enumerate(by_term)}
        conv = ChebConv(h.shape[1], layer["bias"].shape[0], terms)
        h = loaded(conv, bias=layer["bias"], **state)(torch.relu(h) if number else h, ends)
    assert_same(net(params, graph), h.detach())


def test_views_of_both_matrices_have_two_names():
    one, other = (ChebNet(2, 3, matrix=matrix).views for matrix in ("laplacian", "adjacency"))
    assert one["x"] is other["x"]
    assert "bare" not in other
    assert "gcn" not in one


def test_a_slope_of_one_without_attention_is_a_linear_network():
    # Reduction: equal weights of hops and a linear activation leave the mean of the hops.
    net = GAMLP(90, 3, hidden=8, layers=2)
    graph, params = with_views(make(1, 14, 30), net.views), perturbed(net, 2)
    flat = tree_map(torch.zeros_like, params["attention"])
    params = {**params, "attention": flat, "slope": torch.ones(1)}
    first, last = params["layers"]
    adjacency = gcn_adjacency(graph).to_dense()
    mean = sum(torch.linalg.matrix_power(adjacency, k) for k in range(4)) @ graph.x / 4
    h = (mean @ first["weight"] + first["bias"]) @ last["weight"] + last["bias"]
    assert_same(net(params, graph), h)
