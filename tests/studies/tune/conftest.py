"""A finished tuning that several modules look at."""

from __future__ import annotations

import pytest

import atoll
from atoll.core.federation import Federation
from atoll.studies.tune.result import TuningResult

SMALL = {"rounds": 6, "epochs": 1, "set": {"hidden": 8}, "search": {"lr": "1e-3..0.3:log"}}


def federation() -> Federation:
    return atoll.partition(atoll.load("lagoon:nodes=150", clients=3), "column:owner")


def tune(**more: object) -> TuningResult:
    return atoll.tune("fedavg", "lagoon:nodes=150", **{"trials": 8, "seeds": 1, **SMALL, **more})


def outline(found: TuningResult, method: str = "fedavg") -> list[tuple[object, ...]]:
    return [(t.settings, t.state, t.value, t.curve) for t in found.methods[method].trials]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TuningResult:
    return tune(out=tmp_path_factory.mktemp("tune") / "t", clients=2)
