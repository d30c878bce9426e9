"""A server starts from the models of an earlier run if they fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import AtollError
from atoll.core.tree import leaves
from atoll.experiment.folder import RunFolder
from atoll.experiment.rounds import Experiment
from atoll.experiment.warm_start import with_models
from atoll.methods import METHODS
from tests.data.own.graphs import folder

DATA = "lagoon:nodes=300"
OPTIONS = {"clients": 3, "rounds": 3, "set": {"hidden": 8}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    for name in ("fedavg", "fedgta", "local"):
        atoll.run(name, DATA, out=path / name, **OPTIONS)
    return path


def first_server(name, models, hidden=8, clients=3):
    federation = atoll.partition(atoll.load(DATA, clients=clients))
    net = atoll.nn.GCN(federation.features, federation.classes, hidden=hidden)
    method = METHODS[name](net)
    run = Experiment(method, federation, rounds=1).begin()
    run.start()
    return method, with_models(method, run.server, models, "there")


def check_start(name, models):
    method, server = first_server(name, models)
    for place, model in enumerate(models if len(models) == 3 else models * 3):
        own = leaves(method.deploy(server).for_one(place))
        assert all(torch.equal(a, b) for a, b in zip(own, leaves(model), strict=True))


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedtad", "fedgta"])
def test_one_model_starts_one_model_or_that_of_every_client(runs, name):
    models = RunFolder(runs / "fedavg").model().deployed
    assert len(models) == 1
    check_start(name, models)


def test_clients_start_from_their_own_models(runs):
    models = RunFolder(runs / "fedgta").model().deployed
    assert len(models) == 3
    check_start("fedgta", models)
    with pytest.raises(AtollError, match="has a model for each client, but FedAvg starts from one"):
        first_server("fedavg", models)
    with pytest.raises(AtollError, match=r"is \(3, .*\) there and \(2, .*\) in FedGTA"):
        first_server("fedgta", models, clients=2)


def test_models_that_do_not_fit_are_refused(runs):
    models = RunFolder(runs / "fedavg").model().deployed
    with pytest.raises(AtollError, match=r"'0\.weight' is \(600, 8\) there and \(600, 16\) in"):
        first_server("fedavg", models, hidden=16)
    with pytest.raises(AtollError, match="the server of Local has no model"):
        first_server("local", RunFolder(runs / "local").model().deployed)


def test_a_run_starts_where_another_ended(runs, tmp_path):
    atoll.run("fedavg", DATA, out=tmp_path / "new", from_run=str(runs / "fedavg"), **OPTIONS)
    fresh = atoll.run("fedavg", DATA, **OPTIONS)
    warm = atoll.read_result(tmp_path / "new")
    assert warm.config.from_run == str(runs / "fedavg")
    assert warm.curve("loss", "train")[0, 0] < fresh.curve("loss", "train")[0, 0]
    again = atoll.resume(tmp_path / "new")
    np.testing.assert_allclose(again.curve(), warm.curve(), atol=1e-5)  # six digits in the file


def test_tables_are_read_with_the_encoder_of_the_first_run(tmp_path):
    def write(name, kinds):
        rows = [f"{i},{'xy'[i % 2]},{kinds[i % len(kinds)]},{i % 7}" for i in range(60)]
        ends = [f"{i},{(i + 1) % 60}" for i in range(60)]
        tables = ["id,label,kind,z", *rows], ["source,target", *ends]
        return str(folder(tmp_path / name, *map("\n".join, tables)))

    options = {"clients": 2, "rounds": 1, "partition": "random"}
    atoll.run("fedavg", write("one", "uvw"), out=tmp_path / "run", **options)
    more = {"from_run": str(tmp_path / "run"), **options}
    result = atoll.run("fedavg", write("two", "uw"), **more)  # a value that no longer occurs
    assert result.hyperparameters["net"]["features"] == 4
    with pytest.raises(AtollError, match="holds 's', a category that training never saw"):
        atoll.run("fedavg", write("three", "uvs"), **more)
    with pytest.raises(AtollError, match="holds no model to start from"):
        atoll.run("fedavg", str(tmp_path / "two"), **{**more, "from_run": str(tmp_path)})
