"""The administrator's part: submit a run, watch it, submit it again after a fault.

FLARE cannot return a site to a running job, and it ends a job whose process dies. The run is safe
in the folders of server and sites, so in both cases a new job continues it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError, ClientLost, ConfigError
from atoll.core.files import write_atomically
from atoll.deploy.audit import Json
from atoll.deploy.coordinator import Order, order_text, read_order
from atoll.deploy.kits import CLASSES
from atoll.engines.fleet import INTERVAL
from atoll.experiment.folder import CHECKPOINT
from atoll.experiment.result import CONFIG

if TYPE_CHECKING:
    from atoll.engines.flare import AdminSession

ORDER = "order"
PAUSE = 5.0  # seconds until a stopped job counts as stopped for good
RESTARTS = 3  # how often a job without a new complete round is submitted again


def write_job(order: Order, sites: Sequence[str], folder: Path) -> Path:
    """Write a FLARE job, with configurations and no code. Return its folder."""
    from atoll.engines.gate import job_text, site_job

    job, arguments = folder / f"atoll-{order.run}", {"order": order_text(order)}
    server = {
        "format_version": 2,
        "server": {"task_request_interval": INTERVAL},
        # Exclude a site at once when its process ends, not after FLARE's default of a minute.
        "dead_client_grace_period": 1.0,
        "dead_client_check_lead_time": 1.0,
        "workflows": [{"id": "atoll", "path": CLASSES["server"][0], "args": arguments}],
    }
    where = {"server": ["server"], "site": list(sites)}
    meta = {"name": job.name, "resource_spec": {}, "min_clients": 1, "deploy_map": where}
    files = {
        "meta.json": meta,
        "server/config/config_fed_server.json": server,
        "site/config/config_fed_client.json": site_job(INTERVAL),
    }
    for path, content in files.items():
        (job / path).parent.mkdir(parents=True, exist_ok=True)
        (job / path).write_text(job_text(content))
    return job


@dataclass
class Supervisor:
    """Follow a run until its result is in the folder `out`."""

    session: AdminSession
    order: Order
    out: Path
    _: KW_ONLY
    tell: Callable[[str], None]  # called with sentences for the user
    on_progress: Callable[[Json], None]  # called with the progress of the running job
    patience: float = 60.0  # seconds to wait for sites that are not connected
    rejoin: bool = True  # include a returning site at once, by continuing in a new job
    resuming: bool = False  # whether the run began before; a new run needs all its sites
    removed: Callable[[], Collection[str]] = tuple  # the sites removed from the federation so far
    again: str = ""  # the command that continues the run, for hints
    job: str = field(default="", init=False)
    reached: tuple[int, int] = field(default=(0, 0), init=False)  # seed and round

    @property
    def sites(self) -> list[str]:
        """The sites that take part."""
        return [*self.order.members.values()]

    def run(self) -> None:
        """Follow the run's job, and submit new jobs, until one finishes the run."""
        changed = (self.out / ORDER).exists() and read_saved_order(self.out) != self.order
        if changed and self._running():
            hint = "stop it with `atoll federate stop`, and then continue without a site"
            raise ConfigError(f"the run's job still has all of its sites; {hint}")
        write_atomically(self.out / ORDER, order_text(self.order).encode())
        if self.resuming and self._finished_before():
            return
        least, fruitless = self.order.quorum if self.resuming else len(self.sites), 0
        while True:
            before, gone = self.reached, set(self.removed())
            self.job, least = self._running() or self._submit(least), self.order.quorum
            ended = self._watch()
            if ended["status"] == "finished":
                self._tell_undelivered(ended)
                return
            if ended["status"] == "failed":
                if not any(self.out.glob(f"seed-*/{CHECKPOINT}")):
                    # Nothing was trained, so a corrected command may use the folder.
                    (self.out / CONFIG).unlink(missing_ok=True)
                raise AtollError(ended["reason"])
            # `remove` also stops jobs, to continue them without the removed site.
            stopped = ended["status"] == "aborted" and gone.issuperset(self.removed())
            if stopped and not self._running(wait=PAUSE):
                raise AtollError(f"the job was stopped, and the run is saved; {self._continue()}")
            fruitless = 0 if self.reached > before else fruitless + 1
            if fruitless > RESTARTS:
                tried = f"the job was submitted {fruitless} times without one more round"
                hint = f"correct the cause and {self._continue()}"
                raise ClientLost(f"{ended['reason']}; {tried}; {hint}")
            self.tell(f"{ended['reason']}; continuing in a new job")

    def _continue(self) -> str:
        return f"continue with: {self.again or f'atoll federate run --resume {self.out}'}"

    def _tell_undelivered(self, ended: Json) -> None:
        for site, why in ended.get("undelivered", {}).items():
            self.tell(f"{site} did not take the model: {why}; to send it later, {self._continue()}")

    def stop(self) -> None:
        """Stop the running job, if the server still answers. The run can be continued."""
        with contextlib.suppress(ClientLost):
            if self.job:
                self.session.abort(self.job)

    def _gather(self, least: int) -> dict[str, str]:
        """Wait `patience` seconds for all sites. Return those connected, if at least `least`."""
        end = time.monotonic() + self.patience
        while True:
            connected = self.session.connected()
            there = {site: connected[site] for site in self.sites if site in connected}
            if len(there) == len(self.sites):
                return there
            if time.monotonic() >= end:
                if len(there) >= least:
                    return there
                missing = ", ".join(site for site in self.sites if site not in connected)
                late = f"{missing} did not connect within {self.patience:g} s"
                out = f"--without {missing.replace(' ', '')}" if self.resuming else "--sites"
                hint = f"start it, or leave it out with {out}, and {self._continue()}"
                raise ClientLost(f"{late}; {hint}")
            time.sleep(0.2)

    def _jobs(self) -> list[Json]:
        """Return the run's jobs, newest first."""
        return self.session.jobs(f"atoll-{self.order.run}")

    def _finished_before(self) -> bool:
        """Return whether the last job finished the run and no connected site lacks its model."""
        for job in self._jobs()[:1]:
            if job["status"] == "FINISHED:COMPLETED":
                self.job = job["job_id"]
                ended = self._fetch(job["status"])
                # An earlier version also counted sites that the administrator excluded.
                connected = set(self.session.connected()) & set(self.sites)
                waiting = connected & set(ended.get("undelivered", ()))
                if ended["status"] == "finished" and not waiting:
                    self._tell_undelivered(ended)
                    return True
        return False

    def _running(self, wait: float = 0.0) -> str:
        """Return the ID of the run's active job, or "" if none begins within `wait` seconds."""
        end = time.monotonic() + wait
        while True:
            for job in self._jobs():
                if not job["status"].startswith("FINISHED"):
                    self.tell(f"the run has a job ({job['status'].lower()}); following it")
                    return str(job["job_id"])
            if time.monotonic() >= end:
                return ""
            time.sleep(0.5)

    def _submit(self, least: int) -> str:
        """Submit a job and return its ID. Administrators who submit at once get the same job."""
        jobs, there = len(self._jobs()), self._gather(least)
        with tempfile.TemporaryDirectory() as work:
            job = write_job(self.order, list(there), Path(work))
            try:
                return self.session.submit(job, f"{self.order.run}-{jobs}")
            except ClientLost:
                # Another administrator was faster and saw other sites.
                if running := self._running():
                    return running
                raise

    def _watch(self) -> Json:
        """Watch the job until it ends, and abort it if a lost site is back. Return its outcome."""
        back: list[str] = []
        joined: Mapping[str, object] = {}
        while True:
            progress: Json = self.session.progress(self.job)
            if progress:
                self.reached = max(self.reached, (progress["seed"], progress["round"]))
                self.on_progress(progress)
            status = self.session.status(self.job)
            if status.startswith("FINISHED"):
                ended = self._fetch(status)
                if back:
                    return {**ended, "reason": f"{', '.join(back)} is back"}
                # Another administrator stopped the job, or is about to continue it in a new one.
                aborted = status == "FINISHED:ABORTED" and ended["status"] != "finished"
                return {**ended, "status": "aborted"} if aborted else ended
            joined = joined or self.session.joined(self.job)
            if self.rejoin and progress and joined and not back:
                # A restarted site process is not part of the job.
                now = self.session.connected()
                back = [s for s in self.sites if s in now and now[s] != joined.get(s)]
                if back:
                    self.session.abort(self.job)
            time.sleep(0.5)

    def _fetch(self, status: str) -> Json:
        """Copy the files of the ended job to `out`. Return its outcome."""
        job, self.job, found = self.job, "", []
        with tempfile.TemporaryDirectory() as work:
            with contextlib.suppress(ClientLost):
                found = list(self.session.download(job, Path(work)).rglob("atoll/outcome.json"))
            if not found:
                return {"status": "died", "reason": f"the job ended early ({status.lower()})"}
            ended: Json = json.loads(found[0].read_text())
            shutil.copytree(found[0].parent, self.out, dirs_exist_ok=True)
            return ended


def read_saved_order(out: Path) -> Order:
    """Read the order of a run that was started before."""
    try:
        return read_order((out / ORDER).read_text())
    except OSError:
        raise ConfigError(f"'{out}' holds no federated run to resume (it has no {ORDER})") from None
    except ValueError:
        raise ConfigError(f"'{out / ORDER}' is damaged; restore it from a backup") from None
