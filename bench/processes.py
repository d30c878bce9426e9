"""Run one process and measure its output, seconds and peak memory."""

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
    """A failed run, with a sentence for the user as its message."""


def environment(threads: int) -> dict[str, str]:
    """Return variables that limit a run to `threads` threads and to the CPU."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(threads)), "CUDA_VISIBLE_DEVICES": ""}


def capture(command: list[str], name: str, variables: dict[str, str]) -> dict[str, Any]:
    """Run a command in an empty folder and return the JSON object of its last line.

    The object also has the seconds of the whole process, CPU seconds including ended children,
    and the peak memory: the largest sum over all its processes, sampled five times a second.
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
    """Return exit status, resource usage and peak memory in KiB. Kill it after the limit."""
    deadline, peak = time.monotonic() + TIME_LIMIT, 0
    while True:
        done, status, used = os.wait4(process.pid, os.WNOHANG)
        if done:
            process.returncode = os.waitstatus_to_exitcode(status)
            # The system's own peak also counts this process, from before the start.
            return process.returncode, used, peak or used.ru_maxrss
        peak = max(peak, _memory(process.pid))
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RunError(f"{name} was stopped after {TIME_LIMIT} seconds.")
        time.sleep(0.2)


def _memory(pid: int) -> int:
    """Return KiB of a process and its children, or its own peak if it has no children."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(after_name[1])
    family = {pid}
    for number in sorted(parents):  # a child nearly always has a higher number than its parent
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
