"""FedSage is FedAvg of GraphSAGE with plain means, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.core.errors import ConfigError
from atoll.core.optim import SGD, Adam
from atoll.core.tree import Tree, leaves
from atoll.engines.base import ENGINES
from atoll.experiment.rounds import Experiment
from atoll.methods import FedAvg, FedSage
from atoll.nn import GCN, GraphSAGE
from atoll.testing import CLASSES, FEATURES, small_federation

NET = GraphSAGE(FEATURES, CLASSES, hidden=6)


def same(a: Tree, b: Tree) -> bool:
    return all(map(torch.equal, leaves(a), leaves(b)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("more", [{}, {"optimizer_state": "reset"}, {"weight_by": "train"}])
def test_fedsage_is_fedavg_of_graphsage_bit_for_bit(engine, more):
    def run(method):
        given = {"rounds": 3, "engine": engine, "fraction": 0.75}
        return Experiment(method, small_federation(), **given).run()

    sage = run(FedSage(NET, Adam(), **more))
    plain = run(FedAvg(NET, Adam(), **{"weight_by": "uniform", **more}))
    assert same(sage.server, plain.server)
    for scored, rounds in sage.history.scores.items():
        np.testing.assert_array_equal(rounds, plain.history.scores[scored])


def test_every_client_counts_the_same_whatever_its_size():
    made = Experiment(FedSage(NET, SGD(lr=0.5)), small_federation(), rounds=1)
    run = made.run()
    everyone = run.simulation.clients(0)
    run.experiment.method.round(FedSage(NET).init(run.simulation.clients(-1)), everyone)
    models = leaves(everyone.replies["train"].model)
    for mean, stacked in zip(leaves(run.server), models, strict=True):
        torch.testing.assert_close(mean, stacked.mean(0))
    by_size = Experiment(FedSage(NET, SGD(lr=0.5), weight_by="nodes"), small_federation(), rounds=1)
    assert not same(by_size.run().server, run.server)


def test_another_network_is_refused():
    with pytest.raises(ConfigError, match="fedsage trains a GraphSAGE; use --set net=sage"):
        FedSage(GCN(FEATURES, CLASSES))
