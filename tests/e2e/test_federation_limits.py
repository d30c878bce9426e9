"""A site whose owner allows less work than a run needs is excluded and stays connected."""

from __future__ import annotations

import json

import pytest

from tests.e2e.trial import SMALL, serial

pytestmark = pytest.mark.federation
EPOCHS = "50"  # a step of so many epochs takes longer than a millisecond on any machine


def test_a_site_over_its_limit_is_left_out_and_takes_part_in_the_next_run(trial):
    policy = trial.demo.folder / "policy-site-3.toml"
    good = policy.read_text()
    trial.wait(lambda: list(trial.connected().values()) == [True] * 3)
    parents = trial.pids("site-3", "parent")
    policy.write_text("seconds = 0.001\n")
    try:
        run, _ = trial.start("fedavg", "--rounds", "2", "--epochs", EPOCHS, *SMALL)
        found = trial.finish(run)
    finally:
        policy.write_text(good)
    assert "site-3 is excluded: over its limit: its policy allows" in found["said"]
    left = [e for e in trial.events() if e["event"] == "left out"]
    assert [(e["site"], e["round"], e["kind"]) for e in left] == [("site-3", 0, "bad")]
    log = trial.demo.kits["site-3"] / "atoll" / "audit.jsonl"
    noted = [json.loads(line) for line in log.read_text().splitlines()]
    assert any("over its limit" in event.get("reason", "") for event in noted)
    trial.wait(lambda: trial.pids("site-3", "job") == [])
    assert trial.pids("site-3", "parent") == parents
    assert trial.connected()["site-3"]
    run, _ = trial.start("fedavg", "--rounds", "2", *SMALL)
    assert trial.finish(run)["metrics"] == serial("fedavg", trial.federation, rounds=2)
