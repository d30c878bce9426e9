"""The residual network against its formula with dense matrices, and the network of two branches."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from atoll.core.graph import with_views
from atoll.core.random import fold, make_key
from atoll.nn.residual import Duo, Residual
from tests.nn.test_nets import assert_same, make, perturbed


@pytest.fixture(autouse=True, scope="module")
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def means(graph):
    """The mean of every node's neighbours as a dense matrix, zero rows for isolated nodes."""
    a = torch.zeros(graph.num_nodes, graph.num_nodes)
    source, target = graph.edges
    a.index_put_((target, source), torch.ones(len(source)), accumulate=True)
    return a / a.sum(1, keepdim=True).clamp(min=1)


@pytest.mark.parametrize("jump", [False, True])
@pytest.mark.parametrize("norm", ["layer", "none"])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_residual_network_is_its_formula(layers, norm, jump):
    net = Residual(90, 3, hidden=8, layers=layers, norm=norm, jump=jump)
    graph, params = with_views(make(1, 14, 30), net.views), perturbed(net, 2)

    def normed(h):
        if norm == "none":
            return h
        spread = h.var(1, correction=0, keepdim=True)
        return (h - h.mean(1, keepdim=True)) / torch.sqrt(spread + 1e-5)

    first, *blocks, last = params
    outputs = [torch.relu(graph.x @ first["weight"] + first["bias"])]
    for block in blocks:
        u = normed(outputs[-1])
        own, neighbour = block["weight"][:, :8], block["weight"][:, 8:]
        inner = u @ own + means(graph) @ u @ neighbour + block["bias"]
        outputs.append(outputs[-1] + torch.relu(inner))
    h = torch.stack(outputs).mean(0) if jump else outputs[-1]
    assert_same(net(params, graph), normed(h) @ last["weight"] + last["bias"])


def test_blocks_that_add_nothing_leave_a_perceptron():
    net = Residual(90, 3, hidden=8, norm="none")
    graph, params = with_views(make(1, 14, 30), net.views), perturbed(net, 2)
    for block in params[1:-1]:
        block |= {"weight": torch.zeros(8, 16), "bias": torch.zeros(8)}
    h = torch.relu(graph.x @ params[0]["weight"] + params[0]["bias"])
    assert_same(net(params, graph), h @ params[-1]["weight"] + params[-1]["bias"])


def test_two_branches_have_the_mean_of_their_probabilities():
    net = Duo(90, 3, hidden=8)
    graph, params = with_views(make(1, 14, 30), net.views), perturbed(net, 2)
    first, second = (
        functional.softmax(branch(own, graph), -1)
        for branch, own in zip(net.branches, params, strict=True)
    )
    assert_same(functional.softmax(net(params, graph), -1), (first + second) / 2)


def test_the_branches_drop_independently():
    net = Duo(90, 3, hidden=8)
    graph, params, key = with_views(make(1, 14, 30), net.views), perturbed(net, 2), make_key(3)
    first, second = net.each(params, graph, key)
    assert_same(first, net.branches[0](params[0], graph, fold(key, "branch", 0)))
    assert_same(second, net.branches[1](params[1], graph, fold(key, "branch", 1)))
