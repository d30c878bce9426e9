"""A server starts from the models of an earlier run, where they fit."""

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

DATA = "lagoon:nodes=300"
OPTIONS = {"clients": 3, "rounds": 3, "set": {"hidden": 8}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("fedavg", "fedgta", "local"):
        atoll.run(name, DATA, out=folder / name, **OPTIONS)
    return folder


def first_server(name, models, hidden=8, clients=3):
    federation = atoll.partition(atoll.load(DATA, clients=clients))
    net = atoll.nn.GCN(federation.features, federation.classes, hidden=hidden)
    method = {
        "fedavg": atoll.methods.FedAvg,
        "fedprox": atoll.methods.FedProx,
        "scaffold": atoll.methods.Scaffold,
        "fedgta": atoll.methods.FedGTA,
        "fedtad": atoll.methods.FedTAD,
        "local": atoll.methods.Local,
    }[name](net)
    run = Experiment(method, federation, rounds=1).begin()
    run.start()
    return method, with_models(method, run.server, models, "there")


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedtad"])
def test_one_model_starts_one_model(runs, name):
    models = RunFolder(runs / "fedavg").model().deployed
    method, server = first_server(name, models)
    found = leaves(method.deploy(server).tree)
    assert all(torch.equal(a, b) for a, b in zip(found, leaves(models[0]), strict=True))


def test_one_model_starts_every_client(runs):
    models = RunFolder(runs / "fedavg").model().deployed
    method, server = first_server("fedgta", models)
    for place in range(3):
        own = leaves(method.deploy(server).for_one(place))
        assert all(torch.equal(a, b) for a, b in zip(own, leaves(models[0]), strict=True))


def test_clients_start_from_their_own_models(runs):
    models = RunFolder(runs / "fedgta").model().deployed
    method, server = first_server("fedgta", models)
    for place in range(3):
        own = leaves(method.deploy(server).for_one(place))
        assert all(torch.equal(a, b) for a, b in zip(own, leaves(models[place]), strict=True))
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
    """Its first round is what one more round of FedAvg gives, with fresh moments."""
    atoll.run("fedavg", DATA, out=tmp_path / "new", from_run=str(runs / "fedavg"), **OPTIONS)
    fresh = atoll.run("fedavg", DATA, **OPTIONS)
    warm = atoll.read_result(tmp_path / "new")
    assert warm.config.from_run == str(runs / "fedavg")
    assert warm.curve("loss", "train")[0, 0] < fresh.curve("loss", "train")[0, 0]
    again = atoll.resume(tmp_path / "new")
    np.testing.assert_allclose(again.curve(), warm.curve(), atol=1e-5)  # six digits in the file


def test_tables_are_read_with_the_encoder_of_the_first_run(tmp_path):
    def write(name, kinds):
        (tmp_path / name).mkdir()
        rows = [f"{i},{'xy'[i % 2]},{kinds[i % len(kinds)]},{i % 7}" for i in range(60)]
        (tmp_path / name / "nodes.csv").write_text("\n".join(["id,label,kind,z", *rows]))
        edges = [f"{i},{(i + 1) % 60}" for i in range(60)]
        (tmp_path / name / "edges.csv").write_text("\n".join(["source,target", *edges]))
        return str(tmp_path / name)

    options = {"clients": 2, "rounds": 1, "partition": "random"}
    atoll.run("fedavg", write("one", "uvw"), out=tmp_path / "run", **options)
    more = {"from_run": str(tmp_path / "run"), **options}
    result = atoll.run("fedavg", write("two", "uw"), **more)  # a value that no longer occurs
    assert result.hyperparameters["net"]["features"] == 4
    with pytest.raises(AtollError, match="holds 's', a category that training never saw"):
        atoll.run("fedavg", write("three", "uvs"), **more)
    with pytest.raises(AtollError, match="holds no model to start from"):
        atoll.run("fedavg", str(tmp_path / "two"), **{**more, "from_run": str(tmp_path)})
