"""Numbers for other tools: TensorBoard and MLflow receive the numbers of the result."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar, NamedTuple

import numpy as np
import pytest

import atoll
from atoll.core.errors import ConfigError
from atoll.experiment.config import make_config
from atoll.experiment.loggers import share_logs
from atoll.experiment.observers import Observer
from atoll.experiment.result import Result
from atoll.experiment.run import Stopped
from atoll.studies.study import run_study
from atoll.studies.study_run import StudyRun

SMALL = {"data": "lagoon:nodes=150", "clients": 2, "rounds": 4, "epochs": 1, "set": {"hidden": 8}}


class StopAt(Observer):
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round(self, seed, history):
        self.rounds -= 1

    def should_stop(self):
        return self.rounds <= 0


def expected(result: Result, seed: int, scored: str, metric: str, role: str) -> np.ndarray:
    """Means over clients by their number of such nodes: what the strict protocol reports."""
    history = result.seeds[seed].history
    counts = history.counts[:, ("train", "val", "test").index(role)]
    return history.array(scored, metric, role) @ counts / counts.sum()


def up(result: Result, seed: int) -> list[int]:
    entries = [e for e in result.seeds[seed].ledger.entries if e.step != "score"]
    return [sum(e.up * e.size for e in entries if e.round == r) for r in range(4)]


def scalars(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in
            events.Tags()["scalars"]}, events  # fmt: skip


def test_tensorboard_has_every_round_and_the_end(tmp_path: Path) -> None:
    result = atoll.run("fedavg", out=tmp_path, seeds=2, log="tensorboard", **SMALL)
    for seed in (0, 1):
        found, events = scalars(tmp_path / "tensorboard" / f"seed-{seed}")
        for scored, role in itertools.product(("deployed", "local"), ("train", "val", "test")):
            steps, values = zip(*found[f"{scored}/{role}_accuracy"], strict=True)
            assert steps == (1, 2, 3, 4)
            assert values == pytest.approx(expected(result, seed, scored, "accuracy", role))
        assert [value for _, value in found["bytes_up"]] == up(result, seed)
        assert len(found["seconds"]) == 4
        final = result.metrics()["test_accuracy"]["per_seed"][seed]
        assert found["final/test_accuracy"][0][1] == pytest.approx(final)
        assert "_hparams_/session_start_info" in events.summary_metadata


def test_a_run_that_goes_on_is_in_tensorboard_once(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        atoll.run("fedavg", out=tmp_path, log="tensorboard", observer=StopAt(2), **SMALL)
    atoll.resume(tmp_path, log=["tensorboard"])
    found, _ = scalars(tmp_path / "tensorboard" / "seed-0")
    assert [step for step, _ in found["deployed/val_loss"]] == [1, 2, 3, 4]


def test_the_cells_of_a_study_are_logged_alike(tmp_path: Path) -> None:
    cell = StudyRun("one", make_config(method="fedavg", **SMALL))
    run_study(tmp_path, [cell], about={"kind": "compare"}, log=["tensorboard"])
    assert scalars(tmp_path / "cells" / "one" / "tensorboard" / "seed-0")[0]["bytes_down"]


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


class FakeClient:
    """A fake MLflow client that records its calls, in one store per address."""

    stores: ClassVar[dict[str, dict]] = defaultdict(dict)

    def __init__(self, tracking_uri: str) -> None:
        self.store = self.stores[tracking_uri]

    def get_experiment_by_name(self, name):
        known = self.store.get("experiment")
        return SimpleNamespace(experiment_id=known) if known else None

    def create_experiment(self, name, artifact_location=None):
        self.store["experiment"] = name
        self.store["artifacts"] = artifact_location
        return name

    def create_run(self, experiment, run_name, tags):
        run = f"run-{len(self.store)}"
        self.store[run] = {"name": run_name, "tags": tags, "metrics": [], "params": {}}
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def log_batch(self, run, metrics=(), params=()):
        assert len(metrics) <= 1000
        assert len(params) <= 100
        self.store[run]["metrics"] += metrics
        self.store[run]["params"] |= {p.key: p.value for p in params}

    def get_metric_history(self, run, key):
        return [m for m in self.store[run]["metrics"] if m.key == key]

    def set_terminated(self, run):
        self.store[run]["ended"] = True


@pytest.fixture
def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeClient]]:
    modules = {name: ModuleType(name) for name in ("mlflow", "mlflow.tracking", "mlflow.entities")}
    modules["mlflow.tracking"].MlflowClient = FakeClient
    modules["mlflow.entities"].Metric, modules["mlflow.entities"].Param = Metric, Param
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    yield FakeClient
    FakeClient.stores.clear()


def test_what_several_processes_would_make_is_made_before(
    fake_mlflow: type[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    share_logs(["mlflow", "tensorboard"])  # each run has its own file
    assert not fake_mlflow.stores
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///shared.db")
    for _ in range(2):
        share_logs("mlflow")
        assert fake_mlflow.stores["sqlite:///shared.db"]["experiment"] == "atoll"


def by_name(store: dict) -> dict[str, dict]:
    return {run["name"]: run for run in store.values() if isinstance(run, dict)}


def test_mlflow_has_a_run_for_each_seed_under_one(tmp_path: Path, fake_mlflow) -> None:
    result = atoll.run("fedavg", out=tmp_path, seeds=2, log="mlflow", **SMALL)
    ((uri, store),) = fake_mlflow.stores.items()
    assert uri == f"sqlite:///{tmp_path / 'mlflow.db'}"
    runs = by_name(store)
    whole = runs.pop("fedavg on lagoon:nodes=150")
    assert whole["params"]["optimizer.lr"] == "0.01"
    assert whole["params"]["config.clients"] == "2"
    final = {m.key: m.value for m in whole["metrics"]}
    assert final["final/test_accuracy"] == result.metrics()["test_accuracy"]["mean"]
    assert runs.keys() == {"seed-0", "seed-1"}
    for seed in (0, 1):
        run = runs[f"seed-{seed}"]
        assert run["tags"].keys() == {"mlflow.parentRunId"}
        assert run["ended"]
        curve = [(m.step, m.value) for m in run["metrics"] if m.key == "deployed/val_accuracy"]
        values = expected(result, seed, "deployed", "accuracy", "val")
        assert curve == [(r + 1, pytest.approx(v)) for r, v in enumerate(values)]


def test_a_run_that_goes_on_is_in_mlflow_once(tmp_path: Path, fake_mlflow) -> None:
    with pytest.raises(Stopped):
        atoll.run("fedavg", out=tmp_path, log="mlflow", observer=StopAt(2), **SMALL)
    atoll.resume(tmp_path, log="mlflow")
    (store,) = fake_mlflow.stores.values()
    runs = by_name(store)
    assert runs.keys() == {"fedavg on lagoon:nodes=150", "seed-0"}
    steps = [m.step for m in runs["seed-0"]["metrics"] if m.key == "seconds"]
    assert steps == [1, 2, 3, 4]


def test_mlflow_goes_where_the_user_says(fake_mlflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    atoll.run("fedavg", log="mlflow", **SMALL)  # no folder is needed then
    assert fake_mlflow.stores.keys() == {"http://127.0.0.1:5000"}
    assert fake_mlflow.stores["http://127.0.0.1:5000"]["artifacts"] is None


@pytest.mark.filterwarnings("ignore")  # of packages that only MLflow needs
def test_the_real_mlflow_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed (extra: mlflow)")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    result = atoll.run("fedavg", out=tmp_path, log="mlflow", **SMALL)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("atoll").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    metrics = runs["fedavg on lagoon:nodes=150"].data.metrics
    assert metrics["final/test_accuracy"] == result.metrics()["test_accuracy"]["mean"]
    history = client.get_metric_history(runs["seed-0"].info.run_id, "deployed/val_accuracy")
    assert [m.step for m in history] == [1, 2, 3, 4]


def test_what_cannot_be_logged_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        atoll.run("fedavg", log="tensorbord", **SMALL)
    with pytest.raises(ConfigError, match="give out=FOLDER"):
        atoll.run("fedavg", log="tensorboard", **SMALL)
    with pytest.raises(ConfigError, match="give out=FOLDER"):
        atoll.compare(["fedavg"], log="tensorboard", **SMALL)
    for module, extra in (
        ("torch.utils.tensorboard", "tensorboard"),
        ("mlflow.tracking", "mlflow"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"pip install 'atoll-fgl\[{extra}\]'"):
            atoll.run("fedavg", out=tmp_path / "run", log=extra, **SMALL)
        with pytest.raises(ConfigError, match=rf"pip install 'atoll-fgl\[{extra}\]'"):
            atoll.compare(["fedavg"], out=tmp_path / "run", log=extra, **SMALL)
    assert not (tmp_path / "run").exists()
