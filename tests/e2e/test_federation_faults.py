"""A site that sends bad data over the real network is named and excluded, and the run continues."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atoll.core.tree import leaves
from atoll.engines.codec import load_checkpoint
from tests.deploy.test_coordinator import without
from tests.e2e.trial import SMALL, Trial, lagoon, serial, with_odd_site

pytestmark = pytest.mark.federation

FAULTY = Path(__file__).with_name("faulty")
ROUNDS = 3
REASONS = {
    "cut": "not an Atoll message",
    "nan": "holds a NaN or infinite number",
    "shape": "has shape",
    "oversized": "bytes was refused; the limit is",
    "text": "it is not an Atoll packet",
    "undecodable": "its answer cannot be read",
    "fatal": "asks to end the job",
}


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """A federation whose third site runs changed software."""
    folder, federation = tmp_path_factory.mktemp("faulty"), lagoon()
    paths = os.pathsep.join(filter(None, [str(FAULTY), os.environ.get("PYTHONPATH", "")]))
    with with_odd_site(federation, folder, "PYTHONPATH", paths) as trial:
        yield trial


def lie(trial: Trial, kind: str) -> None:
    (trial.demo.kits["site-3"] / "fault").write_text(kind)


# Three of them differ from others only in what the codec says, which has its own tests.
SLOW = ("cut", "shape", "text")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.long if k in SLOW else ()) for k in REASONS]
)
def test_a_site_that_sends_bad_data_is_left_out(kind, trial):
    lie(trial, kind)
    run, out = trial.start("fedavg", "--rounds", str(ROUNDS), *SMALL)
    found = trial.finish(run)
    said = [line for line in found["said"].splitlines() if line.startswith("site-3 is excluded: ")]
    assert len(said) == 1, found["said"]
    assert REASONS[kind] in said[0]
    left = [e for e in trial.events() if e["event"] == "left out"]
    assert [(e["site"], e["round"], e["kind"]) for e in left] == [("site-3", 1, "bad")]
    assert "new job" not in found["said"]
    # The others' numbers are those of a run in which it took no part from then on.
    expected = without(trial.federation, "fedavg", ROUNDS, {1: [2], 2: [2]}, {"hidden": 8})
    saved = load_checkpoint(out / "seed-0" / "checkpoint.atoll")
    for one, other in zip(leaves(saved["server"]), leaves(expected), strict=True):
        assert torch.equal(one, other)


def test_below_the_quorum_bad_data_stop_the_job_and_mended_ones_continue_it(trial):
    lie(trial, "nan")
    before = {path.name for path in trial.demo.kits["server"].glob("atoll/runs/*")}
    run, _ = trial.start("fedavg", "--rounds", str(ROUNDS), *SMALL, "--quorum", "3")
    trial.wait(lambda: before != {p.name for p in trial.demo.kits["server"].glob("atoll/runs/*")})
    trial.wait(lambda: any(e["event"] == "left out" for e in trial.events()))
    lie(trial, "")
    found = trial.finish(run)
    assert "2 of 3 sites answer, but the quorum is 3 (site-3: " in found["said"]
    assert "continuing in a new job" in found["said"]
    assert found["metrics"] == serial("fedavg", trial.federation, rounds=ROUNDS)
