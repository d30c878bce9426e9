"""The life of a federation: rounds continue while sites are added, renewed and removed."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.deploy import keys
from atoll.deploy.kits import about_kit, certificate_days
from atoll.deploy.local import Processes, free_port
from atoll.deploy.site_data import write_clients
from tests.e2e.trial import ATOLL, SMALL, lagoon, processes, serial

pytestmark = pytest.mark.federation

PASSPHRASE = "correct horse battery"
ROUNDS = 2


class Federation:
    """A coordinator's folder, the sites' kits, and the commands that run on them."""

    def __init__(self, folder: Path, started: Processes) -> None:
        self.folder, self.started = folder, started
        self.home = folder / "federation"
        keys.found(self.home, PASSPHRASE, port=free_port())
        self.data = write_clients(lagoon(), folder / "data")

    def kit(self, party: str) -> Path:
        return self.home / party if party in ("server", "admin") else self.folder / party

    def join(self, party: str, name: str | None = None, days: int = keys.DAYS) -> None:
        """Request, approval and certificate of a new site, or the renewal of one."""
        request = keys.make_request(self.kit(party), name)
        kind = "admin" if party == "admin" else "site"
        signed = keys.approve(
            self.home, request, PASSPHRASE, days=days, kind=kind, renew=name is None
        )
        keys.join(self.kit(party), signed, keys.read_approval(signed).fingerprint)

    def start(self, party: str, *, kit: Path | None = None) -> subprocess.Popen[bytes]:
        """`atoll federate server` or `site`, with its output in a file of the party's name."""
        kit = kit or self.kit(party)
        more = ["--data", str(self.data[int(party[-1]) - 1])] if party != "server" else []
        command = [*ATOLL, "federate", "site" if more else "server", "--kit", str(kit), *more]
        return self.started.start(kit.name, command, self.folder / f"{kit.name}.log")

    def stop(self, party: str) -> None:
        self.started.started[party].terminate()
        self.started.started[party].wait(timeout=240)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def admin(self, *words: str) -> str:
        command = [*ATOLL, "federate", *words, "--kit", str(self.kit("admin"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def sites(self) -> dict[str, bool]:
        """Return the connected sites, or nothing while the server starts."""
        command = [*ATOLL, "federate", "status", "--json", "--kit", str(self.kit("admin"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        return {} if done.returncode else json.loads(done.stdout.splitlines()[-1])["sites"]

    def listens(self) -> bool:
        """Whether the server is reachable. Two servers can share a port until one binds it."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", about_kit(self.kit("server"))["port"])) == 0

    def wait(self, what: Callable[[], Any], timeout: float = 240) -> None:
        end = time.monotonic() + timeout
        while not what():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.5)

    def logs(self) -> set[Path]:
        return set(self.kit("server").glob("atoll/runs/*/audit.jsonl"))

    def asked(self) -> list[set[str]]:
        """The sites of each training step of the newest run, from the server's audit log."""
        newest = max(self.logs(), key=lambda path: path.stat().st_mtime)
        events = map(json.loads, newest.read_text().splitlines())
        return [set(event["bytes"]) for event in events if event.get("step") == "train"]

    def run(self, number: int) -> dict[str, Any]:
        """Metrics of a short run, with the sites that take part by default."""
        out = ["--out", str(self.folder / f"run-{number}"), "--json"]
        said = self.admin("run", "fedavg", "--rounds", str(ROUNDS), *SMALL, *out)
        metrics: dict[str, Any] = json.loads(said.splitlines()[-1])["metrics"]
        return metrics


def test_a_federation_grows_renews_and_shrinks(tmp_path):
    with Processes() as started:
        life = Federation(tmp_path, started)
        life.join("bank-1", "bank-1", days=20)
        life.join("bank-2", "bank-2")
        for party in ("server", "bank-1", "bank-2"):
            life.start(party)
        life.wait(lambda: "ends in 19 days; renew it" in life.said("bank-1"))
        assert "ends in" not in life.said("bank-2")
        life.wait(lambda: life.sites() == {"bank-1": True, "bank-2": True})
        two = life.run(1)

        # A third site joins the running federation; only the administrator gets a new key.
        life.join("admin")
        life.join("bank-3", "bank-3")
        life.start("bank-3")
        life.wait(lambda: life.sites().get("bank-3"))
        three = life.run(2)
        assert three == serial("fedavg", lagoon(), rounds=ROUNDS)
        assert three != two

        # A site gets a new key and certificate, and keeps the rest.
        audit = (life.kit("bank-1") / "atoll" / "audit.jsonl").read_bytes()
        life.join("bank-1")
        life.stop("bank-1")
        (tmp_path / "bank-1.log").unlink()
        life.start("bank-1")
        assert certificate_days(life.kit("bank-1")) == keys.DAYS - 1
        assert (life.kit("bank-1") / "atoll" / "audit.jsonl").read_bytes().startswith(audit)

        life.wait(lambda: list(life.sites().values()) == [True] * 3)

        # A removed site gets no question more, also in the run under way.
        words = ["run", "fedavg", "--rounds", "2000", *SMALL, "--wait", "20"]
        where = ["--out", str(tmp_path / "long"), "--kit", str(life.kit("admin"))]
        before = life.logs()
        run = started.start("run", [*ATOLL, "federate", *words, *where], tmp_path / "run.log")
        life.wait(lambda: life.logs() > before)
        life.wait(lambda: life.asked()[-1:] == [{"bank-1", "bank-2", "bank-3"}])
        assert "it keeps its data" in life.admin("remove", "bank-3", "--yes")
        life.wait(lambda: life.asked()[-1:] == [{"bank-1", "bank-2"}])
        assert run.poll() is None
        run.terminate()
        run.wait(timeout=240)

        # A copy of a kit on another machine has to leave; the first one stays.
        twin = shutil.copytree(life.kit("bank-2"), tmp_path / "twin")
        (twin / "atoll" / ".process").unlink()
        assert life.start("bank-2", kit=twin).wait(timeout=240) == 2
        assert "stop the other process that uses its kit" in life.said("twin")

        # It cannot come back, not even after a restart of the server.
        for party in ("bank-3", "server"):
            life.stop(party)
        life.start("server")
        life.wait(lambda: life.sites() == {"bank-1": True, "bank-2": True})
        assert "ends in" not in life.said("bank-1")
        assert life.start("bank-3").wait(timeout=240) == 2
        assert "bank-3 was removed from the federation" in life.said("bank-3")
        assert life.run(3) == two
    assert processes(tmp_path) == {}


def test_a_server_is_started_once(tmp_path):
    with Processes() as started:
        life = Federation(tmp_path, started)
        life.start("server")
        life.wait(life.listens)
        words = [*ATOLL, "federate", "server", "--kit", str(life.kit("server"))]
        second = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
        assert second.returncode == 2
        assert "is in use by process" in second.stderr
        copy = shutil.copytree(life.kit("server"), tmp_path / "copy")
        words = [*ATOLL, "federate", "server", "--kit", str(copy)]
        second = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
        assert second.returncode == 2
        assert "cannot be used (Address already in use)" in second.stderr
    assert processes(tmp_path) == {}
