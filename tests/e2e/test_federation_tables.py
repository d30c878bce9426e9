"""A live federation of sites with tables of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.deploy.kits import read_settings, write_settings
from atoll.deploy.local import Demo
from tests.deploy.test_agreement import hospital
from tests.e2e.trial import SMALL, Trial, lagoon, processes

pytestmark = pytest.mark.federation


def test_two_hospitals_of_which_one_has_sex_x(tmp_path: Path) -> None:
    federation = lagoon(2)
    demo = Demo(federation, tmp_path / "fed")
    try:
        for number, site in enumerate(demo.sites):
            kit, tables = demo.kits[site], hospital(tmp_path / site, number)
            write_settings(kit, tables, policy=Path(read_settings(kit)["policy"]))
        for name in ("server", *demo.sites):
            demo.start(name)
        trial = Trial(demo, federation, tmp_path)
        found = trial.finish(trial.start("fedavg", "--rounds", "2", *SMALL)[0])
        assert found["rounds"] == 2
    finally:
        demo.processes.end()
    assert processes(tmp_path) == {}
    for site in demo.sites:  # the delivered model has the encoder of all
        (encoder,) = demo.kits[site].glob("atoll/runs/*/model/**/encoder.json")
        features = json.loads(encoder.read_text())["features"]
        assert [(f["name"], f["values"]) for f in features] == [
            ("age", []),
            ("sex", ["f", "m", "x"]),
        ]
        log = (demo.kits[site] / "atoll" / "audit.jsonl").read_text().splitlines()
        hello = next(e for e in map(json.loads, log) if e["event"] == "hello")
        assert hello["told"]["columns"] == ["age", "sex"]
