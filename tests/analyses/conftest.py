"""Runs of GCFL, Local and FedAvg on the same six clients, for the tests of clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.analyses.clusters import ClusterStudy, study_clusters

SPLITS = {"eps1": 1e9, "eps2": 0.0, "min_round": 2, "hidden": 8}
OPTIONS: dict[str, Any] = {
    "data": "lagoon:nodes=300",
    "clients": 6,
    "rounds": 6,
    "epochs": 1,
    "seeds": 2,
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    atoll.run("gcfl", out=folder / "gcfl", set=SPLITS, **OPTIONS)
    for name in ("local", "fedavg"):
        atoll.run(name, out=folder / name, set={"hidden": 8}, **OPTIONS)
    return folder


@pytest.fixture(scope="session")
def cluster_study(runs: Path) -> ClusterStudy:
    return study_clusters(runs / "gcfl", against=runs / "local", beside=[runs / "fedavg"])
