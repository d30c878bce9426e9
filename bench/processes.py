"""One measured process: what it printed, how long it took, and how much memory it had at most."""

from __future__ import annotations

import contextlib
import json
import os
import re
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

    Seconds are of the whole process, CPU seconds also of its ended children. Peak memory is
    the largest sum over it and all its children, looked at five times a second.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out, errors = Path(folder, ".stdout"), Path(folder, ".stderr")
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            process = subprocess.Popen(
                command, cwd=folder, env=variables, stdout=stdout, stderr=stderr
            )
            status, used, peak = _wait(process, name)
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
        "peak_gb": peak / 2**20,
    }


def _wait(process: subprocess.Popen[bytes], name: str) -> tuple[int, Any, int]:
    """Exit status, use of resources, peak memory in KiB; who takes too long is stopped."""
    deadline, peak = time.monotonic() + TIME_LIMIT, 0
    while True:
        done, status, used = os.wait4(process.pid, os.WNOHANG)
        if done:
            process.returncode = os.waitstatus_to_exitcode(status)
            # What the system itself counts also has this process in it, from before the start.
            return process.returncode, used, peak or used.ru_maxrss
        peak = max(peak, _memory(process.pid))
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RunError(f"{name} was stopped after {TIME_LIMIT} seconds.")
        time.sleep(0.2)


def _memory(pid: int) -> int:
    """KiB of a process and all its children; of one without children, its own peak so far."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(after_name[1])
    family = {pid}
    for number in sorted(parents):  # children are younger than their parents, nearly always
        if parents[number] in family:
            family.add(number)
    if len(family) == 1:
        return _status(pid, "VmHWM")
    return sum(_status(number, "VmRSS") for number in family)


def _status(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) if found else 0
    return 0
