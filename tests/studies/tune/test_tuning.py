"""Tuning: only validation scores, one budget for all, and the same result after any stop."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import atoll
from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.experiment.observers import Observer
from atoll.experiment.run import Stopped
from atoll.studies.study_run import StudyObserver
from atoll.studies.tune.result import TuningResult
from atoll.studies.tune.tuning import read_request, run_tuning
from tests.studies.tune.conftest import SMALL, federation, outline, tune


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


class Impatient(StudyObserver):
    """Stops after a number of rounds."""

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
    with pytest.raises(ConfigError, match=r"started with other options \("):
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
    assert "4 points, so each is tried once" in found.notes[0]


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
    with pytest.raises(ConfigError, match="selects by test scores"):
        tune(compat=["test-selection"])
    with pytest.raises(ConfigError, match="one method by name"):
        atoll.tune([atoll.methods.FedAvg])
    bare = federation()
    bare = replace(bare, graphs=tuple(replace(g, val=g.val * 0) for g in bare.graphs))
    with pytest.raises(DataError, match="no client of 'lagoon' has validation data"):
        atoll.tune("fedavg", bare, trials=1, **SMALL)
    atoll.run("fedavg", "lagoon:nodes=150", rounds=1, clients=2, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="contains a run"):
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


@pytest.mark.parametrize("name", ["mine=my.py:Mine", "strong=fedprox", "fedprox:mu=0.1"])
def test_a_label_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"no labels and settings as in '{name}'; give only the name"
    ):
        atoll.tune(["fedavg", name], "lagoon:nodes=150", out=tmp_path / "t")


def test_a_folder_may_have_an_equals_sign(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    (folder / "tuned_in_odd_folder.py").write_text("class No: ...")
    with pytest.raises(ConfigError, match="has no method 'Mine'"):
        atoll.tune(f"{folder}/tuned_in_odd_folder.py:Mine", "lagoon:nodes=150")
