"""`atoll predict` on tables."""

from __future__ import annotations

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


def test_a_file_of_another_kind_is_refused_before_any_work(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["predict", "none", "--data", "x", "--out", "scores.xls"])
    assert done.exit_code == 2
    assert "ends with .parquet or .csv" in done.output
