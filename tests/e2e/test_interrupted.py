"""A run in its own process, killed or interrupted at any moment, resumes to the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SEEDS, ROUNDS = 3, 20
OPTIONS = {"data": "lagoon:nodes=150", "clients": 3, "rounds": ROUNDS, "seeds": SEEDS}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without an interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run(command(folder), timeout=120, check=True)
    return folder


def command(folder: Path) -> list[str]:
    options = [text for name, value in OPTIONS.items() for text in (f"--{name}", str(value))]
    saving = ["--save-every", "0", "--out", str(folder), "--quiet"]
    return [sys.executable, "-m", "atoll", "run", "fedprox", *options, *saving]


class Started:
    """A run under way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            command(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for(self, name: str) -> None:
        limit = time.monotonic() + 60
        while not (self.folder / name).exists():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < limit
            time.sleep(0.002)

    def stop(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    run = Started(tmp_path / "run")
    yield run
    if run.process.poll() is None:
        run.process.kill()
        run.process.communicate()


def metrics(folder: Path) -> dict[str, object]:
    return json.loads((folder / "result.json").read_text())["metrics"]


def resume(folder: Path) -> None:
    again = [sys.executable, "-m", "atoll", "run", "--resume", str(folder), "--quiet"]
    subprocess.run(again, timeout=120, check=True)


def test_killed_at_a_random_moment(started: Started, uninterrupted: Path) -> None:
    seed = int(os.environ.get("ATOLL_TEST_SEED", random.randrange(10**6)))
    print(f"ATOLL_TEST_SEED={seed}")
    chance = random.Random(seed)
    started.wait_for(f"seed-{chance.randrange(SEEDS)}/checkpoint.atoll")
    time.sleep(chance.random() * 0.3)
    code, _ = started.stop(signal.SIGKILL)
    if code == 0:  # it was quicker
        assert metrics(started.folder) == metrics(uninterrupted)
        return
    assert code == -signal.SIGKILL
    before = sorted(started.folder.glob("seed-*/checkpoint.atoll"))
    resume(started.folder)
    assert metrics(started.folder) == metrics(uninterrupted)
    for name in ("config.toml", "metrics.csv", "ledger.csv"):
        assert (started.folder / name).read_bytes() == (uninterrupted / name).read_bytes()
    assert set(before) <= set(started.folder.glob("seed-*/checkpoint.atoll"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_by_the_user_or_the_system(
    number: int, started: Started, uninterrupted: Path
) -> None:
    started.wait_for("seed-1/checkpoint.atoll")
    code, said = started.stop(number)
    assert code == 128 + number
    assert "stopping after this round" in said
    last = said.splitlines()[-1]
    assert last.startswith("stopped after ")
    assert last.endswith(
        f"of seed 1; the run is saved in {started.folder}; continue with: "
        f"atoll run --resume {started.folder}"
    )
    assert not (started.folder / "result.json").exists()
    resume(started.folder)
    assert metrics(started.folder) == metrics(uninterrupted)
