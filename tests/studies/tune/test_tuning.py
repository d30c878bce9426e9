"""Tuning: on validation scores alone, with one budget for all, the same again after any stop."""

from __future__ import annotations

import csv
import io
import json
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import atoll
from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.space import OneOf, Real
from atoll.experiment.baseline import without_test
from atoll.experiment.config import make_config
from atoll.experiment.observers import Observer
from atoll.experiment.run import Stopped
from atoll.present.tables import rich_table
from atoll.studies.study_run import StudyObserver, StudyRun
from atoll.studies.tune.plan import make_plan
from atoll.studies.tune.printed import final_table, trials_table, write_tuning
from atoll.studies.tune.result import TuningRequest, TuningResult
from atoll.studies.tune.runner import Blinded, Trials, WatchAhead
from atoll.studies.tune.search import Search
from atoll.studies.tune.tuning import read_request, run_tuning

SMALL = {"rounds": 6, "epochs": 1, "set": {"hidden": 8}, "search": {"lr": "1e-3..0.3:log"}}


def federation() -> Federation:
    return atoll.partition(atoll.load("lagoon:nodes=150", clients=3), "column:owner")


def tune(**more: object) -> TuningResult:
    return atoll.tune("fedavg", "lagoon:nodes=150", **{"trials": 8, "seeds": 1, **SMALL, **more})


def outline(found: TuningResult, method: str = "fedavg") -> list[tuple[object, ...]]:
    return [(t.settings, t.state, t.value, t.curve) for t in found.methods[method].trials]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TuningResult:
    return tune(out=tmp_path_factory.mktemp("tune") / "t", clients=2)


def test_permuted_test_labels_change_the_test_and_nothing_else(tmp_path: Path) -> None:
    honest = federation()

    def permuted(graph):
        places = graph.test.nonzero()[:, 0]
        y = graph.y.clone()
        y[places] = graph.y[places].roll(1)
        return replace(graph, y=y)

    other = replace(honest, graphs=tuple(map(permuted, honest.graphs)))
    quick = SMALL | {"rounds": 3}
    one, two = (atoll.tune("fedavg", data, trials=3, seeds=1, **quick) for data in (honest, other))
    assert outline(one) == outline(two)
    assert one.methods["fedavg"].config == two.methods["fedavg"].config
    tests = [found.methods["fedavg"].test["metrics"]["test_accuracy"] for found in (one, two)]
    assert tests[0] != tests[1]


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


def test_the_best_complete_trial_is_tested_once_with_fresh_seeds(whole: TuningResult) -> None:
    tuned = whole.methods["fedavg"]
    values = [t.value for t in tuned.trials if t.value is not None]
    assert tuned.best.value == max(values)
    assert tuned.trials[0].settings["lr"] == 0.01  # the method's own default comes first
    assert tuned.config.seed == 1
    assert tuned.test["seed"] == 1
    assert {k: tuned.config.set[k] for k in tuned.best.settings} == tuned.best.settings
    study = json.loads((whole.folder / "study.json").read_text())
    assert study["kind"] == "tune"
    names = [cell["name"] for cell in study["cells"]]
    assert names == [*(f"fedavg-{i:04d}" for i in range(8)), "test-fedavg"]
    assert not list(whole.folder.glob("cells/fedavg-*/seed-*"))  # models of trials are not kept


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


class Impatient(StudyObserver):
    """Stops after so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def run(self, run):
        outer = self

        class Counting(Observer):
            def round(self, seed, history):
                outer.left -= 1

            def should_stop(self):
                return outer.left <= 0

        return Counting()


def test_a_stopped_tuning_goes_on_as_if_nothing_had_been(
    whole: TuningResult, tmp_path: Path
) -> None:
    rounds = iter((2, 9, 8))
    for count in rounds:
        with pytest.raises(Stopped):
            tune(out=tmp_path, clients=2, observer=Impatient(count))
    again = tune(out=tmp_path, clients=2)
    assert outline(again) == outline(whole)
    assert again.methods["fedavg"].test["metrics"] == whole.methods["fedavg"].test["metrics"]


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


def test_more_trials_go_on_and_a_new_choice_is_tested_apart(
    whole: TuningResult, tmp_path: Path
) -> None:
    short = tune(out=tmp_path, clients=2, trials=1)
    assert short.methods["fedavg"].best.number == 0
    longer = tune(out=tmp_path, clients=2)
    assert outline(longer) == outline(whole)
    assert longer.methods["fedavg"].best.number > 0
    assert (tmp_path / "cells" / "test-fedavg").is_dir()
    assert (tmp_path / "cells" / "test-fedavg-2").is_dir()
    assert "earlier choice was tested as well" in longer.notes[0]
    with pytest.raises(ConfigError, match="1 are fewer"):
        tune(out=tmp_path, clients=2, trials=1)
    with pytest.raises(ConfigError, match=r"begun with other options \("):
        tune(out=tmp_path, clients=3)


def test_methods_share_one_budget(tmp_path: Path) -> None:
    found = atoll.tune(["local", "fedprox"], "lagoon:nodes=150", clients=2, trials=3, seeds=1,
                       out=tmp_path, **SMALL)  # fmt: skip
    assert [len(tuned.trials) for tuned in found.methods.values()] == [3, 3]
    assert "mu" in found.methods["fedprox"].best.settings
    assert {p.name for p in (tmp_path / "cells").glob("test-*")} == {"test-local", "test-fedprox"}


def test_a_published_grid_is_tried_point_by_point() -> None:
    found = atoll.tune("fedprox", "lagoon:nodes=150", clients=2, trials=10, seeds=0, preset="paper",
                       rounds=2, set={"hidden": 8})  # fmt: skip
    tuned = found.methods["fedprox"]
    assert [t.settings for t in tuned.trials] == [{"mu": mu} for mu in (0.001, 0.01, 0.1, 1.0)]
    assert tuned.whole
    assert "4 points, and each is tried once" in found.notes[0]


def test_a_point_is_not_tried_twice() -> None:
    found = atoll.tune("fedavg", "lagoon:nodes=150", clients=2, trials=7, seeds=0, rounds=1,
                       set={"lr": 0.1, "weight_decay": 0, "dropout": 0},
                       search={"hidden": "4,5,6,8", "weight_by": "nodes,train"})  # fmt: skip
    tried = [tuple(t.settings.items()) for t in found.methods["fedavg"].trials]
    assert len(set(tried)) == len(tried) == 7


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
    said = "no trial of local came to its end; the first said: weights are not finite"
    assert said in found.notes
    names = [cell["name"] for cell in json.loads((tmp_path / "t/study.json").read_text())["cells"]]
    assert "test-local" not in names
    write_tuning(found, tmp_path / "t")
    with pytest.raises(ConfigError, match=said):
        atoll.tune("local", "lagoon:nodes=150", **small)


def test_a_data_set_with_its_own_metric_is_tuned_by_it(tmp_path: Path) -> None:
    two = atoll.partition(atoll.load("lagoon:nodes=150,classes=2", clients=2), "column:owner")
    two = replace(two, metric="auc")
    for _ in range(2):  # run, then read again
        found = atoll.tune("fedavg", two, trials=2, seeds=0, out=tmp_path, **SMALL)
        assert found.methods["fedavg"].metric == "auc"
    saved = json.loads((tmp_path / "cells" / "fedavg-0000" / "result.json").read_text())
    value = saved["metrics"]["val_auc"]["mean"]
    assert found.methods["fedavg"].trials[0].value == value != saved["metrics"]["val_accuracy"]


def test_a_study_says_how_it_was_asked_for(whole: TuningResult) -> None:
    saved = json.loads((whole.folder / "study.json").read_text())
    assert saved["command"] == (
        "atoll tune fedavg --data lagoon:nodes=150 --clients 2 --rounds 6 --epochs 1 --set "
        "hidden=8 --trials 8 --seeds 1 --search lr=1e-3..0.3:log"
    )


def test_the_first_trial_is_called_the_defaults_only_where_it_is(whole: TuningResult) -> None:
    assert whole.methods["fedavg"].defaults
    console = Console(width=80, record=True, file=io.StringIO())
    elsewhere = {"rounds": 1, "set": {"hidden": 8}, "search": {"lr": "0.1..0.3"}}
    found = tune(clients=2, trials=2, **elsewhere)
    assert not found.methods["fedavg"].defaults
    console.print(rich_table(trials_table(found.methods["fedavg"])))
    console.print(rich_table(final_table(found)))
    assert "(its own defaults)" not in console.export_text(clear=False)
    assert re.search(r"^fedavg +2 +– ", console.export_text(), re.MULTILINE)


def test_importance_needs_some_trials(whole: TuningResult) -> None:
    assert whole.methods["fedavg"].importance == {}
    found = tune(clients=2, trials=10, seeds=0, pruner="none", rounds=3)
    shares = found.methods["fedavg"].importance
    assert shares.keys() == {"lr", "weight_decay", "dropout"}
    assert sum(shares.values()) == pytest.approx(1)


def test_what_meets_every_trial_ends_the_tuning_and_is_not_stored(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match="no-such-set"):
        atoll.tune("fedavg", "no-such-set", trials=3, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="500"):
        tune(out=tmp_path, clients=500, partition="metis")
    assert [path.name for path in tmp_path.glob("cells/*")] == ["fedavg-0000"]


def test_a_tuning_of_python_objects_goes_on_in_python(tmp_path: Path) -> None:
    atoll.tune("fedavg", federation(), trials=1, seeds=0, out=tmp_path, **SMALL)
    saved = json.loads((tmp_path / "study.json").read_text())["command"]
    assert saved.startswith("# started in Python with a data object")
    assert f"the same call of atoll.tune and out='{tmp_path}'" in saved
    with pytest.raises(ConfigError, match="started in Python with a data object"):
        run_tuning(read_request(tmp_path), tmp_path)


def test_what_cannot_be_tuned_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="trials is 0"):
        tune(trials=0)
    with pytest.raises(ConfigError, match="did you mean 'median'"):
        tune(pruner="medain")
    with pytest.raises(ConfigError, match="named twice"):
        atoll.tune(["fedavg", "fedavg"])
    with pytest.raises(ConfigError, match="picks by test scores"):
        tune(compat=["test-selection"])
    with pytest.raises(ConfigError, match="given by name"):
        atoll.tune([atoll.methods.FedAvg])
    bare = federation()
    bare = replace(bare, graphs=tuple(replace(g, val=g.val * 0) for g in bare.graphs))
    with pytest.raises(DataError, match="no client of 'lagoon' has validation data"):
        atoll.tune("fedavg", bare, trials=1, **SMALL)
    atoll.run("fedavg", "lagoon:nodes=150", rounds=1, clients=2, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="holds a run"):
        tune(out=tmp_path / "run")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'atoll-fgl\[tune\]'"):
        tune()


@pytest.mark.long
def test_the_number_of_jobs_changes_no_result(whole: TuningResult, tmp_path: Path) -> None:
    both = {"trials": 8, "seeds": 1, "clients": 2, **SMALL}
    one = atoll.tune(["fedavg", "local"], "lagoon:nodes=150", out=tmp_path / "one", **both)
    two = atoll.tune(["fedavg", "local"], "lagoon:nodes=150", out=tmp_path / "two", jobs=2, **both)
    assert outline(one) == outline(two) == outline(whole)
    assert outline(one, "local") == outline(two, "local")
    for name in ("fedavg", "local"):
        assert one.methods[name].test["metrics"] == two.methods[name].test["metrics"]
    events = (tmp_path / "two" / "events.jsonl").read_text().splitlines()
    ends = [e["cell"] for e in map(json.loads, events) if e["event"] in ("end", "pruned")]
    assert set(ends) == {cell.name for cell in (tmp_path / "two" / "cells").iterdir()}
    with pytest.raises(ConfigError, match="jobs is '0'"):
        tune(jobs=0)


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
    assert "internal error: ZeroDivisionError: five" in trials[1].problem
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
    watch = pickle.loads(pickle.dumps(WatchAhead(plan, blinded, search)))
    trial = watch(Observer())
    trial.extend([0.3] * 9)
    assert trial.pruned
    assert len(trial.curve) == 2  # the first round after the warm-up
    never = pickle.loads(pickle.dumps(WatchAhead(plan, blinded, None)))(Observer())
    never.extend([0.3] * 9)
    assert not never.pruned
    assert len(never.curve) == 9


def test_settings_that_depend_on_no_result_are_known_before(tmp_path: Path) -> None:
    space = {"lr": Real(1e-3, 0.3, log=True), "mu": OneOf((0.1, 1.0))}
    file, first = tmp_path / "optuna.db", [{"lr": 0.01, "mu": 0.1}]
    search = Search(file, "m", space, seed=3, rounds=4, pruner="median", first=first)
    known = search.known(12)
    assert len(known) == 10  # the blind draws; what comes after learns from them
    assert search.known(4) == known[:4]
    assert search.frozen == []
    for number in range(12):
        settings = search.ask()
        assert settings is not None
        if number < 10:
            assert settings == known[number]
        else:
            assert search.known(12) == [settings]
        search.ask()
        failed = number == 3
        value = None if failed else 0.1 * number
        search.tell("failed" if failed else "complete", [0.1 * number], value=value)
    assert search.known(12) == []
