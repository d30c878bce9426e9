"""`atoll federate predict` at a site."""

from __future__ import annotations

import pyarrow.csv
import pytest

from tests.deploy.test_delivery import made, trial

__all__ = ["made", "trial"]  # fixtures


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
def test_bad_input_gets_one_sentence(refusal, words, problem):
    assert problem in refusal("predict", *words)
