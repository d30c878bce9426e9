"""A study in its own process, killed and interrupted: the same table, and no cell run twice."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from atoll.cli import main
from atoll.core.files import locked
from atoll.experiment.status import StatusReader

STUDY = [
    "compare", "local", "fedavg", "fedprox", "--data", "lagoon:nodes=150", "--clients", "3",
    "--rounds", "15", "--seeds", "2", "--grid", "mu=0.1,1", "--quiet", "--out",
]  # fmt: skip
CELLS = 4


def finish(arguments: list[str]) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "study"
    finish([*STUDY, str(folder)])
    return folder


def events(folder: Path) -> list[dict[str, str]]:
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def stop(
    arguments: list[str], folder: Path, number: int, begun: int, delay: float
) -> tuple[int, str]:
    """Start a study, wait until a number of cells have started, wait a little, send a signal.

    Ctrl-C is heard by all processes of a terminal; a kill is for one.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        limit = time.monotonic() + 60
        while sum(event["event"] == "begin" for event in events(folder)) < begun:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit
            time.sleep(0.005)
        time.sleep(delay)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        # Their output ends when no process is left that could write to it.
        _, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, said


def table(folder: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((folder / "compare.csv").read_text().splitlines()))
    return [{k: v for k, v in row.items() if k != "seconds_per_round"} for row in rows]


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_killed_and_interrupted(tmp_path: Path, uninterrupted: Path, jobs: str) -> None:
    seed = int(os.environ.get("ATOLL_TEST_SEED", random.randrange(10**6)))
    print(f"ATOLL_TEST_SEED={seed}")
    chance = random.Random(seed)
    folder = tmp_path / "study"
    begun = 1 + chance.randrange(2)
    first = [*STUDY, str(folder), "--jobs", jobs]
    code, _ = stop(first, folder, signal.SIGKILL, begun, 0.2 * chance.random())
    assert code == -signal.SIGKILL
    assert not (folder / "compare.csv").exists()
    begun = sum(event["event"] == "begin" for event in events(folder))
    again = ["compare", "--resume", str(folder), "--quiet"]
    code, said = stop([*again, "--jobs", jobs], folder, signal.SIGINT, begun + 1, 0.05)
    assert code == 130
    assert "stopping after this round" in said
    assert "Traceback" not in said
    assert "running" not in StatusReader(folder).read().cells
    done = len(list(folder.glob("cells/*/result.json")))
    assert said.splitlines()[-1] == (
        f"stopped; {done} of {CELLS} cells are finished, and the study is saved in {folder}; "
        f"continue with: atoll compare --resume {folder}"
    )
    finish([*STUDY, str(folder)])  # the same command continues, too
    assert table(folder) == table(uninterrupted)
    for cell in (folder / "cells").iterdir():
        own = [event["event"] for event in events(folder) if event["cell"] == cell.name]
        assert own.count("end") == 1
        assert own[-1] == "end"
        assert (cell / "metrics.csv").read_bytes() == (
            uninterrupted / "cells" / cell.name / "metrics.csv"
        ).read_bytes()
    before = (folder / "events.jsonl").read_bytes()
    finish(again)
    assert (folder / "events.jsonl").read_bytes() == before


def test_two_processes_do_not_share_a_study(tmp_path: Path) -> None:
    with locked(tmp_path, ""):
        result = CliRunner().invoke(main, [*STUDY, str(tmp_path)])
    assert result.exit_code == 2
    assert "another process is running the study" in result.output
