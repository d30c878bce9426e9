"""A tuning in its own process, killed in the middle of a trial, ends as if it had not been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import atoll
from atoll.experiment.status import StatusReader
from atoll.studies.tune.result import TuningResult

OPTIONS = {"data": "lagoon:nodes=150", "clients": 2, "rounds": 12, "epochs": 1}


def tune(folder: Path) -> TuningResult:
    return atoll.tune("fedprox", trials=7, seeds=1, out=folder, **OPTIONS)


def test_a_killed_tuning_is_seen_as_such_and_ends_with_the_same_choice(tmp_path: Path) -> None:
    words = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "atoll", "tune", "fedprox", *words, "--trials", "7",
               "--seeds", "1", "--out", str(tmp_path / "killed"), "--quiet"]  # fmt: skip
    process = subprocess.Popen(command)
    limit, cells = time.monotonic() + 100, tmp_path / "killed" / "cells"
    while True:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.005)
        if (cells / "fedprox-0001").exists():
            process.send_signal(signal.SIGSTOP)  # so that nothing ends between look and kill
            if list(cells.glob("*/progress.json")):
                break
            process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    seen = StatusReader(tmp_path / "killed").read()
    assert seen.gone
    assert seen.silent is not None
    assert not seen.finished
    one, two = tune(tmp_path / "killed"), tune(tmp_path / "whole")
    outlines = [
        [(t.settings, t.state, t.value, t.curve) for t in found.methods["fedprox"].trials]
        for found in (one, two)
    ]
    assert outlines[0] == outlines[1]
    assert one.methods["fedprox"].test["metrics"] == two.methods["fedprox"].test["metrics"]
    events = (tmp_path / "killed" / "events.jsonl").read_text().splitlines()
    begun = [e["cell"] for e in map(json.loads, events) if e["event"] == "begin"]
    assert begun.count("fedprox-0000") == 1  # a finished trial did not run again
