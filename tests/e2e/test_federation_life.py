"""The life of a federation: parties are upgraded, backed up and restored between rounds."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

import atoll
from atoll.deploy.local import Demo
from tests.e2e.test_federation import ROUNDS, SMALL, Trial, begun, lagoon, processes, serial

pytestmark = pytest.mark.federation

BEFORE = "2d52c7d"  # the last commit whose sites compared versions of the package


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The source of an older Atoll."""
    root = Path(__file__).parents[2]
    words = ["git", "-C", str(root), "archive", BEFORE, "src"]
    archive = subprocess.run(words, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the git history lacks commit {BEFORE}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=archive.stdout, check=True)
    return tmp_path / "src"


def test_one_party_is_upgraded_at_a_time(older, tmp_path):
    """A new server and a new site with an older site, which is upgraded in the middle of a run."""
    federation, folder = lagoon(), tmp_path / "trial"
    folder.mkdir()
    demo = Demo(federation, folder / "fed")
    try:
        for name in ("server", "site-1", "site-2"):
            demo.start(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(older))
            demo.start("site-3")
        trial = Trial(demo, federation, folder)
        run, _ = trial.start("fedavg", "--rounds", "3", *SMALL)
        assert trial.finish(run)["metrics"] == serial("fedavg", federation, rounds=3)
        run, _ = begun(trial)
        trial.kill("site-3", "parent", "job")
        time.sleep(2)
        demo.start("site-3")
        assert trial.finish(run)["metrics"] == serial("fedath", federation, rounds=ROUNDS)
        versions = [event["sites"] for event in trial.events() if event["event"] == "versions"]
        new = dict.fromkeys(demo.sites, atoll.__version__)
        assert versions[0] == {**new, "site-3": "older"}
        assert versions[-1] == new
    finally:
        demo.processes.end()
    assert processes(folder) == {}
