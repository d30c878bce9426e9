"""A federation on this machine: its processes, and a demo of server and sites on loopback.

FLARE starts a separate process for each job, in a separate session, which outlives a killed parent.
All processes inherit one environment variable, by which they are found again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from atoll.core.errors import ConfigError
from atoll.deploy.kits import (
    ADMIN,
    LOG_BYTES,
    AboutKit,
    on_loopback,
    own_environment,
    provision,
    server_command,
    site_command,
    write_settings,
)

if TYPE_CHECKING:
    from atoll.core.federation import Federation

MARK = "ATOLL_FEDERATION"
UNANSWERED = re.compile(r"TP=heart_beat [^\n]*timeout on Request")
ENDING = 30.0  # seconds that a job may need to end after the process that started it
CONNECTED = re.compile(r"Connection \[[^]]* => [^]]*] is created")  # in FLARE's log of a site


class Processes(contextlib.AbstractContextManager["Processes"]):
    """Start processes, and end them and all their children at the end of the block."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        kit: Path | None = None,
        prepare: Callable[[], object] = lambda: None,
    ) -> subprocess.Popen[bytes]:
        """Start a process that logs to a file. An earlier process of this name has 10 s to end.

        The process holds the lock of its `kit` until it ends, even if its parent is killed earlier.
        `prepare` changes the kit. It is called under the lock, so a refused start does not affect
        the running party.
        """
        if name in self.started:
            self.started[name].wait(timeout=10)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out, locked(kit) as lock:
            prepare()
            # A separate session, because this process handles Ctrl-C of the terminal.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=log.parent,
                env=environment(self.mark),
                start_new_session=True,
                pass_fds=[lock.fileno()] if lock else [],
            )
            if lock:
                lock.write(str(process.pid))
        self.started[name] = process
        return process

    def dead(self) -> list[str]:
        """Return the names of started processes that ended."""
        return [name for name, process in self.started.items() if process.poll() is not None]

    def alive(self) -> list[int]:
        """Return the process IDs of all processes that belong to this federation."""
        return [pid for pid, mark in marked() if mark == self.mark]

    def end(self, grace: float = 2.0) -> None:
        """End all processes: SIGTERM, then SIGKILL. No data are lost: all state is on disk."""
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


@contextlib.contextmanager
def locked(kit: Path | None) -> Iterator[IO[str] | None]:
    """Lock a kit for one process, and yield the open file. A process that inherits it has the lock.

    Its jobs inherit the file, too. If the process was killed, wait up to `ENDING` s for its jobs.
    """
    if kit is None:
        yield None
        return
    (kit / "atoll").mkdir(exist_ok=True)
    with (kit / "atoll" / ".process").open("a+") as file:
        end = time.monotonic() + ENDING
        while not _try_lock(file):
            file.seek(0)
            pid = file.read(20)
            if not pid or pid in {str(alive) for alive, _ in marked()}:
                hint = "stop that one first; two processes cannot share a kit"
                who = f"process {pid}" if pid else "another start"
                raise ConfigError(f"'{kit}' is in use by {who}; {hint}")
            if time.monotonic() >= end:  # FLARE's jobs inherit the lock
                why = f"process {pid} was killed, and one of its jobs still ends"
                raise ConfigError(f"'{kit}' is in use: {why}; start again in a minute")
            time.sleep(0.5)
        file.truncate(0)
        yield file


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_port(about: AboutKit) -> None:
    """Refuse to start a server whose port is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1" if on_loopback(about) else "", about["port"]))
        except OSError as error:
            hint = "stop the program that uses it, perhaps another server"
            why = f"port {about['port']} of this machine cannot be used ({error.strerror})"
            raise ConfigError(f"{why}; {hint}") from None


class NewLines:
    """The part of a log that was written since the last call of `begin`."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.begin()

    def begin(self) -> None:
        """Skip all text up to now."""
        self.began = time.monotonic()
        self.skipped = self.log.stat().st_size if self.log.exists() else 0

    def read(self) -> str:
        """Return all new text. It is empty while the log is missing or being rotated."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self.skipped:  # it was rotated
                self.skipped = 0
            file.seek(self.skipped)
            return file.read().decode(errors="replace")
        return ""


def refusal(output: NewLines, events: NewLines) -> str:
    """Return why a site cannot take part, or "" if its new log lines show no reason.

    Two processes with one certificate end each other's connection every few seconds. The newer
    process must stop, so connections count only in the minute after the start.
    """
    if "is disabled" in output.read():
        return "was removed from the federation; ask its coordinator"
    if time.monotonic() - events.began < 60 and len(CONNECTED.findall(events.read())) > 3:
        return "loses its connection every few seconds; stop the other process that uses its kit"
    return ""


def lost_session(recent: NewLines) -> bool:
    """Return whether the server left two heartbeats in a row unanswered.

    This happens after the server gets a new key. Sites that joined before must join again.
    """
    lost = len(UNANSWERED.findall(recent.read())) > 1
    if lost or time.monotonic() - recent.began > 120:  # two in a row take 80 s
        recent.begin()
    return lost


def bound_log(log: Path) -> None:
    """Rotate a growing log, because the program that writes it does not."""
    with contextlib.suppress(OSError):  # the log may be missing, or the disk full
        if log.stat().st_size > LOG_BYTES:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def environment(mark: str) -> dict[str, str]:
    """Return the environment of a federation's process. Small tensors need only one thread."""
    own = {MARK: mark, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    # FLARE starts hundreds of short threads. With many arenas, their memory would stay in use.
    return {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", **own_environment(), **own}


def marked() -> Iterator[tuple[int, str]]:
    """Yield process ID and mark of each process of this user that inherited `MARK`."""
    import psutil  # late: a command that starts nothing may lack it

    for process in psutil.process_iter(["environ", "status"]):
        mark = (process.info["environ"] or {}).get(MARK)
        if mark is not None and process.info["status"] != psutil.STATUS_ZOMBIE:
            yield process.pid, mark


class Demo:
    """Provision and start a whole federation. The end of the block ends every process.

    Each client becomes a site with only its own file. Kits, logs and states are deleted at the end
    unless `keep` names a folder. All sites use `policy`, in TOML.
    The default policy allows all declared disclosures.
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
        self.processes.start(name, command, self.folder / "logs" / f"{name}.log", kit)

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
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
