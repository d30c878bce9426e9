"""Predictions become a table."""

from __future__ import annotations

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

from atoll.core.errors import AtollError
from atoll.experiment.predictions import Alert, Predictions

FOUND = Predictions(
    np.array(["a", "b", "c"]),
    np.array(["n", "n", ""]),
    np.log(np.array([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]], np.float32)),
    ("ok", "fraud"),
)


def tables(found, folder):
    csv = pyarrow.csv.read_csv(found.write(folder / "s.csv"))
    parquet = pyarrow.parquet.read_table(found.write(folder / "s.parquet"))
    assert csv.to_pydict().keys() == parquet.to_pydict().keys()
    assert csv["class"].to_pylist() == parquet["class"].to_pylist() == found.labels.tolist()
    return csv


def test_without_a_threshold_there_is_no_alert(tmp_path):
    table = tables(FOUND, tmp_path)
    assert table.column_names == ["id", "client", "class", "p_ok", "p_fraud"]
    assert table["class"].to_pylist() == ["ok", "ok", "fraud"]
    assert FOUND.alerts is None


def test_an_alert_is_yes_from_the_threshold_on(tmp_path):
    found = Predictions(FOUND.ids, FOUND.clients, FOUND.logits, FOUND.classes, (), Alert(1, 0.5))
    table = tables(found, tmp_path)
    assert table.column_names == ["id", "client", "class", "alert", "p_ok", "p_fraud"]
    assert table["alert"].to_pylist() == ["no", "yes", "yes"]
    assert pyarrow.parquet.read_table(tmp_path / "s.parquet")["alert"].to_pylist()[0] == "no"


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(AtollError, match=r"give a file that ends with \.parquet or \.csv"):
        FOUND.write(tmp_path / "s.txt")
