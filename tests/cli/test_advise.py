"""`atoll advise`: output, files and refusals."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.refusals import refusal

ADVISE = ("advise", "--data", "lagoon:nodes=200", "--clients", 2, "--rounds", 2, "--minutes", 0.2)
THREE = ("--candidates", "fedprox:mu=0.1,fedsage")


def test_advice_ends_with_a_command_that_runs(cli) -> None:
    result = cli(*ADVISE, *THREE, "--out", "a")
    lines = result.stdout.splitlines()
    assert any(line.startswith("lagoon:nodes=200: 2 clients of ") for line in lines)
    assert any(line.startswith("Recommended: ") for line in lines)
    assert any(line.split() == ["method", "accuracy", "state", "seeds", "s/seed"] for line in lines)
    command = next(line for line in lines if line.startswith("  atoll run "))
    cli(*shlex.split(command)[1:], "--quiet")
    found = json.loads(Path("a/advise.json").read_text())
    assert found["command"] == command.strip()
    assert {row["method"] for row in found["race"]} == {
        *("local", "fedavg", "fedprox:mu=0.1", "fedsage"),
    }
    assert [path.name for path in Path("a").iterdir()] == ["advise.json"]


def test_json_is_the_last_line_and_quiet_prints_nothing_else(cli) -> None:
    result = cli(*ADVISE, "--candidates", "local", "--metric", "macro_f1", "--json", "--quiet")
    found = json.loads(result.stdout)
    assert result.stderr == ""
    assert found["metric"] == "macro_f1"
    (test,) = found["gains"]
    assert (test["name"], test["against"]) == ("fedavg", "local")
    assert test["low"] <= test["difference"] <= test["high"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--minutes", "0"), "minutes is 0; give a number above 0"),
        (("--minutes", "nan"), "minutes is nan; give a number above 0"),
        (("--minutes", "1e-9"), "minutes are too few for 2 rounds of every candidate; give --min"),
        (("--candidates", "fedporx"), "did you mean 'fedprox'"),
        (("--candidates", "fedprox:muu=1"), "did you mean 'mu'"),
        (("--candidates", "reef,reef"), "method 'reef' is given twice"),
        (("--candidates", "trees"), "'trees' is a baseline; give a method"),
        (("--metric", "loss"), "loss is better when lower"),
        (("--metric", "auc"), "auc is computed for two classes"),
        (("--data", "nowhere"), "nowhere"),
        (("--clients", "0"), "clients is 0"),
        (("--out", "a-file"), "a-file"),
    ],
)
def test_bad_input_gets_one_sentence(cli, arguments, problem: str) -> None:
    Path("a-file").touch()
    assert problem in refusal(cli, *ADVISE, *arguments)
