"""Commands of the parties: kits that cannot be made, opened or used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.csv
import pytest
from click.testing import CliRunner

from atoll.cli import main
from atoll.cli.federate import parties
from atoll.deploy.kits import read_settings, write_settings
from atoll.deploy.local import locked
from atoll.deploy.site_data import write_clients
from atoll.experiment.folder import RunFolder
from tests.deploy.conftest import two_classes
from tests.deploy.test_delivery import made, trial

__all__ = ["made", "trial"]  # fixtures


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["provision", "--site", "a b", "--out", "k"], "cannot name a site"),
        (["provision", "--site", "a", "--site", "a", "--out", "k"], "is named twice"),
        (["provision", "--site", "server", "--out", "k"], "cannot name a site"),
        (["provision", "--site", "h", "--host", "h", "--out", "k"], "cannot name a site"),
        (["provision", "--site", "a", "--host", "h" * 64, "--out", "k"], "has 64 letters"),
        (["provision", "--site", "a", "--out", "."], "is not empty"),
        (["server", "--kit", "."], "is not a kit"),
        (["site", "--kit", "site", "--data", "no"], "there is no"),
        (["server", "--kit", "site"], "needs the server's kit"),
        (["site", "--kit", "site", "--data", "no", "--device", "tpu"], "unknown device 'tpu'"),
        (["server", "--kit", ".", "--metrics", "0"], "0 is not in the range"),
    ],
)
def test_bad_input_gets_one_sentence(refusal, words: list[str], problem: str) -> None:
    assert problem in refusal(*words)


def test_a_data_set_is_divided_into_one_file_per_site(cli) -> None:
    data = ("--data", "lagoon:nodes=150", "--clients", 2)
    lines = cli("federate", "split", *data, "--out", "sites").stdout.splitlines()
    assert [Path(line).parent.name for line in lines] == ["sites", "sites"]
    assert all(Path(line).exists() for line in lines)
    assert all(Path(line).stat().st_mode & 0o077 == 0 for line in (*lines, "sites"))


def test_a_missing_gpu_is_reported_at_the_start(refusal, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = refusal("site", "--kit", "site", "--data", "no", "--device", "cuda")
    assert "torch finds no GPU; use --device cpu" in said


def test_a_refused_second_start_changes_nothing_of_the_site_that_runs(cli, trial, tmp_path):
    """Else the jobs of the running site would have another policy, or none."""
    kit, data = trial.kits / "site-1", trial.kits / "data" / "client-1.atoll"
    (policy := tmp_path / "policy.toml").write_text('methods = ["local"]\n')
    write_settings(kit, data, policy=policy)
    before = read_settings(kit)
    with locked(kit):
        said = cli("federate", "site", "--kit", kit, "--data", data, code=2).stderr
    assert "stop that one first" in said
    assert read_settings(kit) == before
    assert before["policy"] == str(policy)


def test_a_restart_without_a_policy_keeps_the_last_one(cli, trial, tmp_path, monkeypatch):
    """Else a site would lose its budget by a forgotten option."""
    monkeypatch.setattr(parties.session, "foreground", lambda *given: given[4]())
    kit, data = trial.kits / "site-1", trial.kits / "data" / "client-1.atoll"
    (policy := tmp_path / "policy.toml").write_text("noise = 1.0\nepsilon = 2.0\n")
    words = ("federate", "site", "--kit", kit, "--data", data)
    assert "as at the previous start" not in cli(*words, "--policy", policy).stderr
    assert f"policy {policy}, as at the previous start" in cli(*words).stderr.replace("\n", "")
    assert read_settings(kit)["policy"] == str(policy)
    policy.unlink()
    assert "does not exist" in cli(*words, code=2).stderr
    cli(*words, "--policy", "none")
    assert "policy" not in read_settings(kit)


def verify(*words):
    return CliRunner().invoke(main, ["federate", "verify", *map(str, words)])


def test_a_delivered_model_is_verified_and_a_changed_one_refused(trial):
    assert trial.run() == {}
    kit, model = trial.kits / "site-1", trial.model()
    done = verify(model, "--kit", kit)
    assert done.exit_code == 0
    round = RunFolder(trial.folder()).model().rounds[0] + 1
    said = f"signed by the server: run run for site-1 (seed 0: round {round})\n"
    assert done.output == said
    done = verify(model, "--kit", trial.kits / "site-2")
    assert done.exit_code == 0
    assert done.output == f"{said[:-1]}; this kit belongs to site-2\n"
    (model / "seed-0" / "model.toml").write_text("")
    done = verify(model, "--kit", kit)
    assert done.exit_code == 2
    assert "is missing, or was changed" in done.output
    assert "holds no delivered model" in verify(kit, "--kit", kit).output
    assert "needs a site's kit" in verify(model, "--kit", trial.kits / "server").output
    shutil.rmtree(kit / "startup")
    assert "is not the kit of a site" in verify(model, "--kit", kit).output


def test_a_dry_run_previews_the_bins_of_a_metric(cli, trial):
    kit, file = trial.kits / "site-1", write_clients(two_classes(), trial.kits / "two")[0]
    words = ("federate", "site", "--kit", kit, "--data", file, "--dry-run", "fedavg")
    assert "score.bins" not in cli(*words).stdout
    assert "score.bins" in cli(*words, "--metric", "average_precision").stdout


def test_a_site_writes_its_table(cli, trial, tmp_path):
    assert trial.run() == {}
    kit, out = trial.kits / "site-1", tmp_path / "scores.csv"
    data = trial.kits / "data" / "client-1.atoll"
    words = ("federate", "predict", trial.model(), "--kit", kit, "--data", data, "--out", out)
    assert "predicted: " in cli(*words).output
    table = pyarrow.csv.read_csv(out)
    assert table.num_rows == trial.sites["site-1"].data.graph.num_nodes
    assert set(table["client"].to_pylist()) == {"site-1"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["model", "--kit", "site", "--data", "x", "--out", "s.xls"], "ends with .parquet or .csv"),
        (["model", "--kit", "site", "--data", "x", "--out", "s.csv"], "holds no delivered model"),
        (["model", "--kit", ".", "--data", "x", "--out", "s.csv"], "is not a kit"),
    ],
)
def test_what_predict_cannot_use_gets_one_sentence(refusal, words, problem):
    assert problem in refusal("predict", *words)
