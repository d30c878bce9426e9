"""A live federation on loopback, with its administrator's commands, for the e2e tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.deploy.coordinator import Order
from atoll.deploy.local import Demo
from atoll.deploy.supervise import write_job
from atoll.experiment.config import config_text, make_config

ATOLL = [sys.executable, "-m", "atoll"]
CLIENTS, ROUNDS = 3, 25
SMALL = ("--set", "hidden=8")


def lagoon(clients: int = CLIENTS) -> Any:
    return atoll.partition(atoll.load("lagoon", clients=clients), "column:owner")


def serial(method: str, federation: Any, **options: Any) -> dict[str, Any]:
    chosen = {"hidden": 8, **options.pop("set", {})}
    return atoll.run(method, federation, engine="serial", set=chosen, **options).metrics()


def processes(folder: Path) -> dict[int, list[str]]:
    """Every process that works in a folder, with its command."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(str(folder) in word for word in words) and "nvflare" in " ".join(words):
            found[int(entry.name)] = words
    return found


class Trial:
    """A federation that runs, and the administrator's commands on it."""

    def __init__(self, demo: Demo, federation: Any, folder: Path) -> None:
        self.demo, self.federation, self.folder = demo, federation, folder
        self.count = 0

    def start(self, *words: str) -> tuple[subprocess.Popen[str], Path]:
        """`atoll federate run ...` in the background, and where its result will be."""
        self.count += 1
        out = self.folder / f"out-{self.count}"
        place = [] if "--resume" in words else ["--out", str(out)]
        command = [*ATOLL, "federate", "run", *words, "--kit", str(self.demo.kits["admin"]),
                   *place, "--json"]  # fmt: skip
        run = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return run, out

    def finish(self, run: subprocess.Popen[str], timeout: float = 150) -> dict[str, Any]:
        out, err = run.communicate(timeout=timeout)
        assert run.returncode == 0, err
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        found["said"] = err
        return found

    def pids(self, name: str, kind: str) -> list[int]:
        """The processes of a party: its "parent", or that of its running "job"."""
        job = {pid for pid, words in processes(self.demo.kits[name]).items()
               if any("runner_process" in w or "worker_process" in w for w in words)}  # fmt: skip
        return sorted(job if kind == "job" else set(processes(self.demo.kits[name])) - job)

    def kill(self, name: str, *kinds: str) -> None:
        for kind in kinds:
            for pid in self.pids(name, kind):
                os.kill(pid, signal.SIGKILL)

    def events(self) -> list[dict[str, Any]]:
        """The audit log of the newest run, on the server."""
        # A run's name begins with its time; its folder is there before its log.
        runs = sorted(self.demo.kits["server"].glob("atoll/runs/2*"))
        log = runs[-1] / "audit.jsonl" if runs else None
        lines = log.read_text().splitlines() if log is not None and log.exists() else []
        return [json.loads(line) for line in lines]

    def wait(self, what: Callable[[], Any], timeout: float = 90) -> None:
        end = time.monotonic() + timeout
        while not what():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.1)

    def wait_round(self, number: int, before: int = 0) -> None:
        self.wait(lambda: any(e.get("round", -1) >= number for e in self.events()[before:]))

    def status(self) -> dict[str, Any]:
        """Return the output of `atoll federate status`, or nothing if it fails."""
        words = [*ATOLL, "federate", "status", "--kit", str(self.demo.kits["admin"]), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}

    def connected(self) -> dict[str, bool]:
        sites: dict[str, bool] = self.status().get("sites", {})
        return sites

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that the server ever had."""
        jobs: list[dict[str, Any]] = self.status()["jobs"]
        return jobs


def begun(trial: Trial, *words: str, round: int = 4) -> tuple[subprocess.Popen[str], Path]:
    """A run that has reached a round."""
    before = {path.name for path in trial.demo.kits["server"].glob("atoll/runs/*")}
    run, out = trial.start("fedath", "--rounds", str(ROUNDS), *SMALL, *words)
    trial.wait(lambda: before != {p.name for p in trial.demo.kits["server"].glob("atoll/runs/*")})
    trial.wait_round(round)
    return run, out


SUBMIT = """
import sys, time
from pathlib import Path
from atoll.core.errors import ClientLost
from atoll.engines.flare import AdminSession
kit, user, job = sys.argv[1:]
desk = AdminSession(Path(kit), user)
try:
    number = desk.submit(Path(job), Path(job).name)
    while not desk.status(number).startswith("FINISHED"):
        time.sleep(0.5)
    print(desk.status(number))
except ClientLost as error:
    print("REFUSED", error)
finally:
    desk.close()
"""


def submit_evil(trial: Trial, kind: str, witness: Path) -> str:
    """Submit a job with another class or with code that writes a file, and return its end."""
    demo = trial.demo
    order = Order(
        run=f"evil-{kind}", config=config_text(make_config(rounds=1)), sites=demo.sites, quorum=1
    )
    job = write_job(order, demo.sites, trial.folder)
    path = "nvflare.app_common.np.np_trainer.NPTrainer"
    if kind == "code":
        (job / "site" / "custom").mkdir()
        (job / "site" / "custom" / "evil.py").write_text(
            "from atoll.deploy.jobs import Participant\n"
            f"open({str(witness)!r}, 'w').close()\nclass Evil(Participant): pass\n"
        )
        path = "evil.Evil"
    file = job / "site" / "config" / "config_fed_client.json"
    content = json.loads(file.read_text())
    content["executors"][0]["executor"]["path"] = path
    file.write_text(json.dumps(content))
    words = [sys.executable, "-c", SUBMIT, str(demo.kits["admin"]), demo.admin, str(job)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    return (done.stdout.splitlines() or [done.stderr])[-1]


def start_third(demo: Demo) -> None:
    demo.start("site-3")


@contextlib.contextmanager
def with_odd_site(
    federation: Any,
    folder: Path,
    variable: str,
    value: str,
    start: Callable[[Demo], None] = start_third,
) -> Iterator[Trial]:
    """A federation whose third site starts with another value of an environment variable."""
    demo = Demo(federation, folder / "fed")
    try:
        for name in ("server", "site-1", "site-2"):
            demo.start(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(variable, value)
            start(demo)
        yield Trial(demo, federation, folder)
    finally:
        demo.processes.end()
    assert processes(folder) == {}
