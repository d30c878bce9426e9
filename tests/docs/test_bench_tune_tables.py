"""Tuning of the papers' tables on validation scores, stage by stage, with continuation."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from bench import tune_tables
from bench.tune_tables import Tuning, searches, validation
from click.testing import CliRunner

from atoll.experiment.config import RunConfig, make_config
from atoll.studies.reproduce.recipes import SearchRecipe

STAGES = ({"mu": (0.1, 0.2), "lr": (0.01, 0.1)}, {"hidden": (4, 8)})


def config(*about: str, variants: Any, tuned: bool, clients: int, **more: Any) -> RunConfig:
    assert not tuned  # an earlier choice must not enter its own search
    settings = {"hidden": 4, **variants[0].run["set"]}
    return make_config(
        method="fedprox", data="lagoon:nodes=120", clients=3, rounds=2, set=settings, **more
    )


def tuning() -> Tuning:
    recipe = SimpleNamespace(search={"P": SearchRecipe(stages=STAGES)}, settings={"s": None})
    return Tuning(SimpleNamespace(name="paper", recipe=recipe, config=config), "P", "Lagoon", None)


def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    one = tuning()
    monkeypatch.setattr(tune_tables, "searches", lambda *given: iter([one]))
    to = ["--jobs", "1", "--out", str(tmp_path / "t"), "--to", str(tmp_path / "tuned.toml")]
    done = CliRunner().invoke(tune_tables.tune_tables, [*to, *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_search_goes_through_its_stages_and_is_resumed(tmp_path: Path, monkeypatch) -> None:
    assert "stage 1: 4 trials, 4 left" in call(tmp_path, monkeypatch, "--minutes", "0")
    assert not tomllib.loads((tmp_path / "tuned.toml").read_text())
    call(tmp_path, monkeypatch)
    text = (tmp_path / "tuned.toml").read_text()
    found = tomllib.loads(text)["paper"]["P"]["Lagoon"]
    assert text.startswith("# Chosen on validation scores")
    assert "bench tune-tables" in text
    assert found["trials"] == 5  # the second stage has one new point
    results = list((tmp_path / "t").glob("cells/*/result.json"))
    assert len(results) == 5
    best = max(results, key=lambda path: validation(json.loads(path.read_text())))
    tried = tomllib.loads(best.with_name("config.toml").read_text())
    assert found["set"] == {key: tried["set"][key] for key in ("mu", "lr", "hidden")}
    assert (tried["seed"], tried["seeds"]) == (1000, 2)  # no table scores these seeds
    assert "left" not in call(tmp_path, monkeypatch, "--minutes", "0")  # nothing is to be done


def test_a_search_continues_from_the_file_alone(tmp_path: Path, monkeypatch) -> None:
    call(tmp_path, monkeypatch)
    whole = tomllib.loads((tmp_path / "tuned.toml").read_text())["paper"]["P"]["Lagoon"]
    part = whole | {"stages": 1, "set": {key: whole["set"][key] for key in ("mu", "lr")}}
    (tmp_path / "tuned.toml").write_text(tomli_w.dumps({"paper": {"P": {"Lagoon": part}}}))
    shutil.rmtree(tmp_path / "t")
    assert "stage 1" not in call(tmp_path, monkeypatch)
    again = tomllib.loads((tmp_path / "tuned.toml").read_text())["paper"]["P"]["Lagoon"]
    assert (again["set"], again["stages"]) == (whole["set"], 2)


def test_the_choice_reads_nothing_but_validation_scores(tmp_path: Path) -> None:
    one = tuning()
    for number, (_, run) in enumerate(one.trials(0)):
        to = tmp_path / "cells" / run.name
        to.mkdir(parents=True)
        metrics = {"val_accuracy": {"mean": [0.2, 0.7, 0.7, 0.1][number]}}  # and no test score
        (to / "result.json").write_text(json.dumps({"seeds": 2, "metrics": metrics}))
    assert one.choose(tmp_path, 0) == 0
    assert one.settings == {"mu": 0.1, "lr": 0.1}  # the first of equals


def test_the_papers_searches_are_those_of_their_recipes(monkeypatch) -> None:
    monkeypatch.setattr("atoll.studies.reproduce.recipes.absent", lambda data, root: "")
    found = {(one.paper.name, one.name, one.dataset) for one in searches("fedath,fedtad", None)}
    assert {name for _, name, _ in found} == {"FedATH", "FGSSL", "FedTAD"}
    assert ("fedtad", "FedTAD", "CS") in found
    assert len(found) == 6 + 6 + 6
