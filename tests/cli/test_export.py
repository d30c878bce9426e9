"""`atoll export` writes a folder, or says why not."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from atoll.cli import main


def test_a_run_becomes_a_folder(tmp_path: Path) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "model"
    words = ["run", "--data", "lagoon:nodes=200", "--clients", "2", "--rounds", "1", "--quiet"]
    runner = CliRunner()
    assert runner.invoke(main, [*words, "--out", run]).exit_code == 0
    done = runner.invoke(main, ["export", run, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.iterdir()} == {"model.py", "model.json", "weights.pt"}
    again = runner.invoke(main, ["export", run, "--out", str(out)])
    assert again.exit_code == 2
    assert "exists and is not empty; choose another --out" in again.output


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["export", str(tmp_path)])
    assert done.exit_code == 2
    assert "holds no run" in done.output
