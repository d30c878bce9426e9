"""Metrics and health of a server or a site for Prometheus: `--metrics PORT`, on loopback only.

The process that started the party serves `/metrics`, `/health` and `/ready`. Its numbers come from
the party's own files and from the operating system, never from a packet or from a site's data.
"""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from atoll.core.errors import AtollError, ConfigError
from atoll.deploy.activity import RunActivity, ServerActivity, SiteActivity
from atoll.deploy.kits import about_kit, certificate_end

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

LOOPBACK = "127.0.0.1"
NEWEST = 5
"""Runs that have time series; totals count all runs."""
JOBS = ("runner_process", "worker_process")
"""Modules of FLARE that run a job, in a separate process."""


class Party(Collector):
    """The metrics of one party; `pids` returns the numbers of its processes."""

    def __init__(self, kit: Path, pids: Callable[[], Sequence[int]]) -> None:
        self.kit, self.pids, self.about = kit, pids, about_kit(kit)
        self.serves = self.about["name"] == "server"
        self.activity = ServerActivity(kit) if self.serves else SiteActivity(kit)
        self.alone = threading.Lock()  # each request has its own thread

    def alive(self) -> bool:
        """Whether FLARE's process runs."""
        return any(kind == "party" for kind, _ in self._processes())

    def ready(self) -> bool:
        """Whether the server listens, or whether the site is connected to the server."""
        port, state = self.about["port"], psutil.CONN_LISTEN
        for _, process in self._processes():
            with suppress(psutil.Error):
                for link in process.net_connections("tcp"):
                    if self.serves and (link.status, link.laddr.port) == (state, port):
                        return True
                    if not self.serves and link.raddr and link.raddr.port == port:
                        return True
        return False

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        for pid in self.pids():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                words = " ".join(process.cmdline())
                yield "job" if any(name in words for name in JOBS) else "party", process

    def collect(self) -> Iterable[Metric]:
        with self.alone:
            return [*self._state(), *self._totals(), *self._runs(), *self._resources()]

    def _state(self) -> Iterator[Metric]:
        kind = "server" if self.serves else "site"
        about = {"version": __version__, "party": self.about["name"], "kind": kind}
        yield InfoMetricFamily("atoll", "The version of Atoll and the party.", about)
        ready = "Whether the server listens, or the site is connected."
        yield _gauge("atoll_ready", ready, float(self.ready()))
        end = certificate_end(self.kit).timestamp()
        soonest = "When the first certificate of the kit ends."
        yield _gauge("atoll_certificate_expiry_timestamp_seconds", soonest, end)
        free = float(shutil.disk_usage(self.kit).free)
        yield _gauge("atoll_disk_free_bytes", "Free space of the kit's disk.", free)
        logs = sum(path.stat().st_size for path in self.kit.glob("**/audit.jsonl"))
        yield _gauge("atoll_audit_log_bytes", "Size of the audit logs.", float(logs))

    def _totals(self) -> Iterator[Metric]:
        """Counters over all runs in the audit logs, so that no restart sets them back."""
        runs = self.activity.read()
        yield _counter("atoll_runs", "Runs that began.", float(len(runs)))
        rounds = float(sum(run.round for run in runs))
        yield _counter("atoll_rounds", "Complete rounds, or rounds that a site answered.", rounds)
        totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for run in runs:
            for name, peer in run.peers.items():
                for key in ("sent", "received", "refusals", "failures"):
                    totals[key][name] += getattr(peer, key)
        if isinstance(self.activity, SiteActivity):  # which does not log what it receives
            totals.pop("received", None)
            totals["refusals"] = {"server": self.activity.refusals}
            totals["failures"] = {"server": self.activity.failures}
            yield from _budget(self.activity)
        for key, name, text in (
            ("sent", "atoll_sent_bytes", "Bytes of packets sent to a party."),
            ("received", "atoll_received_bytes", "Bytes of packets received from a party."),
            ("refusals", "atoll_refusals", "Requests that the owner of a site did not allow."),
            ("failures", "atoll_failures", "Requests without an answer that can be used."),
        ):
            if key in totals:
                yield _counter(name, text, totals[key], "peer")

    def _runs(self) -> Iterator[Metric]:
        """Series of the newest runs, which are few: each label of a run costs Prometheus memory."""
        runs = self.activity.read()[-NEWEST:]
        known: dict[str, dict[str, float]] = defaultdict(dict)
        for run in runs:
            known["round"][run.name], known["last"][run.name] = run.round, run.last
            known["ended"][run.name] = float(run.ended)
            if run.rounds is not None:
                known["rounds"][run.name] = run.rounds
            if run.epsilon is not None:
                known["epsilon"][run.name] = run.epsilon
        yield _gauge("atoll_run_round", "Complete rounds of all seeds.", known["round"], "run")
        yield _gauge("atoll_run_rounds", "Rounds of one seed.", known["rounds"], "run")
        last = "When the run logged its last event."
        yield _gauge("atoll_run_last_event_timestamp_seconds", last, known["last"], "run")
        if self.serves:
            yield _gauge("atoll_run_ended", "Whether the run is complete.", known["ended"], "run")
            spent = "Epsilon against the server that a private run has spent."
            yield _gauge("atoll_run_epsilon", spent, known["epsilon"], "run")
            yield from _peers(runs[-1:])

    def _resources(self) -> Iterator[Metric]:
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for kind, process in self._processes():
            with suppress(psutil.Error), process.oneshot():
                used = {
                    "atoll_process_resident_memory_bytes": process.memory_info().rss,
                    "atoll_process_threads": process.num_threads(),
                    "atoll_process_open_fds": process.num_fds(),
                    "atoll_processes": 1,
                }
                for name, value in used.items():
                    found[name][kind] += value
        for name, values in found.items():
            yield _gauge(name, "Of FLARE's process and of its jobs, summed.", values, "process")


def _budget(site: SiteActivity) -> Iterator[Metric]:
    try:
        spent, limit, _ = site.budget()
    except AtollError:  # the policy cannot be read: the site itself reports it and answers nothing
        return
    yield _gauge("atoll_epsilon_spent", "Epsilon against the server, in all runs.", spent)
    if limit is not None:
        yield _gauge("atoll_epsilon_limit", "The most that the policy allows.", limit)


def _peers(newest: Sequence[RunActivity]) -> Iterator[Metric]:
    """The sites of the newest run."""
    peers = [pair for run in newest for pair in run.peers.items()]
    last = {name: peer.last for name, peer in peers if peer.last is not None}
    out = {name: float(bool(peer.out)) for name, peer in peers}
    text = "When the site answered last in the newest run."
    yield _gauge("atoll_last_answer_timestamp_seconds", text, last, "peer")
    yield _gauge("atoll_left_out", "Whether the newest run is without the site.", out, "peer")


Values = Mapping[str, float] | float


def _gauge(name: str, text: str, values: Values, label: str = "") -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=label.split()), values)


def _counter(name: str, text: str, values: Values, label: str = "") -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=label.split()), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for key, value in values.items() if isinstance(values, Mapping) else [("", values)]:
        family.add_metric([key] if key else [], value)
    return family


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds, for a client that sends nothing

    def log_message(self, *_: object) -> None:
        """Nothing: each scrape would be a line."""


@contextmanager
def serving(kit: Path, port: int | None, pids: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Serve metrics and health of a party while the block runs; without a port, serve nothing."""
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
        server = make_server(LOOPBACK, port, answer, ThreadingWSGIServer, _Handler)
    except OSError as error:
        why = f"port {port} of {LOOPBACK} cannot be used ({error.strerror})"
        raise ConfigError(f"{why}; choose another one for --metrics") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
