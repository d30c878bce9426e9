"""Estimates of a run's memory and time, which nothing fails over."""

from __future__ import annotations

from pathlib import Path

from atoll.experiment.config import RunConfig, make_config
from atoll.studies.costs import PROCESS, cost_of, memory_of


def test_what_a_run_takes_is_known_roughly(tmp_path: Path) -> None:
    def of(data: str) -> int:
        return memory_of(RunConfig(data=data)) - PROCESS

    assert 0 < of("cora") < of("pubmed") < of("physics")
    assert of("physics") > 6e9
    assert of("lagoon:nodes=300") == of("no-such-set") == 0
    (tmp_path / "nodes.csv").write_bytes(bytes(1000))
    assert of(str(tmp_path)) == of(str(tmp_path / "nodes.csv")) == 6 * 1000


def test_the_time_of_a_run_that_cannot_run_is_nothing() -> None:
    good = make_config(method="fedavg", data="cora", rounds=100)
    assert cost_of(good) > 0
    assert cost_of(make_config(method="fedavg", data="cora", rounds=200)) == 2 * cost_of(good)
    assert cost_of(make_config(method="fedporx", data="cora")) == 0
