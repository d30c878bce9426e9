"""The tables of a run folder: metrics of another version are read, too."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import atoll
from atoll.experiment import columns as tables
from atoll.experiment.columns import read_history, read_table


def test_a_metric_that_an_older_run_lacks_is_missing_and_the_others_are_read(tmp_path):
    folder = tmp_path / "run"
    result = atoll.run("fedavg", "lagoon:nodes=60", clients=2, rounds=2, out=folder)
    columns = read_table(folder, "metrics")
    older = {name: values for name, values in columns.items() if "macro_f1" not in name}
    history = read_history(older, 0, {})
    whole = read_history(columns, 0, {})
    assert np.isnan(history.array("deployed", "macro_f1", "test")).all()
    for metric in ("accuracy", "loss"):
        found = history.array("deployed", metric, "test")
        assert np.array_equal(found, whole.array("deployed", metric, "test"))
    assert result.metrics()["test_macro_f1"]["mean"] > 0


def test_long_tables_become_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    options = {"clients": 3, "rounds": 2, "seeds": 2}
    atoll.run("fedavg", "lagoon:nodes=150", out=tmp_path / "text", **options)
    monkeypatch.setattr(tables, "MAX_CSV_ROWS", 20)
    atoll.run("fedavg", "lagoon:nodes=150", out=tmp_path / "long", **options)
    for name in ("metrics", "ledger"):
        assert not (tmp_path / "long" / f"{name}.csv").exists()
        with (tmp_path / "text" / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        table = pq.read_table(tmp_path / "long" / f"{name}.parquet")
        assert table.column_names == list(rows[0])
        for column in table.column_names:
            values = table[column].to_pylist()
            for given, row in zip(values, rows, strict=True):
                if isinstance(given, float):
                    assert given == pytest.approx(float(row[column]), rel=1e-5)
                else:
                    assert ("" if given is None else str(given)) == row[column]
