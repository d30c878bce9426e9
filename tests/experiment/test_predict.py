"""A run's model predicts new data, and gives old nodes the logits of the training."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import tomli_w
import torch

import atoll
from atoll.core.errors import AtollError
from atoll.engines.base import ENGINES, Engine
from atoll.engines.prepare import EngineInputs
from atoll.experiment import run as run_module
from atoll.experiment.folder import RunFolder
from atoll.experiment.predict import Predictor, predict
from atoll.experiment.threshold import Threshold
from tests.data.own.graphs import folder
from tests.experiment.test_run import rings

METHODS = {
    "fedavg": {},
    "fedath": {},
    "fediih": {},
    "fedper": {},
    "fedpub": {},
    "adafgl": {"federated_rounds": 1},
    "fedsage+": {"generator_epochs": 1},
    "fedgta": {},
    "local": {},
    "fedproto": {},
}


def write(path, rows, edges, columns="id,label,kind,size,bank"):
    return folder(path, "\n".join([columns, *rows]), "\n".join(["source,target", *edges, ""]))


def node(i, bank=None, label=None):
    label = ("late", "paid")[i % 2] if label is None else label
    return f"n{i},{label},{'uvw'[i % 3]},{i * 0.37 % 1:.3f},{bank or 'ns'[i % 90 >= 40]}"


@pytest.fixture(scope="session")
def bank(tmp_path_factory):
    edges = [f"n{i},n{(i + step) % 90}" for i in range(90) for step in (1, 2, 5)]
    return write(tmp_path_factory.mktemp("bank") / "old", [node(i) for i in range(90)], edges)


@pytest.fixture(scope="session")
def runs(bank):
    """A run of each method on the bank, with the logits of its last round's deployed models."""
    made = {}

    def one(name, data=None, **options):
        key = name, str(data), str(options)
        if key in made:
            return made[key]
        out, caught = bank.parent / f"run-{len(made)}", {}
        real = RunFolder.write_seed

        def write_seed(self, run, config, method):
            real(self, run, config, method)
            wanted = run.experiment
            rows = 1 + max(graph.num_nodes for graph in wanted.federation.graphs)
            step = Predictor(wanted.method, rows).predict
            reply = run.simulation.clients(99).map(step, wanted.method.deploy(run.server))
            caught["logits"], caught["federation"] = reply.logits.cpu().numpy(), wanted.federation

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunFolder, "write_seed", write_seed)
            last = run_module.selection_of
            patch.setattr(run_module, "selection_of", lambda *a: replace(last(*a), select="last"))
            given = {"rounds": 2, "split": "stratified:ratios=0.4/0.3/0.3", **options}
            if data is None:
                data, given["partition"] = str(bank), "column:bank"
            atoll.run(name, data, out=out, **given)
        made[key] = out, caught["logits"], caught["federation"]
        return made[key]

    return one


@pytest.mark.parametrize(
    ("name", "engine"),
    [*((name, engine) for name in METHODS for engine in ("fused", "serial")), ("fedper", "wire")],
)
def test_old_nodes_get_the_logits_of_the_training(runs, bank, name, engine):
    out, logits, federation = runs(name, set=METHODS[name], engine=engine)
    found = predict(out, bank)
    for place, graph in enumerate(federation.graphs):
        np.testing.assert_array_equal(
            found.logits[graph.ids.numpy()], logits[place, : graph.num_nodes]
        )
    assert found.classes == ("late", "paid")
    assert found.clients.tolist() == ["ns"[i >= 40] for i in range(90)]


def test_graphs_get_the_logits_of_the_training(runs):
    data = rings(60, 3, 0)
    out, logits, federation = runs("gcfl", data, protocol="gcfl", clients=3)
    found = predict(out, federation)
    sizes = [len(graph.at_roots(graph.y)) for graph in federation.graphs]
    expected = [rows[:size] for rows, size in zip(logits, sizes, strict=True)]
    np.testing.assert_array_equal(found.logits, np.concatenate(expected))
    with pytest.raises(AtollError, match="name no client, and gcfl has a model for each client"):
        predict(out, data)
    assert len(predict(out, data, client="1").logits) == 60


@pytest.mark.parametrize("encoder", ["federated", "local"])
def test_new_nodes_join_the_training_graph(runs, bank, tmp_path, encoder):
    out, *_ = runs("fedavg", encoder=encoder)
    new = write(
        tmp_path, [node(90, "n", ""), node(91, "s", "")], ["n90,n0", "n91,n90", "n91,n50", "n0,n7"]
    )
    found = predict(out, new, joined=True)
    assert found.ids.tolist() == ["n90", "n91"]
    assert found.clients.tolist() == ["n", "s"]
    # The same as a graph of all nodes, in which only these edges were added.
    every = [*(bank / "edges.csv").read_text().splitlines()[1:], "n90,n0", "n91,n50", "n0,n7"]
    rows = [*(bank / "nodes.csv").read_text().splitlines()[1:], node(90, "n"), node(91, "s")]
    whole = predict(out, write(tmp_path / "whole", rows, every))
    np.testing.assert_allclose(found.logits, whole.logits[90:], rtol=1e-5, atol=1e-6)
    alone = predict(out, write(tmp_path / "alone", [node(90, "n"), node(91, "s")], []))
    assert not np.allclose(found.logits, alone.logits)


@pytest.mark.parametrize(
    ("name", "net"),
    [
        *(("fedavg", net) for net in ("gcn", "sage", "gat", "sgc", "mlp")),
        *(("fedath", "gcn"), ("fedper", "gcn"), ("fedper", "gat"), ("local", "sage")),
    ],
)
def test_blocks_agree_with_one_piece(runs, bank, name, net):
    out, *_ = runs(name, set={"net": net})
    torch.set_default_dtype(torch.float64)
    try:
        one = predict(out, bank)
        blocks = predict(out, bank, block=7)
    finally:
        torch.set_default_dtype(torch.float32)
    assert one.logits.dtype == np.float64
    np.testing.assert_allclose(blocks.logits, one.logits, rtol=0, atol=1e-12)


def test_a_method_that_sees_the_whole_graph_has_no_blocks(runs, bank):
    out, *_ = runs("adafgl", set=METHODS["adafgl"], engine="fused")
    with pytest.raises(AtollError, match="cannot predict in blocks"):
        predict(out, bank, block=7)


def test_a_client_picks_its_own_model(runs, bank, tmp_path):
    out, *_ = runs("fedper", set={}, engine="fused")
    new = write(tmp_path, [f"m{i},u,0.{i}" for i in range(5)], ["m0,m1"], "id,kind,size")
    north, south = predict(out, new, client="n"), predict(out, new, client="s")
    assert not np.allclose(north.logits, south.logits)
    assert north.clients.tolist() == ["n"] * 5
    with pytest.raises(AtollError, match="client 'west' never trained, and fedper has a model for"):
        predict(out, new, client="west")
    with pytest.raises(AtollError, match="the new nodes name no client"):
        predict(out, new)


def test_a_name_with_a_typing_error_is_noted(runs, bank, tmp_path):
    out, *_ = runs("fedavg")
    new = write(tmp_path, [node(90, "nn"), node(91, "s")], ["n90,n0", "n91,n50"])
    (note,) = (one for one in predict(out, new, joined=True).notes if "did not know" in one)
    assert note.startswith("training did not know the clients 'nn' (1 nodes): they get the global")
    assert not any("did not know" in one for one in predict(out, bank).notes)


def test_the_global_model_serves_anyone(runs, tmp_path):
    out, *_ = runs("fedavg")
    new = write(tmp_path, [f"m{i},u,0.{i}" for i in range(5)], ["m0,m1"], "id,kind,size")
    found = predict(out, new)
    assert found.clients.tolist() == [""] * 5
    assert not any("training did not know" in note for note in found.notes)
    west = predict(out, new, client="west")
    np.testing.assert_array_equal(west.logits, found.logits)
    assert west.notes[-1] == (
        "training did not know the clients 'west' (5 nodes): they get the global model, and no "
        "edge joins their nodes to another client's"
    )
    np.testing.assert_allclose(found.probabilities.sum(1), 1)
    with pytest.raises(AtollError, match="choose one with --client NAME"):
        predict(out, write(tmp_path, ["m0,u,1"], ["m0,n1"], "id,kind,size"), joined=True)


def test_alerts_follow_the_threshold_of_the_run_or_the_given_one(runs, bank, tmp_path):
    shutil.copytree(runs("fedavg")[0], tmp_path / "run")
    chance = predict(tmp_path / "run", bank).probabilities
    file = tmp_path / "run/model/seed-0/model.toml"
    value = float(np.sort(chance[:, 0])[45])
    chosen = Threshold("max_f1", value, 0, 0.5, 0.5, 0.5)
    file.write_text(tomli_w.dumps({**tomllib.loads(file.read_text()), "threshold": chosen.plain()}))
    found = predict(tmp_path / "run", bank)
    assert found.alert == (0, value)
    np.testing.assert_array_equal(found.alerts, chance[:, 0] >= value)
    assert 0 < found.alerts.sum() < 90
    assert predict(tmp_path / "run", bank, threshold=0).alerts.all()  # of the same class
    assert not predict(tmp_path / "run", bank, threshold=1).alerts.any()


def test_a_threshold_without_a_class_to_look_for_is_refused(runs, bank):
    found = predict(runs("fedavg")[0], bank, threshold=0.5)
    np.testing.assert_array_equal(found.alerts, found.probabilities[:, 1] >= 0.5)  # the second
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(AtollError, match="give a probability from 0 to 1"):
            predict(runs("fedavg")[0], bank, threshold=wrong)
    plain, *_ = runs("fedavg", "lagoon:nodes=300", clients=2)
    with pytest.raises(AtollError, match="the model has 6 classes and no threshold to replace"):
        predict(plain, "lagoon:nodes=300", threshold=0.5)


def test_clients_without_an_owner_column_join_by_number(bank, tmp_path, runs):
    out, *_ = runs("fedavg", str(bank), partition="random", clients=3)
    new = write(tmp_path, [node(90)], [f"n90,n{i}" for i in range(20)])
    assert predict(out, new, joined=True, client="2").clients.tolist() == ["2"]
    assert not np.allclose(
        predict(out, new, joined=True, client="2").logits,
        predict(out, new, joined=True, client="0").logits,
    )


def test_what_cannot_be_used_is_refused(runs, bank, tmp_path):
    out, *_ = runs("fedavg")
    with pytest.raises(AtollError, match="holds no run"):
        predict(bank, bank)
    with pytest.raises(AtollError, match="was encoded by itself"):
        predict(out, atoll.load(str(write(tmp_path / "a", [node(i) for i in (1, 3, 4)], []))))
    with pytest.raises(AtollError, match="'lagoon' is no folder; give one with tables"):
        predict(out, "lagoon")
    with pytest.raises(AtollError, match="no data are named"):
        predict(out, " ")
    bound, *_ = runs("fedgnn")
    with pytest.raises(AtollError, match="fedgnn cannot predict new nodes: its clients"):
        predict(bound, bank)
    plain, *_ = runs("fedavg", "lagoon:nodes=300", clients=2)
    with pytest.raises(AtollError, match=r"has no encoder .* cannot be read for it"):
        predict(plain, bank)
    assert len(predict(plain, "lagoon:nodes=300").logits) == 300
    with pytest.raises(AtollError, match="has 50 features, and the model was trained on 600"):
        predict(plain, "lagoon:nodes=300,words=50")
    with pytest.raises(AtollError, match="--joined needs a run on tables"):
        predict(plain, "lagoon:nodes=300", joined=True)


def test_a_model_of_a_gpu_predicts_on_a_cpu_with_a_note(runs, bank, tmp_path):
    out = tmp_path / "gpu"
    shutil.copytree(runs("fedavg")[0], out)
    text = (out / "result.json").read_text()
    (out / "result.json").write_text(text.replace('"device": "cpu"', '"device": "cuda"'))
    assert predict(out, bank, device="cpu").notes == (
        "trained on cuda, predicted on cpu: numbers agree to rounding, not bit for bit",
    )


@pytest.mark.parametrize("lost", ["deployed.safetensors", "encoder.json", "model.toml"])
def test_half_a_model_is_refused(runs, bank, tmp_path, lost):
    shutil.copytree(runs("fedavg")[0], tmp_path / "half")
    (tmp_path / "half/model/seed-0" / lost).unlink()
    with pytest.raises(AtollError, match=r"cannot be read .*copy the folder whole"):
        predict(tmp_path / "half", bank)


def test_a_run_without_a_model_is_refused(runs, bank, tmp_path):
    shutil.copytree(runs("fedavg")[0], tmp_path / "none")
    shutil.rmtree(tmp_path / "none/model")
    with pytest.raises(AtollError, match="kept no model of seed 0: it is not finished"):
        predict(tmp_path / "none", bank)
    with pytest.raises(AtollError, match="has no seed 3; give one from 0 to 0"):
        predict(runs("fedavg")[0], bank, seed=3)


def test_training_data_that_changed_are_not_joined(tmp_path):
    old = write(tmp_path / "old", [node(i) for i in range(40)], ["n1,n2", "n3,n4", "n38,n39"])
    new = write(tmp_path / "new", [node(90, "n")], ["n90,n1"])
    options = {"partition": "random", "clients": 2, "rounds": 1}
    atoll.run("fedavg", str(old), out=tmp_path / "run", **options, allow=["no-edge"])
    assert len(predict(tmp_path / "run", new, joined=True, client="0").logits) == 1
    write(old, [node(i, "n") for i in range(41)], ["n1,n2"])
    with pytest.raises(AtollError, match="has 41 nodes, and the clients had 40"):
        predict(tmp_path / "run", new, joined=True, client="0")
    shutil.rmtree(old)
    with pytest.raises(AtollError, match="needs the training data, but there is no folder"):
        predict(tmp_path / "run", new, joined=True, client="0")


def test_a_run_of_an_engine_object_predicts_with_the_usual_engine(tmp_path):
    def mine(inputs: EngineInputs) -> Engine:
        return ENGINES["serial"](inputs)

    out = tmp_path / "run"
    atoll.run("fedavg", "lagoon:nodes=100", clients=2, rounds=1, engine=mine, out=out)
    named = tmp_path / "named"
    atoll.run("fedavg", "lagoon:nodes=100", clients=2, rounds=1, engine="serial", out=named)
    found = [predict(run, "lagoon:nodes=100").probabilities for run in (out, named)]
    np.testing.assert_allclose(*found, atol=1e-6)
