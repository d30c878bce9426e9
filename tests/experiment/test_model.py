"""The model of the selected round is kept, and predicts what the run reported."""

import json

import pytest
import torch
from safetensors import safe_open

import atoll
from atoll.core.errors import AtollError
from atoll.core.graph import with_views
from atoll.core.tree import leaves
from atoll.data.own.encoder import Encoder
from atoll.engines import replay
from atoll.experiment.config import make_config
from atoll.experiment.folder import RunFolder, read_run
from atoll.experiment.observers import Observer
from atoll.experiment.rounds import Experiment
from atoll.experiment.run import RunPlan, Stopped
from tests.experiment.own_graphs import write_own
from tests.experiment.test_run import rings

SMALL = {"clients": 3, "rounds": 6, "seeds": 2, "set": {"hidden": 8}}
NODES = "lagoon:nodes=300"
EARLY = {**SMALL, "rounds": 12, "set": {"hidden": 16, "lr": 0.1}}
"""The best round is neither the first nor the last."""


def accuracies(folder, seed, data=None):
    """Each client's test accuracy with the stored model, and the model."""
    run = read_run(folder, data)
    number = seed - run.config.seed
    model, method = RunFolder(folder).model(seed), run.method
    found = []
    for position, bare in enumerate(run.federations[number].graphs):
        graph = with_views(bare, method.views)
        with torch.no_grad():
            logits = graph.at_roots(model.predict(method, graph, position))
        test = graph.at_roots(graph.test) > 0
        hits = (logits.argmax(-1) == graph.at_roots(graph.y))[test]
        found.append(float(hits.double().mean()))
    return found, run.result.of_clients()[number], model


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavg", {}),
        ("fedgta", {}),  # the server sends each client another model
        ("fedper", {}),  # the last layer is the client's own
        ("local", {}),
        ("fedpub", {}),
        ("fedath", {}),
        ("fedproto", {}),
        ("scaffold", {"fraction": 0.5}),  # some clients have no state yet
        ("fedavg", {"dp": "clip=1,noise=0.1"}),
        ("fedtad", {"set": {"base": "fedgta", "hidden": 8}}),
        ("fedavg", {"engine": "wire"}),
        ("fedpub", {"protocol": "fediih", "evaluate": "deployed", "clients": 5}),
    ],
    ids=str,
)
def test_the_kept_model_predicts_what_was_reported(tmp_path, method, options):
    atoll.run(method, NODES, out=tmp_path / "run", **{**SMALL, **options})
    for seed in (0, 1):
        found, reported, model = accuracies(tmp_path / "run", seed)
        assert found == pytest.approx(reported.tolist(), abs=1e-6)
        assert model.about["method"] == method
        assert model.about["classes"] == 6


def test_private_layers_stay_with_their_owners(tmp_path):
    data = rings(200, 3, 0)
    options = {"protocol": "gcfl", "clients": 3, "rounds": 3, "batch_size": 30}
    atoll.run("fedavg", data, out=tmp_path / "run", **options)
    found, reported, model = accuracies(tmp_path / "run", 0, data)
    assert found == pytest.approx(reported.tolist(), abs=1e-6)
    assert model.rounds.tolist() == [2, 2, 2]  # protocol gcfl reports the last round
    names = safetensors(tmp_path / "run/model/seed-0/private.safetensors")
    assert {name.split(".")[0] for name in names} == {"client-0", "client-1", "client-2"}
    assert not any("moments" in name for name in names)  # predicting reads no optimizer state
    deployed = safetensors(tmp_path / "run/model/seed-0/deployed.safetensors")
    assert not deployed & {name.split(".", 2)[-1] for name in names}


def safetensors(path):
    with safe_open(path, "pt") as file:
        return set(file.keys())


def same_models(one, other):
    assert one.rounds.tolist() == other.rounds.tolist()
    for a, b in ((one.deployed, other.deployed), (one.private, other.private)):
        left, right = leaves(list(a)), leaves(list(b))
        assert len(left) == len(right)
        assert all(
            torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(left, right, strict=True)
        )


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_replayed_rounds_and_seeds_at_once_keep_the_same_model(tmp_path, method, monkeypatch):
    monkeypatch.setattr(replay, "MOMENT", 60.0)  # many rounds are replayed before they are read
    config = make_config(method=method, data=NODES, **EARLY)
    RunPlan(config, out=tmp_path / "one").run(at_once=False)
    RunPlan(config, out=tmp_path / "many").run(at_once=True)
    problem = read_run(tmp_path / "one")
    for number, federation in enumerate(problem.federations):
        plain = RunFolder(tmp_path / "one").model(number)
        same_models(plain, RunFolder(tmp_path / "many").model(number))
        rule = problem.result.selection
        experiment = Experiment(
            problem.method, federation, rounds=12, seed=number, keep=rule, replay=True
        )
        done = experiment.run()
        kept = done.keeper.selected(done.history)
        assert kept.rounds.tolist() == plain.rounds.tolist()
        assert 0 < kept.rounds[0] < 11
        for a, b in zip(leaves(list(kept.deployed)), leaves(list(plain.deployed)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class StopAfter(Observer):
    def __init__(self, rounds):
        self.rounds, self.done = rounds, 0

    def round(self, seed, history):
        self.done = history.rounds

    def should_stop(self):
        return self.done >= self.rounds


def test_a_resumed_run_keeps_the_model_of_a_round_before_the_stop(tmp_path):
    options = {**EARLY, "seeds": 1}
    atoll.run("fedper", NODES, out=tmp_path / "whole", **options)
    whole = RunFolder(tmp_path / "whole").model()
    assert whole.rounds[0] < 11
    stop = StopAfter(int(whole.rounds[0]) + 1)
    with pytest.raises(Stopped):
        atoll.run("fedper", NODES, out=tmp_path / "run", observer=stop, **options)
    with pytest.raises(AtollError, match="kept no model of seed 0"):
        RunFolder(tmp_path / "run").model()
    atoll.resume(tmp_path / "run")
    same_models(RunFolder(tmp_path / "run").model(), whole)


def test_a_run_that_is_not_saved_keeps_nothing():
    federation = atoll.partition(atoll.load(NODES), "louvain", clients=2)
    method = atoll.methods.FedAvg(atoll.nn.GCN(federation.features, federation.classes))
    assert Experiment(method, federation, rounds=1).run().keeper is None


def test_a_run_that_selects_by_test_scores_says_that_it_kept_no_model(tmp_path):
    options = {**SMALL, "seeds": 1, "rounds": 2, "compat": ["test-selection"]}
    atoll.run("gcfl", NODES, out=tmp_path / "run", **options)
    with pytest.raises(AtollError, match="selects by test scores"):
        RunFolder(tmp_path / "run").model()
    with pytest.raises(AtollError, match="has no seed 7; give one from 0 to 0"):
        RunFolder(tmp_path / "run").model(7)


def test_a_damaged_model_is_refused(tmp_path):
    atoll.run("fedavg", NODES, out=tmp_path / "run", **{**SMALL, "seeds": 1, "rounds": 1})
    (tmp_path / "run/model/seed-0/deployed.safetensors").write_bytes(b"x")
    with pytest.raises(AtollError, match="cannot be read"):
        RunFolder(tmp_path / "run").model()


def test_own_tables_give_the_names_of_the_classes(tmp_path):
    lines = [f"{i},{'paid' if i % 2 else 'late'},{i % 3}" for i in range(40)]
    (tmp_path / "nodes.csv").write_text("\n".join(["id,label,kind", *lines]))
    edges = [f"{i},{(i + 1) % 40}" for i in range(40)]
    (tmp_path / "edges.csv").write_text("\n".join(["source,target", *edges]))
    atoll.run("fedavg", str(tmp_path), out=tmp_path / "run", clients=2, rounds=1)
    assert RunFolder(tmp_path / "run").model().about["class_names"] == ["late", "paid"]


def test_own_tables_leave_their_encoder_and_the_names_of_clients(tmp_path):
    path = write_own(tmp_path, "client")
    atoll.run("fedavg", path, out=tmp_path / "run", rounds=1)
    kept = json.loads((tmp_path / "run/model/seed-0/encoder.json").read_text())
    source = atoll.load(path)
    assert Encoder.from_plain(kept) == source.encoder
    assert RunFolder(tmp_path / "run").model().about["client_names"] == ["a", "b"]
    federation = atoll.partition(source)  # a file of the federation has the encoder, too
    atoll.save(federation, tmp_path / "two.atoll")
    assert atoll.load(str(tmp_path / "two.atoll")).encoder == federation.encoder == kept
    assert "encoder" not in federation.about
