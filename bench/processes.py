"""One measured process: what it printed, how long it took, and how much memory it had at most."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

TIME_LIMIT = 1800  # seconds for one run


class RunError(Exception):
    """A run failed; the message is a sentence for the user."""


def environment(threads: int) -> dict[str, str]:
    """The variables that hold a run to so many threads and to the CPU."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(threads)), "CUDA_VISIBLE_DEVICES": ""}


def capture(command: list[str], name: str, variables: dict[str, str]) -> dict[str, Any]:
    """Run a command in an empty folder; the JSON object in its last line, with what it took.

    Seconds and CPU seconds are of the whole process with its children; peak memory is that of the
    largest single process.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out, errors = Path(folder, ".stdout"), Path(folder, ".stderr")
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            process = subprocess.Popen(
                command, cwd=folder, env=variables, stdout=stdout, stderr=stderr
            )
            status, used = _wait(process, name)
        printed = out.read_text(errors="replace").strip().splitlines()
        tail = "\n".join(errors.read_text(errors="replace").strip().splitlines()[-4:])
    if status:
        raise RunError(f"{name} ended with exit status {status}; its last lines were:\n{tail}")
    try:
        result = json.loads(printed[-1])
    except (IndexError, json.JSONDecodeError) as error:
        raise RunError(f"{name} printed no JSON object as its last line.") from error
    return {
        **result,
        "process_seconds": time.perf_counter() - start,
        "process_cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_gb": used.ru_maxrss / 2**20,
    }


def _wait(process: subprocess.Popen[bytes], name: str) -> tuple[int, Any]:
    """Exit status and use of resources; a process that takes too long is stopped."""
    deadline = time.monotonic() + TIME_LIMIT
    while True:
        done, status, used = os.wait4(process.pid, os.WNOHANG)
        if done:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, used
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RunError(f"{name} was stopped after {TIME_LIMIT} seconds.")
        time.sleep(0.05)
