"""The life of a federation: parties are upgraded, backed up and restored between rounds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import atoll
from atoll.deploy.kits import site_command
from atoll.deploy.local import Demo
from atoll.experiment.folder import RunFolder
from tests.e2e.trial import (
    ATOLL,
    ROUNDS,
    SMALL,
    Trial,
    begun,
    lagoon,
    processes,
    serial,
    with_odd_site,
)

pytestmark = pytest.mark.federation

CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t which, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(which, now);
    if (!failed && which == CLOCK_REALTIME) now->tv_sec += 10 * 86400;
    return failed;
}

time_t time(time_t *now) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now) *now = read.tv_sec;
    return read.tv_sec;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    now->tv_sec = read.tv_sec;
    now->tv_usec = read.tv_nsec / 1000;
    return 0;
}
"""
"""A clock ten days ahead, for a process that loads it; libfaketime stops locks of Python."""
SPLIT = """
import sys
from pathlib import Path
import atoll
from atoll.deploy.site_data import write_clients
write_clients(atoll.partition(atoll.load("lagoon", clients=3), "column:owner"), Path(sys.argv[1]))
"""
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


def delivered(demo: Demo) -> list[str]:
    """Return the sites with a model, once for each run, and verify every model."""
    found = []
    for site in demo.sites:
        for model in demo.kits[site].glob("atoll/runs/*/model"):
            words = [*ATOLL, "federate", "verify", str(model), "--kit", str(demo.kits[site])]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert f"for {site} (seed 0: round" in done.stdout, done.stderr
            assert RunFolder(demo.kits["server"] / "atoll" / "runs" / model.parent.name).model()
            found.append(site)
    return sorted(found)


def predicted(demo: Demo, site: str) -> None:
    """A site scores its own data with its delivered model by the command."""
    (model,) = demo.kits[site].glob("atoll/runs/*/model")
    data = demo.folder / "data" / f"client-{demo.sites.index(site) + 1}.atoll"
    words = ["federate", "predict", str(model), "--kit", str(demo.kits[site]), "--data", str(data)]
    out = demo.folder / "scores.csv"
    words = [*ATOLL, *words, "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "predicted: " in done.stdout, done.stderr
    assert out.read_text().count(f'"{site}"') > 1


def test_one_party_is_upgraded_at_a_time(older, tmp_path):
    """A new server and a new site with an older site, which is upgraded in the middle of a run."""
    federation, folder = lagoon(), tmp_path / "trial"
    folder.mkdir()

    def start_older(demo: Demo) -> None:
        kit, data = demo.kits["site-3"], str(demo.folder / "data")
        # It cannot read a file of a later version, as no version can.
        words = [sys.executable, "-c", SPLIT, data]
        subprocess.run(words, env={**os.environ, "PYTHONPATH": str(older)}, check=True)
        command = site_command(kit)
        (kit / "local" / "atoll__p_resources.json").unlink()  # an older Atoll writes no gate
        demo.processes.start("site-3", command, demo.folder / "logs" / "site-3.log", kit)

    with with_odd_site(federation, folder, "PYTHONPATH", str(older), start_older) as trial:
        demo = trial.demo
        run, first = trial.start("fedavg", "--rounds", "3", *SMALL)
        found = trial.finish(run)
        assert found["metrics"] == serial("fedavg", federation, rounds=3)
        assert "site-3 did not take the model: its Atoll is older" in found["said"]
        assert delivered(demo) == ["site-1", "site-2"]
        run, _ = begun(trial)
        trial.kill("site-3", "parent", "job")
        time.sleep(2)
        demo.start("site-3")
        assert trial.finish(run)["metrics"] == serial("fedath", federation, rounds=ROUNDS)
        versions = [event["sites"] for event in trial.events() if event["event"] == "versions"]
        new = dict.fromkeys(demo.sites, atoll.__version__)
        assert versions[0] == {**new, "site-3": "older"}
        assert versions[-1] == new
        # The upgraded site gets the model of the first run when that is resumed.
        run, _ = trial.start("--resume", str(first))
        assert "did not take the model" not in trial.finish(run)["said"]
        assert delivered(demo) == sorted(demo.sites * 2)


def events(kit: Path, logs: str = "atoll/runs/*/audit.jsonl") -> list[dict[str, str]]:
    (log,) = kit.glob(logs)
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_server_is_restored_from_a_copy_of_its_kit(tmp_path):
    """The server's machine is lost during a run, and a copy continues elsewhere."""
    federation, folder = lagoon(), tmp_path / "trial"
    folder.mkdir()
    with Demo(federation, folder / "fed") as demo:
        trial = Trial(demo, federation, folder)
        run, out = begun(trial)
        trial.kill("server", "parent", "job")
        run.communicate(timeout=60)
        copy, lost = folder / "elsewhere" / "server", demo.kits["server"]
        shutil.copytree(lost, copy)
        shutil.rmtree(lost)
        reached = sum(event["event"] == "round" for event in events(copy))
        demo.kits["server"] = copy
        demo.start("server")
        trial.wait(lambda: list(trial.connected().values()) == [True] * len(demo.sites))
        run, _ = trial.start("--resume", str(out))
        assert trial.finish(run)["metrics"] == serial("fedath", federation, rounds=ROUNDS)
        assert not lost.exists()
        # It continued; it did not begin again.
        assert sum(e["event"] == "round" for e in trial.events()) == ROUNDS > reached > 0
    assert processes(folder) == {}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for a wrong clock")
def test_a_site_whose_clock_is_ten_days_ahead_takes_part(tmp_path):
    """Neither rounds nor signs of life nor the delivery compare the clocks of two machines."""
    (tmp_path / "clock.c").write_text(CLOCK)
    words = ["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"]
    subprocess.run(words, cwd=tmp_path, check=True)
    federation, folder = lagoon(), tmp_path / "trial"
    folder.mkdir()
    clock = str(tmp_path / "clock.so")
    with with_odd_site(federation, folder, "LD_PRELOAD", clock) as trial:
        demo = trial.demo
        run, _ = trial.start("fedath", "--rounds", str(ROUNDS), *SMALL)
        found = trial.finish(run)
        assert found["metrics"] == serial("fedath", federation, rounds=ROUNDS)
        assert "site-3" not in found["said"]
        assert delivered(demo) == sorted(demo.sites)
        predicted(demo, "site-2")
        log = "atoll/audit.jsonl"
        first, third = (
            {event["time"][:10] for event in events(demo.kits[name], log)}
            for name in ("site-1", "site-3")
        )
        assert max(first) < min(third)
