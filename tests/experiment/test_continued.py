"""A finished run with more rounds equals a run that had them from the start."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import atoll
from atoll.core.errors import AtollError
from atoll.core.tree import leaves
from atoll.experiment import continued
from atoll.experiment.continued import extend
from atoll.experiment.folder import RunFolder

DATA = "lagoon:nodes=300"
OPTIONS = {"clients": 3, "seeds": 2, "set": {"hidden": 8}, "fraction": 0.7}


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedgta"])
def test_more_rounds_are_those_of_a_longer_run(tmp_path, name):
    whole = atoll.run(name, DATA, rounds=5, out=tmp_path / "whole", **OPTIONS)
    atoll.run(name, DATA, rounds=2, out=tmp_path / "short", **OPTIONS)
    longer = atoll.resume(tmp_path / "short", rounds=5)
    for metric in ("accuracy", "loss"):
        np.testing.assert_array_equal(longer.curve(metric), whole.curve(metric))
    assert longer.metrics() == whole.metrics()
    assert RunFolder(tmp_path / "short").config.rounds == 5
    for seed in (0, 1):
        one, two = (RunFolder(tmp_path / n).model(seed) for n in ("short", "whole"))
        assert one.rounds.tolist() == two.rounds.tolist()
        pairs = zip(leaves(list(one.deployed)), leaves(list(two.deployed)), strict=True)
        assert all((a == b).all() for a, b in pairs)


def test_a_run_cannot_get_shorter(tmp_path):
    result = atoll.run("fedavg", DATA, rounds=3, out=tmp_path / "run", **OPTIONS)
    with pytest.raises(AtollError, match="has 3 rounds, so it cannot end after 2; give 3 or more"):
        atoll.resume(tmp_path / "run", rounds=2)
    assert atoll.resume(tmp_path / "run", rounds=3).metrics() == result.metrics()


def test_an_interrupted_extension_is_completed(tmp_path, monkeypatch):
    atoll.run("fedavg", DATA, rounds=2, out=tmp_path / "run", **OPTIONS)
    real, calls = continued.save_checkpoint, []

    def fails(path, tree):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(path, tree)

    monkeypatch.setattr(continued, "save_checkpoint", fails)
    with pytest.raises(KeyboardInterrupt):
        atoll.resume(tmp_path / "run", rounds=4)
    monkeypatch.undo()
    assert atoll.resume(tmp_path / "run", rounds=4).curve().shape == (2, 4)


def test_a_longer_run_is_not_finished_before_its_last_round(tmp_path):
    atoll.run("fedavg", DATA, rounds=2, out=tmp_path / "run", **OPTIONS)
    extend(tmp_path / "run", RunFolder(tmp_path / "run").config, 4, lambda config: "any")
    with pytest.raises(AtollError, match="is not finished"):
        _ = RunFolder(tmp_path / "run").summary


def test_a_finished_run_whose_data_are_gone_stays_finished(tmp_path):
    shutil.copytree(Path(__file__).parents[2] / "examples" / "three-banks", tmp_path / "banks")
    how = {"partition": "column:bank", "set": {"hidden": 8}, "out": tmp_path / "run"}
    atoll.run("fedavg", str(tmp_path / "banks"), rounds=2, **how)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    shutil.rmtree(tmp_path / "banks")
    with pytest.raises(AtollError, match="banks"):
        atoll.resume(tmp_path / "run", rounds=4)
    assert {path: path.read_bytes() for path in before} == before
