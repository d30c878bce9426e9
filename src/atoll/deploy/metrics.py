"""Metrics and health of a server or a site for Prometheus: `--metrics PORT`, on loopback only.

The process that started the party serves `/metrics`, `/health` and `/ready`. It reads its numbers
from the party's own files and the operating system, never from a packet or a site's data.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

import psutil
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from atoll import __version__
from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.deploy.activity import SERVER, RunActivity, ServerActivity, SiteActivity
from atoll.deploy.kits import about_kit, certificate_end, state_folder

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

LOOPBACK = "127.0.0.1"
NEWEST = 5
"""Number of runs with time series: each label costs Prometheus memory. Totals count all runs."""
JOBS = ("runner_process", "worker_process")
"""Modules of FLARE that run a job in a separate process."""
USED = "Of FLARE's process and of its jobs, summed."
COUNTERS = {
    "atoll_runs": ("", "Runs that began."),
    "atoll_rounds": ("", "Complete rounds, or rounds that a site answered."),
    "atoll_sent_bytes": ("peer", "Bytes of packets sent to a party."),
    "atoll_received_bytes": ("peer", "Bytes of packets received from a party."),
    "atoll_refusals": ("peer", "Requests that the owner of a site did not allow."),
    "atoll_failures": ("peer", "Requests without an answer that can be used."),
}
"""Label and help text. Totals come from the audit logs, so a restart does not reset them."""
GAUGES = {
    "atoll_errors": ("part", "Whether a part of these metrics is missing: a file cannot be used."),
    "atoll_ready": ("", "Whether the server listens, or the site is connected."),
    "atoll_certificate_expiry_timestamp_seconds": (
        "",
        "When the kit's first certificate ends.",
    ),
    "atoll_disk_free_bytes": ("", "Free space of the kit's disk."),
    "atoll_audit_log_bytes": ("", "Size of the audit logs."),
    "atoll_epsilon_spent": ("", "Epsilon against the server, in all private runs."),
    "atoll_epsilon_limit": ("", "The most that the policy allows."),
    "atoll_run_round": ("run", "Complete rounds of all seeds."),
    "atoll_run_rounds": ("run", "Rounds of one seed."),
    "atoll_run_last_event_timestamp_seconds": ("run", "When the run logged its last event."),
    "atoll_run_ended": ("run", "Whether the run is complete."),
    "atoll_run_epsilon": ("run", "Epsilon against the server that a private run has spent."),
    "atoll_last_answer_timestamp_seconds": ("peer", "Last answer of a site in the newest run."),
    "atoll_left_out": ("peer", "Whether the newest run is without the site."),
    "atoll_process_resident_memory_bytes": ("process", USED),
    "atoll_process_threads": ("process", USED),
    "atoll_process_open_fds": ("process", USED),
    "atoll_processes": ("process", "FLARE's process, and its jobs."),
}
Sample = tuple[str, str, float | None]
"""A metric's name, the value of its label, and its value. A value of None is skipped."""


class Party(Collector):
    """The metrics of one party. `pids` returns the IDs of its processes."""

    def __init__(self, kit: Path, pids: Callable[[], Sequence[int]]) -> None:
        self.kit, self.pids, self.about = kit, pids, about_kit(kit)
        self.serves = self.about["name"] == "server"
        self.activity = ServerActivity(kit) if self.serves else SiteActivity(kit)
        self.alone = threading.Lock()  # each request has its own thread

    def alive(self) -> bool:
        """Return whether FLARE's process runs."""
        return any(kind == "party" for kind, _ in self._processes())

    def ready(self) -> bool:
        """Return whether the server listens, or whether the site is connected to the server."""
        state = psutil.CONN_LISTEN if self.serves else psutil.CONN_ESTABLISHED
        for _, process in self._processes():
            with suppress(psutil.Error):
                for link in process.net_connections("tcp"):
                    end = link.laddr if self.serves else link.raddr
                    if link.status == state and end.port == self.about["port"]:
                        return True
        return False

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        for pid in self.pids():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                words = " ".join(process.cmdline())
                yield "job" if any(name in words for name in JOBS) else "party", process

    def collect(self) -> Iterable[Metric]:
        kind = "server" if self.serves else "site"
        about = {"version": __version__, "party": self.about["name"], "kind": kind}
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        with self.alone:
            for name, key, value in self._samples():
                family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
                label, text = (GAUGES | COUNTERS)[name]
                if value is not None:
                    made = families.setdefault(name, family(name, text, labels=label.split()))
                    made.add_metric([key] if label else [], value)
        info = InfoMetricFamily("atoll", "The version of Atoll and the party.", about)
        return [info, *families.values()]

    def _samples(self) -> Iterator[Sample]:
        """Yield all samples that can be read. If one part fails, the others still count."""
        parts = {
            "runs": self._runs,
            "certificate": self._certificate,
            "disk": self._disk,
            "processes": self._resources,
        }
        for name, part in parts.items():
            failed = False
            try:
                yield from part()
            except (AtollError, OSError):
                failed = True
            yield "atoll_errors", name, failed

    def _certificate(self) -> Iterator[Sample]:
        end = certificate_end(self.kit).timestamp()
        yield "atoll_certificate_expiry_timestamp_seconds", "", end

    def _disk(self) -> Iterator[Sample]:
        yield "atoll_disk_free_bytes", "", shutil.disk_usage(self.kit).free
        logs = state_folder(self.kit).glob("**/audit.jsonl")
        yield "atoll_audit_log_bytes", "", sum(path.stat().st_size for path in logs)

    def _runs(self) -> Iterator[Sample]:
        runs, problem = self.activity.look()
        yield "atoll_runs", "", len(runs)
        yield "atoll_rounds", "", sum(run.round for run in runs)
        for run in runs[-NEWEST:]:
            yield "atoll_run_round", run.name, run.round
            yield "atoll_run_rounds", run.name, run.rounds
            yield "atoll_run_last_event_timestamp_seconds", run.name, run.last
        if isinstance(self.activity, SiteActivity):
            yield from _of_site(self.activity, runs)
        else:
            yield from _of_server(runs)
        if problem:
            raise DataError(problem)

    def _resources(self) -> Iterator[Sample]:
        yield "atoll_ready", "", self.ready()
        found = Counter[tuple[str, str]]()
        for kind, process in self._processes():
            with suppress(psutil.Error), process.oneshot():
                used = process.memory_info().rss, process.num_threads(), process.num_fds()
                found["atoll_process_resident_memory_bytes", kind] += used[0]
                found["atoll_process_threads", kind] += used[1]
                found["atoll_process_open_fds", kind] += used[2]
                found["atoll_processes", kind] += 1
        yield from ((*pair, value) for pair, value in found.items())


def _of_server(runs: Sequence[RunActivity]) -> Iterator[Sample]:
    for run in runs[-NEWEST:]:
        yield "atoll_run_ended", run.name, run.ended
        yield "atoll_run_epsilon", run.name, run.epsilon
    for name, peer in runs[-1].peers.items() if runs else ():
        yield "atoll_last_answer_timestamp_seconds", name, peer.last
        yield "atoll_left_out", name, bool(peer.out)
    totals = Counter[tuple[str, str]]()
    for name, peer in (pair for run in runs for pair in run.peers.items()):
        totals["atoll_sent_bytes", name] += peer.sent
        totals["atoll_received_bytes", name] += peer.received
        totals["atoll_refusals", name] += peer.refusals
        totals["atoll_failures", name] += peer.failures
    yield from ((*pair, value) for pair, value in totals.items())


def _of_site(site: SiteActivity, runs: Sequence[RunActivity]) -> Iterator[Sample]:
    yield "atoll_sent_bytes", SERVER, sum(run.peer(SERVER).sent for run in runs)
    yield "atoll_refusals", SERVER, site.refusals
    yield "atoll_failures", SERVER, site.failures
    with suppress(AtollError):  # the policy is unreadable, and the site itself reports that
        budget = site.budget()
        yield "atoll_epsilon_spent", "", budget.spent
        yield "atoll_epsilon_limit", "", budget.limit


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds, for a client that sends nothing

    def log_message(self, *_: object) -> None:
        """Log nothing, because each scrape would add a line."""


class _Server(ThreadingWSGIServer):
    def handle_error(self, *_: object) -> None:
        """Print nothing: a slow or disconnected client would cause a traceback."""


@contextmanager
def serving(kit: Path, port: int | None, pids: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Serve metrics and health of a party inside the block. Without a port, serve nothing."""
    if port is None:
        yield
        return
    party, registry = Party(kit, pids), CollectorRegistry()
    registry.register(party)
    metrics, checks = make_wsgi_app(registry), {"/health": party.alive, "/ready": party.ready}

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            pages: Iterable[bytes] = metrics(environ, start)
            return pages
        found = checks[path]() if path in checks else None
        status = {None: "404 Not Found", True: "200 OK", False: "503 Service Unavailable"}[found]
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{status[4:].lower()}\n".encode()]

    try:
        server = make_server(LOOPBACK, port, answer, _Server, _Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        why = f"port {port} of {LOOPBACK} cannot be used ({reason})"
        raise ConfigError(f"{why}; choose another one for --metrics") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
