"""Reef: FedAvg if its parts are off, a class prior, and a choice by likelihood."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from atoll.core.aggregate import Adaptive, Mean
from atoll.core.graph import with_views
from atoll.core.optim import SGD
from atoll.core.random import make_key
from atoll.core.tree import leaves
from atoll.engines.base import ENGINES
from atoll.methods import FedAvg, Reef
from atoll.methods.reef import Kept
from atoll.nn.residual import Duo
from atoll.testing import CLASSES, FEATURES, small_federation
from tests.methods.quadratic import run

NET = Duo(FEATURES, CLASSES, hidden=4)


class Sum(FedAvg):
    """FedAvg on the same network with the sum of both losses."""

    def loss(self, params, graph, key):
        return sum(graph.task.loss(one, graph) for one in self.net.each(params, graph, key))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", [Mean(), Adaptive(lr=0.1)])
def test_without_a_prior_the_models_are_those_of_fedavg(engine, rule):
    ours = run(Reef(NET, prior=0.0, aggregate=rule), engine)
    theirs = run(Sum(NET, SGD(lr=0.5), aggregate=rule), engine)
    assert all(map(torch.equal, leaves(ours.server), leaves(theirs.server)))


def test_the_prior_is_the_log_frequency_of_the_training_labels():
    graph = small_federation().graphs[0]
    counts = [1.0] * CLASSES
    for row in range(graph.num_nodes):
        counts[int(graph.y[row])] += float(graph.train[row])
    expected = [math.log(count / sum(counts)) for count in counts]
    assert Reef(NET)._prior(graph).tolist() == pytest.approx(expected, rel=1e-5)
    assert Reef(NET, prior=0.5)._prior(graph).tolist() == pytest.approx(
        [one / 2 for one in expected], rel=1e-5
    )
    hidden = replace(graph, y=torch.where(graph.train > 0, graph.y, 0))
    assert torch.equal(Reef(NET)._prior(graph), Reef(NET)._prior(hidden))


def test_a_class_without_a_training_node_has_a_finite_prior():
    graph = small_federation().graphs[0]
    none = replace(graph, train=torch.zeros_like(graph.train))
    assert Reef(NET)._prior(none).tolist() == pytest.approx([-math.log(CLASSES)] * CLASSES)


def test_scores_are_log_likelihoods_of_validation_nodes():
    method, graph = Reef(NET), with_views(small_federation().graphs[0], NET.views)
    params, prior = NET.init(make_key(1)), torch.randn(CLASSES)
    first, second = (torch.softmax(x + prior, -1) for x in NET.each(params, graph))
    chosen = [row for row in range(graph.num_nodes) if graph.val[row]]
    assert chosen
    expected = [
        sum(math.log(float(p[row, graph.y[row]])) for row in chosen)
        for p in (first, second, (first + second) / 2)
    ]
    assert method._scores(graph, params, prior).tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("scores", "share"), [((9, 0, 0), 1), ((0, 9, 0), 0), ((0, 0, 9), 0.5)])
def test_a_client_predicts_with_the_likeliest_setting(scores, share):
    method, graph = Reef(NET, sharpness=9.0), with_views(small_federation().graphs[0], NET.views)
    params = NET.init(make_key(1))
    prior = torch.randn(CLASSES)
    kept = Kept(None, prior, torch.tensor(scores, dtype=torch.float32))
    first, second = (torch.softmax(x + prior, -1) for x in NET.each(params, graph))
    found = torch.softmax(method.predict(graph, params, kept), -1)
    torch.testing.assert_close(found, share * first + (1 - share) * second)
    plain = sum(torch.softmax(x, -1) for x in NET.each(params, graph)) / 2  # a new client
    torch.testing.assert_close(torch.softmax(method.predict(graph, params, None), -1), plain)
