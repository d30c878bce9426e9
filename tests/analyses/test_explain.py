"""`atoll explain`: edge weights stay with the clients, and the numbers add up."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import atoll
from atoll.analyses.explain import explain, explanation_files, explanation_table
from atoll.core.errors import ConfigError
from atoll.present.files import write_all

SMALL = {"data": "lagoon:nodes=200", "clients": 3, "rounds": 2, "seeds": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "r"
    atoll.run("fedath", out=out, set={"hidden": 8}, **SMALL)
    return out


def test_every_edge_of_every_client_has_a_weight(folder, tmp_path):
    found = explain(folder)
    about = json.loads((folder / "result.json").read_text())["federation"]
    assert [c.weight.size for c in found.clients] == about["edges"]
    for client in found.clients:
        assert ((client.weight > 0) & (client.weight < 1)).all()
        assert client.norm > 0
    paths = write_all(tmp_path, explanation_files(found))
    with (tmp_path / "client-0" / "edges.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == about["edges"][0]
    ids = set(np.load(folder / "seed-0" / "partition.npz")["client_0"].tolist())
    assert {int(row["source"]) for row in rows} <= ids
    assert (tmp_path / "edges.png").stat().st_size > 10_000
    assert all(path.exists() for path in paths)
    assert len(explanation_table(found).rows) == 3


def test_the_ledger_shows_that_no_edge_weight_crossed(folder):
    found = explain(folder)
    assert found.bytes_up == found.bytes_shared


def test_parquet(folder, tmp_path):
    import pyarrow.parquet as pq

    write_all(tmp_path, explanation_files(explain(folder), "parquet"))
    table = pq.read_table(tmp_path / "client-1" / "edges.parquet")
    assert table.column_names == ["source", "target", "weight", "same_class"]


def test_a_method_without_edge_weights_is_refused(tmp_path):
    atoll.run("fedavg", out=tmp_path / "r", set={"hidden": 8}, **SMALL)
    with pytest.raises(ConfigError, match="does not weigh edges"):
        explain(tmp_path / "r")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        explain(tmp_path)
