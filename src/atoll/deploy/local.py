"""A federation on this machine: its processes, and a demo of server and sites on loopback.

FLARE starts a separate process for each job, in a separate session, which outlives a parent that is
killed. All of them inherit one variable of the environment, by which they are found again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import ConfigError
from atoll.deploy.kits import ADMIN, provision, server_command, site_command, write_settings

if TYPE_CHECKING:
    from atoll.core.federation import Federation

MARK = "ATOLL_FEDERATION"


class Processes(contextlib.AbstractContextManager["Processes"]):
    """Starts processes, and ends them and all their children when the block is left."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self.started: dict[str, subprocess.Popen[bytes]] = {}

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
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, kind)
            end = time.monotonic() + wait
            while self._all() and time.monotonic() < end:
                time.sleep(0.05)

    def _all(self) -> set[int]:
        running = {p.pid for p in self.started.values() if p.poll() is None}
        return running | set(self.alive())


def environment(mark: str) -> dict[str, str]:
    """The variables of a federation's process: small tensors want one thread."""
    own = {MARK: mark, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    return {"OMP_NUM_THREADS": "1", **os.environ, **own}


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


class Demo:
    """Provisions and starts everything; the end of the block ends every process.

    Each client becomes a site with only its own file. Kits, logs and states are thrown away at the
    end unless `keep` names a folder. `policy` is every site's, as TOML.
    """

    admin = ADMIN

    def __init__(self, federation: Federation, keep: Path | None = None, policy: str = "") -> None:
        from atoll.deploy.site_data import write_clients  # late, because it imports torch

        self.folder = Path(tempfile.mkdtemp(prefix="atoll-")) if keep is None else keep
        self.thrown_away = keep is None
        self.sites = tuple(f"site-{i + 1}" for i in range(len(federation)))
        self.port = free_port()
        self.processes = Processes()
        if keep is not None and keep.exists() and any(keep.iterdir()):
            raise ConfigError(f"'{keep}' is not empty; choose another folder for --keep")
        made = provision(self.folder / "kits", self.sites, port=self.port)
        self.kits = {"admin" if name == ADMIN else name: kit for name, kit in made.items()}
        files = write_clients(federation, self.folder / "data")
        for name, file in zip(self.sites, files, strict=True):
            policy_file = self.folder / f"policy-{name}.toml"
            policy_file.write_text(policy or 'disclose = "declared"\n')
            write_settings(self.kits[name], file, policy=policy_file)

    def start(self, name: str) -> None:
        """Start the server or a site, or start it again."""
        kit = self.kits[name]
        command = server_command(kit) if name == "server" else site_command(kit)
        self.processes.start(name, command, self.folder / "logs" / f"{name}.log")

    def __enter__(self) -> Demo:
        try:
            for name in ("server", *self.sites):
                self.start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.end()
        if self.thrown_away:
            shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
