"""The tables of a run folder: metrics of another version are read, too."""

from __future__ import annotations

import numpy as np

import atoll
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
