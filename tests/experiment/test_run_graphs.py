"""Graph classification from a name or an object to a saved result, on every engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import atoll
from atoll.core.batching import WHOLE, Graphs
from atoll.core.errors import ConfigError
from atoll.data.source import GraphGroup, GraphSet
from atoll.engines.base import ENGINES
from atoll.experiment.rounds import Experiment
from atoll.methods import FedAvg
from atoll.nn import GCN, GraphGIN
from atoll.testing import CLASSES, FEATURES, small_graph_federation

METHODS = ("local", "fedavg", "fedprox")


def rings(graphs: int, features: int, seed: int, name: str = "rings") -> GraphSet:
    """Cycles (class 0) and stars (class 1), which degrees tell apart; features say nothing."""
    rng = np.random.default_rng(seed)
    sizes, y = rng.integers(5, 9, graphs), rng.permutation(np.arange(graphs) % 2)
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    ends = []
    for first, size, label in zip(ptr, sizes, y, strict=False):
        nodes = np.arange(size)
        other = np.zeros(size, int) if label else (nodes + 1) % size
        ends.append(first + np.stack([nodes, other])[:, label:])
    one_way = np.concatenate(ends, axis=1)
    edges = np.concatenate([one_way, one_way[::-1]], axis=1)
    x = np.eye(features, dtype=np.float32)[rng.integers(0, features, ptr[-1])]
    return GraphSet(name, x, edges, ptr, y, 2)


def group() -> GraphGroup:
    return GraphGroup("shapes", (rings(40, 3, 0, "a"), rings(60, 5, 1, "b"), rings(30, 2, 2, "c")))


SMALL = {"rounds": 3, "batch_size": 30, "protocol": "gcfl"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [lambda: rings(200, 3, 0), group])
def test_engines_agree(method, make) -> None:
    found = []
    for engine in ENGINES:
        data = make()
        clients = {} if isinstance(data, GraphGroup) else {"clients": 3}
        result = atoll.run(method, data, engine=engine, **clients, **SMALL)
        assert result.clients == 3
        found.append(result.seeds[0].history.array("deployed", "loss", "test"))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-4)


def test_shapes_are_learned_together_and_the_summary_says_how(tmp_path: Path) -> None:
    options = {"protocol": "gcfl", "clients": 4, "rounds": 40, "batch_size": 16, "seeds": 2}
    result = atoll.run("fedavg", rings(240, 3, 0), out=tmp_path, set={"lr": 0.01}, **options)
    assert result.metrics()["test_accuracy"]["mean"] > 0.9
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["partition"] == "gcfl-oneds"
    assert sum(saved["federation"]["graphs"]) == 240
    assert saved["hyperparameters"]["weight_by"] == "train"
    assert saved["hyperparameters"]["net"]["pool"] == "sum"
    history = result.seeds[0].history
    assert history.nodes.tolist() == saved["federation"]["graphs"]
    assert history.counts.sum() == 240


def test_strict_on_a_set_of_graphs_varies_the_data_with_the_seed() -> None:
    result = atoll.run("fedavg", rings(300, 3, 0), rounds=1, seeds=2)
    assert result.config.partition == "gcfl-oneds"
    counts = [seed.history.counts.tolist() for seed in result.seeds]
    assert counts[0] != counts[1]


def test_a_run_on_a_group_resumes_from_its_folder(tmp_path: Path) -> None:
    result = atoll.run("fedavg", group(), out=tmp_path, **SMALL)
    again = atoll.resume(tmp_path, data=group())
    assert again.metrics() == result.metrics()
    assert again.config.partition == "by-set"


def test_a_group_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="one client for each data set; leave out --partition"):
        atoll.run("fedavg", group(), partition="random", **SMALL)
    with pytest.raises(ConfigError, match="leave out --clients 9"):
        atoll.run("fedavg", group(), clients=9, **SMALL)


def test_objects_that_do_not_fit_each_other() -> None:
    graphs, nodes = rings(100, 3, 0), atoll.load("lagoon:nodes=200")
    with pytest.raises(ConfigError, match="network GCN classifies nodes, but the clients of 'ring"):
        atoll.run(FedAvg(GCN(3, 2)), graphs, rounds=1)
    with pytest.raises(ConfigError, match="network GraphGIN classifies graphs"):
        atoll.run(FedAvg(GraphGIN(300, 5)), nodes, rounds=1)
    with pytest.raises(ConfigError, match="fedath classifies nodes, but 'rings' has graphs"):
        atoll.run("fedath", graphs, rounds=1)
    with pytest.raises(ConfigError, match="protocol 'fedtad' is for one graph, but 'rings' is a"):
        atoll.run("fedavg", graphs, protocol="fedtad")


def test_test_selection_is_a_switch_and_says_so(tmp_path: Path) -> None:
    options = {"clients": 4, "set": {"eps1": 1e9, "eps2": 0.0, "min_round": 2}, "protocol": "gcfl"}
    data = rings(200, 3, 0)
    plain = atoll.run("gcfl", data, rounds=8, **options)
    leaky = atoll.run("gcfl", data, rounds=8, compat=("test-selection",), out=tmp_path, **options)
    assert plain.seeds[0].history.cached == leaky.seeds[0].history.cached != [[]] * 4
    metrics = leaky.metrics()
    accuracy = leaky.seeds[0].history.array("deployed", "accuracy", "test")
    best = [
        accuracy[[*rounds, -1], client].max()
        for client, rounds in enumerate(leaky.seeds[0].history.cached)
    ]
    assert metrics["test_accuracy"]["mean"] == pytest.approx(np.mean(best))
    last = plain.metrics()["test_accuracy"]
    assert metrics["last_test_accuracy"] == last == plain.metrics()["last_test_accuracy"]
    assert json.loads((tmp_path / "result.json").read_text())["select"] == "best-cached-test"
    again = atoll.resume(tmp_path, data=data)
    assert again.metrics() == metrics


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_other_pools_run(pool: str) -> None:
    result = atoll.run("local", rings(100, 3, 0), clients=2, set={"pool": pool}, **SMALL)
    assert result.hyperparameters["net"]["pool"] == pool


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
