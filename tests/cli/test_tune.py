"""`atoll tune` and `atoll watch`: output, files and refusals."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest

from atoll.experiment.config import make_config, read_config

TUNE = (
    "tune", "fedavg", "fedprox", "--data", "lagoon:nodes=150", "--clients", 2, "--rounds", 3,
    "--epochs", 1, "--set", "hidden=8", "--search", "lr=1e-3..0.3:log", "--trials", 3, "--seeds", 2,
)  # fmt: skip


def test_tuning_ends_with_a_test_and_a_command_that_repeats_it(cli) -> None:
    result = cli(*TUNE, "--out", "t")
    lines = result.stdout.splitlines()
    assert any(line.startswith("fedavg on lagoon:nodes=150: 3 trials") for line in lines)
    assert "(default settings)" in " ".join(result.stdout.split())
    commands = [line for line in lines if line.startswith("  atoll run ")]
    assert len(commands) == 2
    shown = [line for line in lines if line not in commands and not line.startswith("Written")]
    assert max(map(len, shown)) <= 80
    test = json.loads(Path("t/cells/test-fedprox/result.json").read_text())
    again = cli(*shlex.split(commands[1])[1:], "--json", "--quiet")
    assert json.loads(again.stdout)["metrics"] == test["metrics"]
    config = make_config(**read_config(Path("t/best-fedprox.toml")))
    assert (config.method, config.seed, config.seeds) == ("fedprox", 1, 2)
    with Path("t/trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["trial"]) for row in rows] == [
        (method, str(number)) for method in ("fedavg", "fedprox") for number in range(3)
    ]
    assert Path("t/history.png").stat().st_size > 5000
    seen = json.loads(cli("watch", "t", "--json").stdout)
    assert seen["finished"]
    assert seen["cells"]["finished"] >= 4
    assert "Best, by validation" in cli("watch", "t", "--once").stdout
    assert "finished" in cli("watch", "t").stdout  # ends by itself
    more = cli("tune", "--resume", "t", "--trials", 4, "--json", "--quiet")
    found = json.loads(more.stdout)
    assert found["methods"]["fedavg"]["trials"] == 4
    assert found["methods"]["fedprox"]["test"]["mean"] > 0
    cli(*TUNE, "--out", "t", "--trials", 4, "--quiet")  # the same command continues as well


def test_a_name_with_a_preset_is_tuned_beside_its_method(cli) -> None:
    small = ("--data", "lagoon:nodes=150", "--clients", 2, "--rounds", 1, "--trials", 1)
    cli("tune", "GCFL+", "gcfl", *small, "--seeds", 1, "--out", "t", "--quiet")
    found = json.loads(Path("t/tune.json").read_text())["methods"]
    assert list(found) == ["gcfl+", "gcfl"]
    presets = [
        read_config(Path(f"t/cells/test-{n}/config.toml"))["set"].get("preset") for n in found
    ]
    assert presets == ["plus", None]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("fedporx",), "did you mean 'fedprox'"),
        (("fedavg", "--search", "droput=0..0.5"), "did you mean 'dropout'"),
        (("fedavg", "--search", "lr"), "--search takes key=value"),
        (("fedavg", "--search", "lr=fast"), "lr cannot be 'fast'"),
        (("fedavg", "--preset", "paper"), "fedavg has no published grid"),
        (("fedavg", "--trials", "0"), "trials is 0"),
        (("fedavg", "--pruner", "hyper"), "unknown pruner 'hyper'"),
        (("--resume", "nowhere"), "contains no tuning to resume"),
        (("fedavg", "--resume", "nowhere"), "remove all options except --trials"),
    ],
)
def test_bad_input_gets_one_sentence_and_no_folder(cli, arguments, problem: str) -> None:
    result = cli("tune", *arguments, code=2)
    assert problem in " ".join(result.stderr.split())
    assert len(result.stderr.splitlines()) == 1
    assert not Path("atoll-runs").exists()


def test_a_budget_of_nothing_is_refused_when_a_tuning_goes_on(cli) -> None:
    small = ("--data", "lagoon:nodes=150", "--clients", 2, "--rounds", 1, "--seeds", 0)
    cli("tune", "fedavg", *small, "--trials", 1, "--out", "t", "--quiet")
    before = Path("t/study.json").read_text()
    said = cli("tune", "--resume", "t", "--trials", 0, code=2).stderr
    assert said == "error: trials is 0; give at least 1\n"
    assert Path("t/study.json").read_text() == before


def test_another_kind_of_study_is_not_a_tuning(cli) -> None:
    Path("s").mkdir()
    Path("s/study.json").write_text('{"kind": "compare", "cells": []}')
    assert "not a tuning, but a 'compare'" in cli("tune", "--resume", "s", code=2).stderr


def test_watching_nothing_is_refused(cli) -> None:
    assert "neither a run nor a study" in cli("watch", ".", code=2).stderr


def test_a_run_can_be_logged_elsewhere(cli) -> None:
    cli("run", "--data", "lagoon:nodes=150", "--rounds", 1, "--log", "tensorboard", "--out", "r")
    assert list(Path("r/tensorboard/seed-0").glob("events.out.*"))
    assert "did you mean 'mlflow'" in cli("run", "--log", "mlfow", code=2).stderr
