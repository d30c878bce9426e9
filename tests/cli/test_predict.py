"""`atoll predict` on tables."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pyarrow.csv
import pytest
from click.testing import CliRunner

from atoll.cli import main
from tests.experiment.own_graphs import write_own


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    (folder / "old").mkdir()
    out = folder / "run"
    words = ["run", "fedavg", "--data", write_own(folder / "old"), "--rounds", "2", "--quiet"]
    assert CliRunner().invoke(main, [*words, "--out", str(out)]).exit_code == 0
    return out


def test_a_table_is_written_and_counted(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.csv"
    words = ["predict", str(run), "--data", str(run.parent / "old"), "--out", str(out)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "60 predicted: " in done.output
    table = pyarrow.csv.read_csv(out)
    assert table.column_names == ["id", "client", "class", "p_x", "p_y"]
    assert table["id"].to_pylist() == list(range(60))
    assert set(table["client"].to_pylist()) == {"a", "b"}


def test_new_nodes_are_joined(run: Path, tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("id,kind,owner\n60,1,a\n61,2,b\n")
    (tmp_path / "edges.csv").write_text("source,target\n60,3\n61,40\n")
    words = ["predict", str(run), "--data", str(tmp_path), "--out", str(tmp_path / "s.csv")]
    alone = CliRunner().invoke(main, words)
    assert alone.exit_code == 2
    assert "not a node of nodes.csv" in alone.output
    assert "--joined" in alone.output
    done = CliRunner().invoke(main, [*words, "--joined", "--quiet"])
    assert done.exit_code == 0, done.output
    assert done.output == ""
    assert pyarrow.csv.read_csv(tmp_path / "s.csv")["client"].to_pylist() == ["a", "b"]


def test_dropped_edges_are_counted_in_one_note(run: Path, tmp_path: Path) -> None:
    words = ["--own", "dangling=drop", "--rounds", "1", "--quiet", "--out", str(tmp_path / "run")]
    data = str(run.parent / "old")
    assert CliRunner().invoke(main, ["run", "fedavg", "--data", data, *words]).exit_code == 0
    (tmp_path / "nodes.csv").write_text("id,kind,owner\n60,1,a\n61,2,b\n")
    (tmp_path / "edges.csv").write_text("source,target\n60,3\n61,40\n60,99\n")
    words = ["predict", str(tmp_path / "run"), "--data", str(tmp_path)]
    words += ["--out", str(tmp_path / "s.csv")]
    for more, note in (
        ([], "3 edges to missing nodes were dropped; join the training graph with --joined if"),
        (["--joined"], "1 edges to missing nodes were dropped"),
    ):
        done = CliRunner().invoke(main, [*words, *more])
        assert done.exit_code == 0, done.output
        said = " ".join(done.output.split())
        assert note in said
        assert said.count("were dropped") == 1
        assert ("--joined" in said) == (not more)


def test_a_file_of_another_kind_is_refused_before_any_work(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["predict", "none", "--data", "x", "--out", "scores.xls"])
    assert done.exit_code == 2
    assert "ends with .parquet or .csv" in done.output


def test_alerts_are_written_and_counted(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.csv"
    words = ["predict", str(run), "--data", str(run.parent / "old"), "--out", str(out)]
    done = CliRunner().invoke(main, [*words, "--threshold", "0"])
    assert done.exit_code == 0, done.output
    assert "60 alerts (p_y at least 0)" in " ".join(done.output.split())
    table = pyarrow.csv.read_csv(out)
    assert table.column_names == ["id", "client", "class", "alert", "p_x", "p_y"]
    assert set(table["alert"].to_pylist()) == {"yes"}


NODES, EDGES = "id,label,kind,owner\n60,x,1,a\n61,y,2,b\n", "source,target\n60,61\n"
BAD: dict[str, tuple[dict[str, str], list[str], str]] = {
    "another schema": ({"schema.toml": "[nodes]\nlabel = 'kind'\n"}, [], "was trained with"),
    "fewer columns": ({"nodes.csv": "id,owner\n60,a\n61,b\n"}, [], "lacks 1 of the 2 columns"),
    "an id twice": ({"nodes.csv": NODES + "60,x,1,a\n"}, [], "gives the id '60' again"),
    "an unknown node": ({"edges.csv": "source,target\n60,99\n"}, [], "not a node of nodes.csv"),
    "an unseen class": ({"nodes.csv": NODES + "62,z,1,a\n"}, [], "a class that training never"),
    "a missing GPU": ({}, ["--device", "cuda"], "torch finds no GPU; use --device cpu"),
    "a threshold of 2": ({}, ["--threshold", "2"], "give a probability from 0 to 1"),
    "a threshold of text": ({}, ["--threshold", "high"], "'high' is not a valid float"),
    "no such seed": ({}, ["--seed", "4"], "has no seed 4; give one from 0 to 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_sentence(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    files, words, sentence = BAD[name]
    for file, content in ({"nodes.csv": NODES, "edges.csv": EDGES} | files).items():
        (tmp_path / file).write_text(content)
    given = ["predict", str(run), "--data", str(tmp_path), "--out", str(tmp_path / "s.csv")]
    done = CliRunner().invoke(main, [*given, *words])
    assert done.exit_code == 2, done.output
    said = " ".join(done.output.split())
    assert sentence in said
    assert "Traceback" not in said
    assert said.lower().count("error: ") == 1
    assert not (tmp_path / "s.csv").exists()


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ("model", "kept no model of seed 0"),
        ("model/seed-0/encoder.json", "copy the folder whole"),
        ("model/seed-0/deployed.safetensors", "copy the folder whole"),
        ("model/seed-0/model.toml", "copy the folder whole"),
        ("config.toml", "holds no run"),
    ],
)
def test_half_a_folder_gets_one_sentence(
    lost: str, sentence: str, run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "half")
    path = tmp_path / "half" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    words = ["predict", str(tmp_path / "half"), "--data", str(run.parent / "old")]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "s.csv")])
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.output.split())
    assert done.output.count("error: ") == 1


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


OWN = """
from dataclasses import dataclass
from atoll import Averaging

@dataclass(frozen=True)
class Mine(Averaging):
    pass
"""


def test_a_run_of_an_own_method_is_used_from_any_folder(cli, tmp_path, monkeypatch) -> None:
    (tmp_path / "predicted_elsewhere.py").write_text(OWN)
    data = ("--data", "lagoon:nodes=90")
    cli("run", "predicted_elsewhere.py:Mine", *data, "--rounds", 1, "--quiet", "--out", "a")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for words in (
        ("predict", "../a", *data, "--out", "p.csv", "--quiet"),
        ("export", "../a", "--out", "e"),
        ("explain", "../a", "--node", 1),
    ):
        monkeypatch.delitem(sys.modules, "predicted_elsewhere")  # as in a new process
        cli(*words)
