"""The search of one method with Optuna."""

from __future__ import annotations

from pathlib import Path

import pytest

import atoll
from atoll.core.space import OneOf, Real
from atoll.studies.tune.result import TuningResult
from atoll.studies.tune.search import Search
from tests.studies.tune.conftest import tune


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


def test_a_point_is_not_tried_twice() -> None:
    found = atoll.tune("fedavg", "lagoon:nodes=150", clients=2, trials=7, seeds=0, rounds=1,
                       set={"lr": 0.1, "weight_decay": 0, "dropout": 0},
                       search={"hidden": "4,5,6,8", "weight_by": "nodes,train"})  # fmt: skip
    tried = [tuple(t.settings.items()) for t in found.methods["fedavg"].trials]
    assert len(set(tried)) == len(tried) == 7


def test_importance_needs_some_trials(whole: TuningResult) -> None:
    assert whole.methods["fedavg"].importance == {}
    found = tune(clients=2, trials=10, seeds=0, pruner="none", rounds=3)
    shares = found.methods["fedavg"].importance
    assert shares.keys() == {"lr", "weight_decay", "dropout"}
    assert sum(shares.values()) == pytest.approx(1)
