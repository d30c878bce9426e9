"""Run folders that an earlier version wrote are read, explained, reported and continued."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import atoll
from atoll.analyses.explain import explain
from atoll.cli.app import main
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config, parse_config, resolve
from atoll.experiment.folder import open_run, read_run

OLD = Path(__file__).parent / "old"


def per_seed(metrics):
    return {name: numbers["per_seed"] for name, numbers in metrics.items()}


def test_a_private_run_is_read_with_its_privacy():
    result = atoll.read_result(OLD / "private-run")
    written = json.loads((OLD / "private-run" / "result.json").read_text())
    assert result.privacy == written["privacy"]
    assert result.privacy["epsilon_server"] > 0
    assert result.summary()["privacy"] == written["privacy"]
    assert result.bytes() == written["bytes"]


def test_a_finished_run_is_read_with_its_numbers():
    run = open_run(OLD / "finished-run")
    assert not run.notes  # the clients' sizes are found under their earlier name
    found, written = per_seed(run.result.metrics()), per_seed(run.summary["metrics"])
    assert found.keys() == written.keys()
    for name, values in written.items():
        assert found[name] == pytest.approx(values, rel=1e-5)


def test_a_finished_run_is_read_with_its_clients():
    run = read_run(OLD / "finished-run")
    written = json.loads((OLD / "finished-run" / "result.json").read_text())
    assert per_seed(run.result.metrics()) == per_seed(written["metrics"])
    assert len(run.federations[0]) == 2
    assert run.result.scored == "global"


def test_a_finished_run_is_explained():
    found = explain(OLD / "finished-run")
    assert len(found.clients) == 2
    assert all(((client.weight >= 0) & (client.weight <= 1)).all() for client in found.clients)


def test_a_finished_run_is_reported(tmp_path):
    out = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["report", str(OLD / "finished-run"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "fedath" in out.read_text()


def test_a_stopped_run_continues_to_the_numbers_of_a_whole_one(tmp_path):
    shutil.copytree(OLD / "stopped-run", tmp_path / "run")
    done = CliRunner().invoke(main, ["run", "--resume", str(tmp_path / "run"), "--json"])
    assert done.exit_code == 0, done.output
    whole = json.loads((OLD / "stopped-run-whole.json").read_text())
    assert per_seed(json.loads(done.stdout)["metrics"]) == per_seed(whole)


def test_absolute_rates_of_fedtad_keep_their_meaning():
    """Earlier versions saved `distil_lr` and `generator_lr`, which shares have replaced."""
    text = """
        method = "fedtad"
        [set]
        lr = 0.001
        distil_lr = 0.002
        generator_lr = 0.003
    """
    config = resolve(make_config(**parse_config(text, "a saved run")))[0]
    method = build_method(config)
    assert (method.distil_optimizer.lr, method.generator_optimizer.lr) == (0.002, 0.003)
