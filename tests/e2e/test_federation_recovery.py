"""Kills, stops and late answers in a live federation: the numbers stay those of a serial run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Any

import pytest

from tests.e2e.trial import ATOLL, CLIENTS, ROUNDS, begun, lagoon, serial


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The result of an undisturbed run."""
    return serial("fedath", lagoon(), rounds=ROUNDS)


@pytest.mark.federation
def test_a_killed_site_that_comes_back_changes_nothing(trial, expected):
    run, _ = begun(trial)
    trial.kill("site-3", "parent", "job")
    time.sleep(2)
    trial.demo.start("site-3")
    found = trial.finish(run)
    assert "site-3 is back" in found["said"]
    assert found["metrics"] == expected


@pytest.mark.federation
def test_a_killed_site_that_stays_away_is_left_out(trial):
    run, out = begun(trial, "--deadline", "5")
    trial.kill("site-3", "parent", "job")
    found = trial.finish(run)
    assert "site-3 is excluded" in found["said"]
    left = [e for e in trial.events() if e["event"] == "left out"]
    assert [e["site"] for e in left] == ["site-3"]
    scored = (out / "metrics.csv").read_text().splitlines()
    assert scored[-1].startswith(f"0,{ROUNDS - 1},2,")
    trial.demo.start("site-3")
    trial.wait(lambda: trial.connected().get("site-3"))


@pytest.mark.federation
@pytest.mark.parametrize("party", ["site-2", "server"])
def test_a_killed_job_process_is_started_again_and_changes_nothing(party, trial, expected):
    run, _ = begun(trial)
    trial.kill(party, "job")
    assert trial.finish(run)["metrics"] == expected


@pytest.mark.federation
def test_a_killed_server_loses_nothing(trial, expected):
    run, out = begun(trial)
    trial.kill("server", "parent", "job")
    _, said = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "the server does not answer" in said
    trial.demo.start("server")
    trial.wait(lambda: list(trial.connected().values()) == [True] * CLIENTS)
    run, _ = trial.start("--resume", str(out))
    assert trial.finish(run)["metrics"] == expected


@pytest.mark.federation
@pytest.mark.parametrize("resumes", [1, 2])
def test_a_run_whose_administrator_was_killed_keeps_its_one_job(resumes, trial, expected):
    before = trial.jobs()
    run, out = begun(trial)
    run.kill()
    run.communicate()
    followed = [trial.start("--resume", str(out))[0] for _ in range(resumes)]
    for again in followed:
        found = trial.finish(again)
        assert found["metrics"] == expected
        assert "new job" not in found["said"]
    assert len(trial.jobs()) == len(before) + 1
    rounds = [e["round"] for e in trial.events() if e["event"] == "step" and e["step"] == "train"]
    assert rounds == list(range(ROUNDS))  # none was played twice


@pytest.mark.federation
def test_a_stopped_run_stays_stopped_and_two_resumes_share_one_job(trial, expected):
    run, out = begun(trial)
    words = [*ATOLL, "federate", "stop", "--kit", str(trial.demo.kits["admin"])]
    (job,) = trial.pids("site-1", "job")
    os.kill(job, signal.SIGSTOP)  # so that the run cannot finish first
    try:
        stopped = subprocess.run(words, capture_output=True, text=True, timeout=90, check=True)
        assert stopped.stdout.startswith("stopped atoll-")
        _, said = run.communicate(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):  # FLARE has ended it
            os.kill(job, signal.SIGCONT)
    assert run.returncode == 2
    assert f"the run is saved; continue with: atoll federate run --resume {out}" in said
    jobs = trial.jobs()
    both = [trial.start("--resume", str(out))[0] for _ in range(2)]
    assert [trial.finish(one)["metrics"] for one in both] == [expected] * 2
    assert len(trial.jobs()) == len(jobs) + 1
    (out / "result.json").unlink()
    again, _ = trial.start("--resume", str(out))
    assert trial.finish(again)["metrics"] == expected
    assert len(trial.jobs()) == len(jobs) + 1


@pytest.mark.federation
def test_a_site_slower_than_the_deadline_is_left_out_until_it_is_back(trial):
    run, _ = begun(trial, "--deadline", "3")
    (job,) = trial.pids("site-1", "job")
    os.kill(job, signal.SIGSTOP)
    try:
        trial.wait(lambda: any(e["event"] == "left out" for e in trial.events()))
    finally:
        os.kill(job, signal.SIGCONT)
    trial.wait(lambda: any(e["event"] == "back" for e in trial.events()))
    found = trial.finish(run)
    assert "site-1 is excluded: no answer to" in found["said"]
