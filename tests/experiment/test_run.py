"""Runs: from names and from objects, saved, repeated, stopped and resumed with the same numbers."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import AtollError, ConfigError, DataError, StepError
from atoll.core.federation import Federation
from atoll.core.files import locked
from atoll.core.tree import leaves, named_leaves
from atoll.data.source import GraphGroup, GraphSet
from atoll.engines.base import ENGINES
from atoll.experiment.config import make_config, read_config
from atoll.experiment.folder import RunFolder, check_folder
from atoll.experiment.history import History
from atoll.experiment.observers import Observer
from atoll.experiment.run import RunPlan, Stopped
from atoll.methods import METHODS, FedAvg
from atoll.nn import GCN, GraphGIN
from atoll.testing import double_precision, small_federation

SMALL = {"data": "lagoon:nodes=150", "clients": 3, "rounds": 3}


@dataclass(frozen=True)
class Mine(FedAvg):
    """A method that no registry knows."""


@dataclass
class StopAfter:
    """An observer that stops a run after some rounds of one seed."""

    rounds: int
    seed: int = 0
    heard: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, *args: object) -> None:
        pass

    def round(self, seed: int, history: History) -> None:
        self.heard.append((seed, history.rounds))

    def should_stop(self) -> bool:
        return (self.seed, self.rounds) in self.heard


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def saved_metrics(folder: Path) -> dict[str, object]:
    return json.loads((folder / "result.json").read_text())["metrics"]


def federation(seed: int = 0) -> Federation:
    return atoll.partition(atoll.load("lagoon:nodes=150", clients=3, seed=seed), "column:owner")


# Names and objects.


def test_a_name_a_source_and_a_federation_give_the_same_numbers() -> None:
    by_name = atoll.run("fedavg", **SMALL)
    source = atoll.load("lagoon:nodes=150", clients=3, seed=0)
    by_source = atoll.run("fedavg", source, clients=3, rounds=3)
    by_federation = atoll.run("fedavg", federation(), rounds=3)
    assert by_name.metrics() == by_source.metrics() == by_federation.metrics()
    assert by_federation.summary()["clients"] == 3
    assert by_federation.summary()["partition"] == "column:owner"


def test_a_method_object_needs_no_registry() -> None:
    fed = federation()
    method = Mine(net=GCN(fed.features, fed.classes, hidden=8), epochs=2)
    result = atoll.run(method, fed, rounds=2)
    assert result.summary()["method"] == "mine"
    with pytest.raises(ConfigError, match="unknown method 'mine'"):
        atoll.run("mine", fed)


def test_a_class_is_no_method_object() -> None:
    sentence = r"method is the class FedAvg; give its name, or FedAvg\(net=...\)$"
    with pytest.raises(ConfigError, match=sentence):
        atoll.run(FedAvg, federation())


@pytest.mark.parametrize("extra", [{"set": {"hidden": 3}}, {"epochs": 3}])
def test_hyper_parameters_beside_a_method_object_are_refused(extra: dict[str, object]) -> None:
    fed = federation()
    with pytest.raises(ConfigError, match="a method object has its own hyper-parameters"):
        atoll.run(FedAvg(net=GCN(fed.features, fed.classes)), fed, rounds=1, **extra)


def test_a_handmade_federation_runs() -> None:
    bare = Federation(federation().graphs, federation().classes)
    summary = atoll.run("local", bare, rounds=1).summary()
    assert (summary["clients"], summary["partition"], summary["data"]) == (3, "given", "federation")


# The same numbers whatever the engine, the chunk and the company of other seeds.


def test_engines_agree_on_every_seed() -> None:
    runs = [atoll.run("fedprox", engine=e, seeds=2, **SMALL) for e in ("serial", "fused", "wire")]
    accuracy = [run.metrics()["test_accuracy"]["per_seed"] for run in runs]
    assert accuracy[0] == accuracy[1] == accuracy[2]
    for name, numbers in runs[0].metrics().items():
        for other in runs[1:]:
            assert other.metrics()[name]["per_seed"] == pytest.approx(numbers["per_seed"], abs=1e-3)
    assert runs[0].bytes() == runs[1].bytes()


def test_seeds_are_independent_of_each_other() -> None:
    both = atoll.run("fedavg", seeds=2, **SMALL).metrics()
    alone = atoll.run("fedavg", seed=1, **SMALL).metrics()
    for name, numbers in both.items():
        assert numbers["per_seed"][1] == alone[name]["per_seed"][0]
    assert len(set(both["test_loss"]["per_seed"])) == 2


@pytest.mark.parametrize("chunk", [1, 2])
def test_chunks_do_not_change_the_numbers(chunk: int) -> None:
    whole, parts = (
        atoll.run("fedavg", chunk=c, **SMALL).metrics()["test_accuracy"] for c in (0, chunk)
    )
    assert whole == parts


def test_a_fraction_of_the_clients_takes_part() -> None:
    result = atoll.run("fedavg", fraction=0.5, **SMALL)
    trained = [e for e in result.seeds[0].ledger.entries if e.step == "train"]
    assert [len(e.clients) for e in trained] == [2, 2, 2]
    scored = [e for e in result.seeds[0].ledger.entries if e.step == "score"]
    assert max(len(e.clients) for e in scored) == 3


# What is saved.


def test_a_saved_run_holds_everything_and_repeats_exactly(tmp_path: Path) -> None:
    options = {"seeds": 2, "fraction": 0.7, "set": {"hidden": 8}, **SMALL}
    first = atoll.run("fedprox", out=tmp_path / "a", **options)
    assert sorted(contents(tmp_path / "a")) == [
        "config.toml", "ledger.csv", "metrics.csv",
        "model/seed-0/MODEL_CARD.md", "model/seed-0/deployed.safetensors",
        "model/seed-0/model.toml",
        "model/seed-1/MODEL_CARD.md", "model/seed-1/deployed.safetensors",
        "model/seed-1/model.toml",
        "result.json",
        "seed-0/checkpoint.atoll", "seed-0/clients.npz", "seed-0/partition.npz",
        "seed-1/checkpoint.atoll", "seed-1/clients.npz", "seed-1/partition.npz",
    ]  # fmt: skip
    config = make_config(**read_config(tmp_path / "a" / "config.toml"))
    again = RunPlan(config, out=tmp_path / "b").run()
    assert again.metrics() == first.metrics() == saved_metrics(tmp_path / "a")
    a, b = contents(tmp_path / "a"), contents(tmp_path / "b")
    for name in ("config.toml", "ledger.csv", "metrics.csv"):
        assert a[name] == b[name]
    rows = list(csv.DictReader((tmp_path / "a" / "metrics.csv").read_text().splitlines()))
    assert len(rows) == 2 * 3 * 3 * 2  # seeds, rounds, clients, deployed and local
    assert {row["scored"] for row in rows} == {"global", "local"}
    whole = json.loads(a["result.json"])
    assert whole["environment"]["torch"] == torch.__version__
    assert whole["federation"]["sha1"]


def test_an_existing_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    atoll.run("fedavg", out=tmp_path / "a", **SMALL)
    before = contents(tmp_path / "a")
    with pytest.raises(ConfigError, match="already holds a run; continue it with --resume"):
        atoll.run("local", out=tmp_path / "a", **SMALL)
    assert contents(tmp_path / "a") == before


@pytest.mark.parametrize(
    "options",
    [
        {"set": {"hiden": 3}},
        {"data": "croa"},
        {"clients": 99},
        {"split": "stratifed"},
        {"data": "lagoon:nodes=40", "split": "given"},
        {"data": "lagoon:classes=2", "positive": "nonsense"},
        {"positive": "1"},
        {"metric": "auc"},
        {"threshold": "max_f1"},
    ],
)
def test_a_refused_run_leaves_no_folder(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(AtollError):
        atoll.run(out=tmp_path / "new" / "run", **{**SMALL, **options})
    assert list(tmp_path.iterdir()) == []


def test_a_run_refused_at_its_start_does_not_block_the_corrected_one(tmp_path: Path) -> None:
    atoll.run("fedavg", out=tmp_path / "first", **SMALL)
    wrong = {"from_run": str(tmp_path / "first"), "set": {"hidden": 5}}
    (tmp_path / "second").mkdir()
    (tmp_path / "second/mine.txt").write_text("")
    for name in ("second", "third"):
        with pytest.raises(AtollError, match="first"):
            atoll.run("fedavg", out=tmp_path / name, **SMALL, **wrong)
    assert [path.name for path in tmp_path.rglob("second/**/*")] == ["mine.txt"]
    assert not (tmp_path / "third").exists()
    atoll.run("fedavg", out=tmp_path / "second", **SMALL)


def test_a_refused_run_deletes_only_files_that_it_wrote(tmp_path: Path) -> None:
    atoll.run("fedavg", out=tmp_path / "first", **SMALL)
    wrong = {"from_run": str(tmp_path / "first"), "set": {"hidden": 5}}
    mine = ["federation.npz", "result.json", "seed-0/notes.txt", "seed-7/partition.npz"]
    for name in mine:
        (tmp_path / "second" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "second" / name).write_text(name)
    with pytest.raises(AtollError, match="first"):
        atoll.run("fedavg", out=tmp_path / "second", **SMALL, **wrong)
    assert contents(tmp_path / "second") == {name: name.encode() for name in mine}


@dataclass
class Meanwhile(Observer):
    """Does something at the start of a run, or after its first round."""

    action: Callable[[], None]
    at_start: bool

    def begin(self, *_: object) -> None:
        if self.at_start:
            self.action()

    def round(self, seed: int, history: History) -> None:
        if not self.at_start and history.rounds == 1:
            self.action()


@pytest.mark.parametrize("at_start", [True, False])
def test_of_two_runs_into_one_folder_one_gets_it_and_loses_nothing(
    tmp_path: Path, at_start: bool
) -> None:
    atoll.run("fedavg", out=tmp_path / "first", **SMALL)
    wrong = make_config(from_run=str(tmp_path / "first"), set={"hidden": 5}, **SMALL)
    out = tmp_path / "second"
    refused, good = RunPlan(wrong, out=out), RunPlan(make_config(method="local", **SMALL), out=out)
    seen: list[dict[str, bytes]] = []

    def intrude() -> None:
        seen.append(contents(out))
        for other in (refused, good):  # both were planned while the folder was empty
            with pytest.raises(ConfigError, match="already holds a run; continue it with --resume"):
                other.run()
        assert contents(out) == seen[0]

    atoll.run("fedavg", out=out, observer=Meanwhile(intrude, at_start), **SMALL)
    assert "config.toml" in seen[0]
    assert "result.json" in contents(out)
    assert atoll.read_result(out).config.method == "fedavg"


def test_one_run_gets_a_folder_also_on_a_disk_without_hard_links(tmp_path, monkeypatch) -> None:
    def no_links(*names: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    RunFolder(tmp_path).claim(make_config(method="fedavg"))
    before = (tmp_path / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder(tmp_path).claim(make_config(method="fedprox"))
    assert (tmp_path / "config.toml").read_bytes() == before


def test_a_refused_run_leaves_the_folder_to_another_one(tmp_path: Path) -> None:
    atoll.run("fedavg", out=tmp_path / "first", **SMALL)
    wrong = make_config(from_run=str(tmp_path / "first"), set={"hidden": 5}, **SMALL)
    good = RunPlan(make_config(method="local", **SMALL), out=tmp_path / "second")

    def intrude() -> None:
        with pytest.raises(ConfigError, match="already holds a run"):
            good.run()

    refused = RunPlan(wrong, out=tmp_path / "second", observer=Meanwhile(intrude, at_start=True))
    with pytest.raises(AtollError, match="first"):
        refused.run()
    assert not (tmp_path / "second").exists()
    atoll.run("local", out=tmp_path / "second", **SMALL)


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        atoll.run("fedavg", out=tmp_path / "file" / "run", **SMALL)
    assert str(caught.value) == (
        f"output folder '{tmp_path / 'file' / 'run'}' cannot be made: '{tmp_path / 'file'}' is a "
        "file; choose another --out"
    )
    with pytest.raises(ConfigError, match="is not possible"):
        check_folder(tmp_path / ("long" * 100), resuming=False)
    check_folder(tmp_path / "a" / "b", resuming=False)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_impossible_times_between_checkpoints(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"save_every is .*; give seconds, 0 for every round"):
        atoll.run("fedavg", save_every=seconds, **SMALL)


# Stopping and resuming.


@pytest.mark.parametrize("method", ["local", "fedprox"])
@pytest.mark.parametrize(
    ("seed", "rounds", "engine"), [(0, 1, "fused"), (1, 2, "wire"), (1, 4, "fused")]
)
def test_a_stopped_run_resumes_to_the_same_bits(
    tmp_path: Path, method: str, seed: int, rounds: int, engine: str
) -> None:
    options = {**SMALL, "seeds": 2, "rounds": 5, "fraction": 0.6, "engine": engine}
    whole = atoll.run(method, out=tmp_path / "whole", **options)
    with pytest.raises(Stopped) as stop:
        atoll.run(method, out=tmp_path / "part", observer=StopAfter(rounds, seed), **options)
    assert (stop.value.out, stop.value.seed) == (tmp_path / "part", seed)
    assert stop.value.rounds == rounds
    assert not (tmp_path / "part" / "result.json").exists()
    observer = StopAfter(99)
    resumed = atoll.resume(tmp_path / "part", observer)
    assert observer.heard[0] == (seed, rounds + 1)
    assert resumed.metrics() == whole.metrics() == saved_metrics(tmp_path / "part")
    a, b = contents(tmp_path / "whole"), contents(tmp_path / "part")
    for name in ("config.toml", "ledger.csv", "metrics.csv"):
        assert a[name] == b[name]


@pytest.mark.parametrize("options", [{}, {"protocol": "fedath"}, {"clients": 2}])
def test_the_first_saved_configuration_is_the_last(
    tmp_path: Path, options: dict[str, object]
) -> None:
    """Whatever the protocol fills in: resuming meets the configuration that it was saved with."""
    options = {"data": "lagoon:nodes=400", "rounds": 2, **options}
    with pytest.raises(Stopped):
        atoll.run(out=tmp_path, observer=StopAfter(1), **options)
    first = (tmp_path / "config.toml").read_bytes()
    resumed = atoll.resume(tmp_path)
    assert (tmp_path / "config.toml").read_bytes() == first
    assert resumed.config.clients == resumed.clients
    assert resumed.metrics() == atoll.run(**options).metrics()


def test_resuming_a_finished_run_trains_nothing(tmp_path: Path) -> None:
    first = atoll.run("fedavg", out=tmp_path, seeds=2, **SMALL)
    before = contents(tmp_path)
    observer = StopAfter(99)
    again = atoll.resume(tmp_path, observer)
    assert observer.heard == []
    assert again.metrics() == first.metrics()
    assert again.seconds()["train"] == first.seconds()["train"]
    after = contents(tmp_path)
    assert before.keys() == after.keys()
    assert {k: v for k, v in before.items() if k != "result.json"} == {
        k: v for k, v in after.items() if k != "result.json"
    }


def stopped(folder: Path) -> Path:
    with pytest.raises(Stopped):
        atoll.run("fedavg", out=folder, observer=StopAfter(2, 1), seeds=2, **SMALL)
    return folder


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_lost(tmp_path: Path, damage: str) -> None:
    folder = stopped(tmp_path / "run")
    checkpoint = folder / "seed-1" / "checkpoint.atoll"
    data = checkpoint.read_bytes()
    flipped = data[:200] + bytes([data[200] ^ 1]) + data[201:]
    checkpoint.write_bytes({"cut": data[:-7], "flip": flipped, "empty": b""}[damage])
    before = contents(folder)
    with pytest.raises(DataError) as caught:
        atoll.resume(folder)
    assert str(checkpoint) in str(caught.value)
    assert "delete it to start this seed again" in str(caught.value)
    assert contents(folder) == before
    checkpoint.unlink()
    assert atoll.resume(folder).metrics() == atoll.run("fedavg", seeds=2, **SMALL).metrics()


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("epochs = 3", "epochs = 4"))
    with pytest.raises(DataError, match="belongs to another configuration"):
        atoll.resume(folder)


@pytest.mark.parametrize("text", ["rounds = ", 'rounds = "x"', "round = 3", "\0"])
def test_a_damaged_configuration_is_refused_and_nothing_is_lost(tmp_path: Path, text: str) -> None:
    folder = stopped(tmp_path / "run")
    (folder / "config.toml").write_text(text)
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"config\.toml"):
        atoll.resume(folder)
    assert contents(folder) == before


def test_files_that_a_killed_run_left_are_cleared_when_it_resumes(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        atoll.run("fedavg", out=tmp_path, observer=StopAfter(1), **{**SMALL, "rounds": 2})
    left = [tmp_path / ".config.toml.ab_de0gh", tmp_path / "seed-0" / ".checkpoint.atoll.abcdefgh"]
    for path in left:
        path.touch()
        os.utime(path, (0, 0))
    atoll.resume(tmp_path)
    assert not any(path.exists() for path in left)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        atoll.resume(tmp_path / "none")
    assert str(caught.value) == (
        f"'{tmp_path / 'none'}' holds no run to resume (it has no config.toml); give the folder of "
        "a run"
    )


def test_a_run_of_objects_resumes_with_the_objects_alone(tmp_path: Path) -> None:
    fed = federation()
    method = Mine(net=GCN(fed.features, fed.classes, hidden=8))
    whole = atoll.run(method, fed, rounds=4)
    with pytest.raises(Stopped):
        atoll.run(method, fed, rounds=4, out=tmp_path, observer=StopAfter(2))
    with pytest.raises(ConfigError) as caught:
        atoll.resume(tmp_path)
    assert str(caught.value) == (
        "this run was started in Python with a method object and a data object, which its "
        "configuration cannot hold; continue it in Python with atoll.resume(folder, method=..., "
        "data=...)"
    )
    other = Mine(net=GCN(fed.features, fed.classes, hidden=8), epochs=9)
    with pytest.raises(DataError, match="belongs to another configuration"):
        atoll.resume(tmp_path, method=other, data=fed)
    flipped = replace(fed, graphs=tuple(replace(g, y=g.y.flip(0)) for g in fed.graphs))
    with pytest.raises(DataError, match="belongs to another configuration"):
        atoll.resume(tmp_path, method=method, data=flipped)  # the same shapes
    assert atoll.resume(tmp_path, method=method, data=fed).metrics() == whole.metrics()


# Numbers that are none.


@pytest.mark.parametrize("engine", ["serial", "fused"])
@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_divergence_names_client_step_and_round(method: str, engine: str) -> None:
    options = {**SMALL, "rounds": 20, "set": {"optimizer": "sgd", "lr": 9e5, "weight_decay": 1e3}}
    with pytest.raises(StepError) as caught:
        atoll.run(method, engine=engine, **options)
    error = caught.value
    assert str(error).startswith(f"client {error.client}, step {error.step}, round {error.round}: ")
    assert error.step in ("train", "score")
    assert "lower the learning rate" in str(error)


def test_what_was_saved_before_a_divergence_stays(tmp_path: Path) -> None:
    options = {**SMALL, "rounds": 20, "set": {"optimizer": "sgd", "lr": 9e5, "weight_decay": 1e3}}
    with pytest.raises(StepError):
        atoll.run("fedavg", out=tmp_path, save_every=0, **options)
    assert sorted(contents(tmp_path)) == [
        "config.toml",
        "seed-0/checkpoint.atoll",
        "seed-0/partition.npz",
    ]


# Sets of graphs.


def rings(graphs: int, features: int, seed: int, name: str = "rings") -> GraphSet:
    """Cycles (class 0) and stars (class 1), which differ in degrees but not in features."""
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


GRAPHS = {"rounds": 3, "batch_size": 30, "protocol": "gcfl"}


@pytest.mark.parametrize("method", ["local", "fedavg", "fedprox"])
@pytest.mark.parametrize("make", [lambda: rings(200, 3, 0), group])
def test_engines_agree_on_sets_of_graphs(method, make) -> None:
    found = []
    for engine in ENGINES:
        data = make()
        clients = {} if isinstance(data, GraphGroup) else {"clients": 3}
        result = atoll.run(method, data, engine=engine, **clients, **GRAPHS)
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
    result = atoll.run("fedavg", group(), out=tmp_path, **GRAPHS)
    again = atoll.resume(tmp_path, data=group())
    assert again.metrics() == result.metrics()
    assert again.config.partition == "by-set"


def test_a_group_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="one client for each data set; remove --partition"):
        atoll.run("fedavg", group(), partition="random", **GRAPHS)
    with pytest.raises(ConfigError, match="remove --clients 9"):
        atoll.run("fedavg", group(), clients=9, **GRAPHS)


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
    result = atoll.run("local", rings(100, 3, 0), clients=2, set={"pool": pool}, **GRAPHS)
    assert result.hyperparameters["net"]["pool"] == pool


SMALL_METHODS = {
    "adafgl": {"federated_rounds": 1},
    "fedsage+": {"generator_epochs": 1},
}


@pytest.mark.parametrize("name", METHODS)
def test_class_weights_and_focal_loss_reach_every_method(name):
    data = "lagoon:nodes=60,classes=2,label_skew=0"
    options = {"data": data, "clients": 2, "rounds": 2, "epochs": 1, "seed": 3}
    options |= {"set": {"hidden": 8, **SMALL_METHODS.get(name, {})}}
    losses = [
        atoll.run(name, **options, **more).metrics()["test_loss"]["mean"]
        for more in ({}, {"class_weights": "1,50", "loss": "focal:3"})
    ]
    assert losses[0] != losses[1]


def test_engines_agree_with_class_weights_and_focal_loss():
    with double_precision():
        federation = small_federation().with_loss("balanced", "focal:1.5")
        net = atoll.nn.GCN(federation.features, federation.classes, hidden=5)
        trees = []
        for engine in ("serial", "fused"):
            done = atoll.Experiment(FedAvg(net), federation, rounds=2, engine=engine).run()
            trees.append(leaves(done.server))
        for one, two in zip(*trees, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_balanced_weights_say_where_their_counts_come_from():
    class Notes(Observer):
        heard: ClassVar[list[str]] = []

        def begin(self, config, engine, why, notes):
            self.heard.extend(notes)

    atoll.run("fedavg", observer=Notes(), class_weights="balanced", **SMALL)
    said = "class weights are balanced by each client's own training labels; nothing more leaves"
    assert any(note.startswith(said) for note in Notes.heard)


def test_seeds_whose_clients_are_made_side_by_side_have_the_same_numbers(monkeypatch) -> None:
    config = make_config(data="lagoon:nodes=300", clients=3, seeds=4, rounds=1, partition="louvain")
    monkeypatch.setattr("atoll.experiment.run.cores", lambda: 4)
    one_by_one = list(RunPlan(config).experiments())
    at_once = list(RunPlan(config).experiments(at_once=True))
    assert [e.seed for e in at_once] == [0, 1, 2, 3]
    for first, second in zip(one_by_one, at_once, strict=True):
        pairs = zip(first.federation.graphs, second.federation.graphs, strict=True)
        for graph, other in pairs:
            tensors, others = dict(named_leaves(graph)), dict(named_leaves(other))
            assert tensors.keys() == others.keys()
            assert all(torch.equal(leaf, others[name]) for name, leaf in tensors.items())


@pytest.mark.parametrize("how", [{"resuming": True}, {"overwrite": True}])
def test_two_processes_do_not_train_one_run(tmp_path, how):
    out = tmp_path / "run"
    done = atoll.run("fedavg", rounds=2, out=out, data="lagoon:nodes=100", clients=2)
    with locked(out, ""), pytest.raises(ConfigError, match="another process trains the run in"):
        RunPlan(done.config, out, **how).run()
    assert atoll.resume(out, rounds=3).seeds[0].history.rounds == 3
