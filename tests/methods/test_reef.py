"""Reef: FedProx if its parts are off, and a choice by likelihood."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.core.graph import with_views
from atoll.core.random import make_key
from atoll.core.tree import leaves
from atoll.engines.base import ENGINES
from atoll.methods import FedProx, Reef
from atoll.methods.reef import Kept
from atoll.nn.residual import Duo
from atoll.testing import CLASSES, FEATURES, small_federation
from tests.methods.quadratic import run

NET = Duo(FEATURES, CLASSES, hidden=4)


class Sum(FedProx):
    """FedProx on the same network with Reef's loss."""

    loss, teach = Reef.loss, 0.3


@pytest.mark.parametrize("engine", ENGINES)
def test_the_models_are_those_of_fedprox(engine):
    ours = run(Reef(NET, mu=0.3), engine)
    theirs = run(Sum(NET, mu=0.3), engine)
    assert all(map(torch.equal, leaves(ours.server), leaves(theirs.server)))


def test_the_networks_learn_from_their_common_prediction():
    graph = with_views(small_federation().graphs[0], NET.views)
    params = NET.init(make_key(1))
    first, second = (torch.softmax(x, -1) for x in NET.each(params, graph))
    mean = (first + second) / 2
    real = graph.real.bool()
    crossed = [-(mean * p.log()).sum(-1)[real].mean() for p in (first, second)]
    with_it, without = (Reef(NET, teach=t).loss(params, graph, None) for t in (0.5, 0.0))
    torch.testing.assert_close(with_it - without, 0.5 * sum(crossed))


def test_the_common_prediction_is_held_fixed():
    """Its slope at equal networks is zero: they already agree."""
    graph = with_views(small_federation().graphs[0], NET.views)
    logits = torch.randn(graph.num_nodes, CLASSES, requires_grad=True)

    class Same(Duo):
        def each(self, params, graph, key=None):
            return [logits, logits]

    slopes = []
    for teach in (0.0, 0.5):
        loss = Reef(Same(FEATURES, CLASSES, hidden=4), teach=teach).loss(None, graph, None)
        slopes.append(torch.autograd.grad(loss, logits)[0])
    torch.testing.assert_close(slopes[0], slopes[1])


def test_scores_are_log_likelihoods_of_validation_nodes():
    method, graph = Reef(NET), with_views(small_federation().graphs[0], NET.views)
    params = NET.init(make_key(1))
    first, second = (torch.softmax(x, -1) for x in NET.each(params, graph))
    chosen = [row for row in range(graph.num_nodes) if graph.val[row]]
    assert chosen
    expected = [
        sum(math.log(float(p[row, graph.y[row]])) for row in chosen)
        for p in (first, second, (first + second) / 2)
    ]
    assert method._scores(graph, params).tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("scores", "share"), [((9, 0, 0), 1), ((0, 9, 0), 0), ((0, 0, 9), 0.5)])
def test_a_client_predicts_with_the_likeliest_setting(scores, share):
    method, graph = Reef(NET, sharpness=9.0), with_views(small_federation().graphs[0], NET.views)
    params = NET.init(make_key(1))
    kept = Kept(None, torch.tensor(scores, dtype=torch.float32))
    first, second = (torch.softmax(x, -1) for x in NET.each(params, graph))
    found = torch.softmax(method.predict(graph, params, kept), -1)
    torch.testing.assert_close(found, share * first + (1 - share) * second)
    torch.testing.assert_close(
        torch.softmax(method.predict(graph, params, None), -1), (first + second) / 2
    )
