"""A live federation on this machine. Every site has its own network link and disk.

It needs the right to make network namespaces and to mount: `unshare -nm python -m bench ...`.
"""

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

import torch

import atoll
from atoll.deploy.kits import provision
from atoll.deploy.local import Processes, free_port
from atoll.deploy.site_data import write_clients

ATOLL = [sys.executable, "-m", "atoll", "federate"]
HOST = "10.9.0.1"
DISK = "48m"  # size of the `atoll` folder of each party
SMALL = {"hidden": 8}


def make_federation(clients: int) -> Any:
    """The built-in data, divided among the sites."""
    return atoll.partition(atoll.load("lagoon", clients=clients), "column:owner")


def serial_metrics(method: str, clients: int, rounds: int) -> dict[str, Any]:
    """Return the metrics of the same run in one process, with one thread as at a site."""
    torch.set_num_threads(1)
    made = make_federation(clients)
    return dict(atoll.run(method, made, engine="serial", rounds=rounds, set=SMALL).metrics())


def shell(*words: str) -> None:
    """Run a system command, which must succeed."""
    subprocess.run(words, check=True, capture_output=True)


class Live:
    """Server and sites as processes, which `close` ends."""

    def __init__(self, clients: int, folder: Path) -> None:
        self.folder, self.processes = folder, Processes()
        self.sites = tuple(f"site-{i + 1}" for i in range(clients))
        self.kits = provision(folder / "kits", self.sites, host=HOST, port=free_port())
        self.kits["admin"] = folder / "kits" / "admin"
        files = write_clients(make_federation(clients), folder / "data")
        self.data = dict(zip(self.sites, files, strict=True))
        self.policy = folder / "policy.toml"
        self.policy.write_text('disclose = "declared"\n')
        self._link()
        for name in ("server", *self.sites):
            disk = self.kits[name] / "atoll"
            disk.mkdir(exist_ok=True)
            shell("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk))
            self.start(name)

    def _link(self) -> None:
        """Make a bridge at the server, and a namespace with one link for each site."""
        shell("ip", "link", "set", "lo", "up")
        shell("ip", "link", "add", "br0", "type", "bridge")
        shell("ip", "addr", "add", f"{HOST}/24", "dev", "br0")
        shell("ip", "link", "set", "br0", "up")
        self.spaces: dict[str, str] = {}
        own = os.readlink("/proc/self/ns/net")
        for number, name in enumerate(self.sites, start=1):
            command = ["unshare", "-n", "sleep", "7200"]
            pid = self.processes.start(f"space-{name}", command, self.folder / "space.log").pid
            until(lambda pid=pid: os.readlink(f"/proc/{pid}/ns/net") != own)
            link = ["ip", "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0"]
            shell(*link, "netns", str(pid))
            shell("ip", "link", "set", f"v{number}", "master", "br0", "up")
            inside = f"ip addr add 10.9.0.{10 + number}/24 dev eth0; ip link set eth0 up"
            shell("nsenter", "-t", str(pid), "-n", "sh", "-c", f"{inside}; ip link set lo up")
            self.spaces[name] = str(pid)

    def start(self, name: str) -> None:
        """Start or restart a party."""
        command = [*ATOLL, "server", "--kit", str(self.kits[name])]
        if name in self.spaces:
            space = ["nsenter", "-t", self.spaces[name], "-n"]
            own = ["--data", str(self.data[name]), "--policy", str(self.policy)]
            command = [*space, *ATOLL, "site", "--kit", str(self.kits[name]), *own]
        self.processes.start(name, command, self.folder / "logs" / f"{name}.log")

    def cut(self, name: str, *, down: bool) -> None:
        """Take a site's link down, or up again."""
        number = self.sites.index(name) + 1
        shell("ip", "link", "set", f"v{number}", "down" if down else "up")

    @contextlib.contextmanager
    def full_disk(self, name: str) -> Iterator[None]:
        """Leave no byte free on a party's disk."""
        filler = self.kits[name] / "atoll" / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        try:
            yield
        finally:
            filler.unlink()

    def pids(self, name: str, kind: str) -> list[int]:
        """The processes of a party: its "parent", or its running "job"."""
        found = dict(commands(self.kits[name]))
        jobs = {p for p, words in found.items() if "runner_process" in words or "worker_" in words}
        return sorted(jobs if kind == "job" else set(found) - jobs)

    def signal(self, name: str, number: int, *kinds: str) -> None:
        """Send a signal to processes of a party."""
        for kind in kinds:
            for pid in self.pids(name, kind):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def run(self, out: Path, *words: str) -> subprocess.Popen[str]:
        """Run `atoll federate run ...` in the background, with its output in a log."""
        place = ["--resume", str(out)] if (out / "order").exists() else [*words, "--out", str(out)]
        log = (out.parent / f"{out.name}.log").open("a")
        command = [*ATOLL, "run", *place, "--kit", str(self.kits["admin"]), "--json"]
        return subprocess.Popen(
            command, stdout=log, stderr=log, text=True, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def connected(self) -> int:
        """How many sites the server sees."""
        command = [*ATOLL, "status", "--kit", str(self.kits["admin"]), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            return 0
        sites = json.loads(done.stdout.splitlines()[-1])["sites"]
        there = [site["connected"] if isinstance(site, dict) else site for site in sites.values()]
        return sum(there)

    def reached(self) -> int:
        """The rounds that the newest run has started, according to the server's audit log."""
        runs = sorted(self.kits["server"].glob("atoll/runs/*"))  # names begin with the time
        log = runs[-1] / "audit.jsonl" if runs else None
        lines = log.read_bytes().splitlines() if log is not None and log.exists() else []
        rounds = [json.loads(line).get("round", -1) for line in lines if line.endswith(b"}")]
        return max((r for r in rounds if isinstance(r, int)), default=-1)

    def close(self) -> None:
        """End every process and unmount the disks."""
        self.processes.end()
        for name in ("server", *self.sites):
            subprocess.run(["umount", "-l", str(self.kits[name] / "atoll")], check=False)


def commands(folder: Path) -> Iterator[tuple[int, str]]:
    """Processes that name a folder in their command."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            continue
        if f"{folder} " in words or f"{folder}/" in words:
            yield int(entry.name), words


def until(what: Callable[[], object], seconds: float = 60.0) -> float:
    """Wait until a condition holds and return the seconds that it took."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"the condition did not hold within {seconds:g} s")
        time.sleep(0.1)
    return time.monotonic() - began


STOP, RESUME, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL
