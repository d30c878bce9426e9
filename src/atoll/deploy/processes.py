"""Processes of a federation on this machine: started together, and none left behind.

FLARE starts a process of its own for each job, in a session of its own, which outlives a parent
that is killed. All of them inherit one variable of the environment, by which they are found again.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MARK = "ATOLL_FEDERATION"


class Processes:
    """Starts processes, and ends them and all their children when the block is left."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process with its output in a file; one of the same name must have ended."""
        if name in self.started:
            self.started[name].wait(timeout=10)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            # Its own session: Ctrl-C in the terminal is ours to handle, in order.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=log.parent,
                env=environment(self.mark),
                start_new_session=True,
            )
        self.started[name] = process
        return process

    def dead(self) -> list[str]:
        """Names of started processes that ended."""
        return [name for name, process in self.started.items() if process.poll() is not None]

    def alive(self) -> list[int]:
        """Numbers of all processes that belong to this federation."""
        return [pid for pid, mark in marked() if mark == self.mark]

    def end(self, grace: float = 2.0) -> None:
        """End everything: first kindly, then not. Nothing is lost: state is on the disk."""
        for kind, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            for pid in self._all():
                try:
                    os.kill(pid, kind)
                except ProcessLookupError:
                    continue
            end = time.monotonic() + wait
            while self._all() and time.monotonic() < end:
                time.sleep(0.05)

    def _all(self) -> set[int]:
        running = {p.pid for p in self.started.values() if p.poll() is None}
        return running | set(self.alive())


def environment(mark: str) -> dict[str, str]:
    """The variables of a federation's process: small tensors want one thread."""
    own = {
        MARK: mark,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **own}


def marked() -> Iterator[tuple[int, str]]:
    """Processes that carry a mark, on systems with /proc."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:  # another user's, or over by now
            continue
        for variable in variables:
            name, _, value = variable.partition(b"=")
            if name == MARK.encode() and not zombie:
                yield int(entry.name), value.decode()
