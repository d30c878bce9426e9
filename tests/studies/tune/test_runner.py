"""Trials: without test nodes, pruned early, in other processes, and stored as they ended."""

from __future__ import annotations

import csv
import json
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch

import atoll
from atoll.core.errors import ConfigError
from atoll.experiment.baseline import without_test
from atoll.experiment.config import make_config
from atoll.experiment.observers import Observer
from atoll.studies.study_run import StudyRun
from atoll.studies.tune.result import TuningRequest, TuningResult, write_tuning
from atoll.studies.tune.runner import Blinded, Trials, watch_ahead
from atoll.studies.tune.search import Search, make_plan
from tests.studies.tune.conftest import SMALL, federation, outline, tune


def test_a_trial_has_no_test_nodes(whole: TuningResult) -> None:
    blind = without_test(federation())
    for graph, before in zip(blind.graphs, federation().graphs, strict=True):
        assert graph.test.sum() == 0
        assert graph.y[before.test > 0].sum() == 0
        assert torch.equal(graph.y[before.test == 0], before.y[before.test == 0])
    saved = json.loads((whole.folder / "cells" / "fedavg-0000" / "result.json").read_text())
    assert not [name for name in saved["metrics"] if "test" in name]
    with (whole.folder / "cells" / "fedavg-0000" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["test_accuracy"] for row in rows} == {""}
    assert "" not in {row["val_accuracy"] for row in rows}


def test_bad_trials_are_given_up_early(whole: TuningResult) -> None:
    trials = whole.methods["fedavg"].trials
    pruned = [t for t in trials if t.state == "pruned"]
    assert pruned
    assert all(len(t.curve) < 6 and t.value is None for t in pruned)
    assert all(t.state == "complete" for t in trials[:5])  # a median needs some to compare with
    calm = tune(out=None, clients=2, pruner="none", trials=7, seeds=0)
    assert {t.state for t in calm.methods["fedavg"].trials} == {"complete"}
    assert calm.methods["fedavg"].test is None
    assert calm.folder is None


def test_a_trial_that_ended_but_was_not_stored_is_not_run_again(
    whole: TuningResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell, count = Search.tell, iter(range(100))

    def killed(self, *given, **more):
        if next(count) == 6:
            raise MemoryError  # as good as a kill: nothing of the trial is stored
        return tell(self, *given, **more)

    monkeypatch.setattr(Search, "tell", killed)
    with pytest.raises(MemoryError):
        tune(out=tmp_path, clients=2)
    assert outline(tune(out=tmp_path, clients=2)) == outline(whole)


def test_a_trial_that_diverges_is_counted_and_not_chosen() -> None:
    # Plain SGD overflows with the larger rate.
    found = atoll.tune("fedavg", "lagoon:nodes=150", clients=2, trials=2, seeds=0, rounds=3,
                       set={"optimizer": "sgd", "hidden": 8, "dropout": 0, "weight_decay": 0.5},
                       search={"lr": "9e5,0.1"})  # fmt: skip
    first, second = found.methods["fedavg"].trials
    assert (first.state, second.state) == ("diverged", "complete")
    assert "train" in first.problem
    assert found.methods["fedavg"].best.number == 1


def test_a_method_that_never_ends_does_not_cost_the_others_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Trials, cell: StudyRun, heard: object) -> object:
        if cell.labels["method"] == "local":
            return "diverged", "weights are not finite"
        return honest(self, cell, heard)

    honest = Trials._try
    monkeypatch.setattr(Trials, "_try", refuse)
    small = {**SMALL, "rounds": 1, "clients": 2, "trials": 2, "seeds": 1}
    found = atoll.tune(["local", "fedavg"], "lagoon:nodes=150", out=tmp_path / "t", **small)
    assert list(found.methods) == ["fedavg"]
    assert found.methods["fedavg"].test is not None
    assert found.failed == ["local"]
    said = "no trial of local is complete; the first error is: weights are not finite"
    assert said in found.notes
    names = [cell["name"] for cell in json.loads((tmp_path / "t/study.json").read_text())["cells"]]
    assert "test-local" not in names
    write_tuning(found, tmp_path / "t")
    with pytest.raises(ConfigError, match=said):
        atoll.tune("local", "lagoon:nodes=150", **small)


FAILING = """
import os
import signal
from dataclasses import dataclass
from atoll.methods import FedAvg

@dataclass(frozen=True)
class Failing(FedAvg):
    def round(self, server, clients):
        if self.optimizer.lr == 5:
            raise ZeroDivisionError("five")
        if self.optimizer.lr == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().round(server, clients)
"""


def test_a_trial_that_failed_in_another_process_is_stored_and_not_run_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    method = f"{tmp_path / 'failing.py'}:Failing"

    def search(rates: str, **more: object) -> TuningResult:
        # Plain SGD overflows with the largest rate, after a round.
        sgd = {"optimizer": "sgd", "hidden": 8, "dropout": 0, "weight_decay": 0.5}
        return atoll.tune(method, "lagoon:nodes=150", clients=2, trials=4, seeds=0, rounds=3,
                          set=sgd, search={"lr": rates}, **more)  # fmt: skip

    one = search("0.1,5.0,9e2", out=tmp_path / "one")
    two = search("0.1,5.0,9e2", out=tmp_path / "two", jobs=2)
    assert outline(one, method) == outline(two, method)
    trials = two.methods[method].trials
    assert [trial.state for trial in trials] == ["complete", "failed", "diverged"]
    assert len(trials[2].curve) > 0
    assert re.match(r"ZeroDivisionError in .*\.py line \d+: five; see", trials[1].problem)
    killed = search("0.1,6.0", out=tmp_path / "killed", jobs=2).methods[method].trials
    assert [trial.state for trial in killed] == ["complete", "failed"]
    assert "its process was killed" in killed[1].problem
    assert "another process cannot have" not in caplog.text
    for folder in ("two", "killed"):
        lines = (tmp_path / folder / "events.jsonl").read_text().splitlines()
        failed = [e["cell"] for e in map(json.loads, lines) if e["event"] == "failed"]
        begun = [e["cell"] for e in map(json.loads, lines) if e["event"] == "begin"]
        assert failed
        assert all(begun.count(name) == failed.count(name) == 1 for name in failed)


def test_another_process_can_prune_the_next_trial(tmp_path: Path) -> None:
    request = TuningRequest(methods=("fedavg",), config=make_config(data="lagoon:nodes=150"))
    plan, blinded = make_plan("fedavg", request, None), Blinded()
    search = Search(tmp_path / "o.db", "m", plan.space, seed=0, rounds=9, pruner="median")
    for level in (0.9, 0.8, 0.7, 0.6, 0.5):
        search.ask()
        search.tell("complete", [level] * 9, level)
    watch = pickle.loads(pickle.dumps(partial(watch_ahead, plan, blinded, search)))
    trial = watch(Observer())
    trial.extend([0.3] * 9)
    assert trial.pruned
    assert len(trial.curve) == 2  # the first round after the warm-up
    never = pickle.loads(pickle.dumps(partial(watch_ahead, plan, blinded, None)))(Observer())
    never.extend([0.3] * 9)
    assert not never.pruned
    assert len(never.curve) == 9
