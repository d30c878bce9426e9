"""Rounds of one experiment: their recorded scores and their cost."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.core.batching import WHOLE, Graphs
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.data.archive import load_federation, save_federation
from atoll.data.divide import federate
from atoll.data.synthetic import Archipelago, make_lagoon
from atoll.engines.base import ENGINES
from atoll.experiment.metrics import METRICS, mean_over_clients
from atoll.experiment.rounds import Experiment
from atoll.methods import FedAvg
from atoll.nn import GCN, GraphGIN
from atoll.testing import (
    CLASSES,
    FEATURES,
    double_precision,
    small_federation,
    small_graph_federation,
)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_with_an_empty_test_set_is_left_out_of_every_mean(engine):
    federation = small_federation()
    graphs = list(federation.graphs)
    graphs[1] = replace(graphs[1], test=torch.zeros_like(graphs[1].test))
    method = FedAvg(GCN(FEATURES, CLASSES, hidden=4), epochs=1)
    run = Experiment(method, replace(federation, graphs=tuple(graphs)), 2, engine=engine).run()
    whole = Experiment(method, federation, 2, engine=engine).run()
    assert run.history.counts[1].tolist() == [*whole.history.counts[1][:2], 0]
    others = [0, 2, 3]
    for scored in ("deployed", "local"):
        for metric in METRICS:
            mine = run.history.array(scored, metric, "test")
            reference = whole.history.array(scored, metric, "test")
            assert np.isnan(mine[:, 1]).all()
            np.testing.assert_array_equal(mine[:, others], reference[:, others])
            for weight in (run.history.counts[:, 2], run.history.nodes, np.ones(4)):
                mean = mean_over_clients(mine, weight)
                kept = mean_over_clients(reference[:, others], weight[others])
                np.testing.assert_allclose(mean, kept)
    # Its validation nodes still count.
    assert not np.isnan(run.history.array("deployed", "accuracy", "val")).any()


@pytest.mark.parametrize("make", [small_federation, small_graph_federation])
def test_a_network_of_another_shape_is_refused_before_training(make) -> None:
    federation = make()
    net = GraphGIN if federation.task.many_graphs else GCN
    for features, classes in ((FEATURES - 1, CLASSES), (FEATURES + 1, CLASSES), (FEATURES, 2)):
        problem = (
            f"the network has {features} features and {classes} classes, but the data have "
            f"{FEATURES} and {CLASSES}; build it from federation.features and federation.classes"
        )
        with pytest.raises(ConfigError, match=f"^{problem}$"):
            Experiment(FedAvg(net(features, classes)), federation).begin()
    more = Experiment(FedAvg(net(FEATURES, CLASSES + 2), epochs=1), federation, rounds=1)
    if net is GCN:  # some classes may be absent
        assert more.run().finished
    else:
        with pytest.raises(ConfigError, match=f"{CLASSES + 2} classes, but the data have"):
            more.begin()


def test_the_local_model_of_a_single_client_is_the_deployed_one():
    method = FedAvg(GCN(FEATURES, CLASSES, hidden=4), epochs=1)
    history = Experiment(method, small_federation((13,)), rounds=3).run().history
    np.testing.assert_array_equal(history.scores["local"], history.scores["deployed"])


@pytest.mark.parametrize("engine", ENGINES)
def test_local_scores_of_absent_clients_stay_what_they_were(engine):
    method = FedAvg(GCN(FEATURES, CLASSES, hidden=4), epochs=1)
    run = Experiment(method, small_federation(), 6, 0.5, engine=engine).run()
    scores = run.history.array("local", "loss", "train")
    present = np.zeros(scores.shape, dtype=bool)
    for number, step, client, *_ in run.ledger.rows():
        present[number, client] |= step == "train"
    assert (present.sum(1) == 2).all()
    before = np.vstack([np.full(4, np.nan), scores[:-1]])
    np.testing.assert_array_equal(scores[~present], before[~present])
    assert not np.isnan(scores[present]).any()
    assert (scores[present] != before[present]).all()


def test_scores_of_a_trained_model_agree_with_its_predictions():
    with double_precision():
        federation = small_federation()
        method = FedAvg(GCN(FEATURES, CLASSES, hidden=8, dropout=0.0), epochs=5)
        run = Experiment(method, federation, rounds=5).run()
        prepared: Federation = federation.prepared(method.views)
        accuracy = run.history.array("deployed", "accuracy", "test")[-1]
        for k, graph in enumerate(prepared.graphs):
            right = (method.net(run.server, graph).argmax(-1) == graph.y).to(torch.float64)
            assert accuracy[k] == pytest.approx(
                float((right * graph.test).sum() / graph.test.sum())
            )


def test_training_graphs_are_scored_in_every_tenth_round_and_the_last() -> None:
    federation = small_graph_federation()
    method = FedAvg(GraphGIN(FEATURES, CLASSES, hidden=4), epochs=1)
    for batching in (None, Graphs(2), WHOLE):
        asked = Experiment(method, federation, rounds=13, batching=batching)
        some, all_ = (asked.run().history, replace(asked, train_every=1).run().history)
        for scored in ("deployed", "local"):
            trained = some.array(scored, "accuracy", "train")
            rounds = np.flatnonzero(np.isfinite(trained).all(1))
            assert rounds.tolist() == [0, 10, 12]
            every = all_.array(scored, "accuracy", "train")
            np.testing.assert_array_equal(trained[rounds], every[rounds])
            for role in ("val", "test"):
                for metric in ("accuracy", "loss"):
                    np.testing.assert_allclose(
                        some.array(scored, metric, role),
                        all_.array(scored, metric, role),
                        rtol=1e-5,
                    )


def islands(clients: int, **knobs: int):
    source = make_lagoon(Archipelago(**knobs), clients, 0)
    return federate(source, clients=None, partition="column:owner", seed=0)


def method(federation) -> FedAvg:
    return FedAvg(GCN(federation.features, federation.classes, hidden=8), epochs=1)


def seconds_of(clients: int) -> float:
    """The better CPU seconds of two runs: partition, preparation, training and scoring."""
    found = []
    for _ in range(2):
        start = time.process_time()
        federation = islands(clients)
        Experiment(method(federation), federation, rounds=2, chunk=50).run()
        found.append(time.process_time() - start)
    return min(found)


def test_four_times_the_clients_cost_about_four_times_as_much() -> None:
    seconds_of(50)  # whatever happens once in a process
    assert seconds_of(800) < 4 * 2 * seconds_of(200)


def test_lazy_clients_give_the_same_numbers_and_are_not_kept(tmp_path: Path) -> None:
    path = save_federation(islands(30), tmp_path / "a.atoll")
    runs = []
    for lazy in (False, True):
        federation = load_federation(path, lazy=lazy)
        found = Experiment(method(federation), federation, rounds=3, fraction=0.7, chunk=8).run()
        runs.append(np.stack(found.history.scores["deployed"]))
    np.testing.assert_array_equal(*runs)
