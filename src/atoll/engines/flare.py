"""NVIDIA FLARE as the transport. Only this file and `engines/gate.py` import nvflare.

On the server a `Controller` gives each site its own task and waits for the answers. At a site an
`Executor` answers. A task carries a packet: a head of plain values as JSON, and a body of named
arrays (`engines/codec.py`). So no packet contains pickled objects or code.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.sec.audit import AuditService
from nvflare.private.fed.server.server_runner import ServerRunner

from atoll.core.errors import AtollError, ClientLost, WireError
from atoll.engines.fleet import (
    BAD,
    INTERVAL,
    LOST,
    Aborted,
    Answers,
    Failure,
    Packet,
    failure_in,
    one_line,
    pause,
)
from atoll.engines.gate import check_receipts, close_site

TASK = "atoll"
HEAD = 16 << 20  # characters of the longest head, which may list a site's column names
PROGRESS, JOINED = "atoll.progress", "atoll.joined"  # commands that a running job answers


def to_shareable(packet: Packet) -> Shareable:
    """Convert a packet to FLARE's type."""
    return Shareable({"head": json.dumps(packet.head), "body": packet.body})


def from_shareable(shareable: Any) -> Packet:
    """Convert FLARE's type to a packet. Raise a `WireError` for any other content."""
    try:
        if len(shareable["head"]) > HEAD:
            raise TypeError("a head is too long")
        # Unlike Python's own JSON reader, this one refuses text that is not Unicode.
        head = msgspec.json.decode(shareable["head"], type=dict[str, Any])
        body = shareable["body"]
        if not isinstance(body, bytes):
            raise TypeError("a packet is an object and bytes")
    except (KeyError, TypeError, ValueError, RecursionError, msgspec.DecodeError) as error:
        raise WireError("a message was refused: it is not an Atoll packet") from error
    return Packet(head, body)


def process_name(token: str) -> str:
    """Return a name for a site's process: a hash that does not reveal the site's secret token."""
    return hashlib.sha256(token.encode()).hexdigest()[:12]


@dataclass(eq=False)
class _Call:
    """One packet that was sent to one site, and the answer, or None before it arrives."""

    task: Task
    answer: Packet | Failure | None = None


class FlareFleet:
    """The sites of one job (`engines.fleet.Fleet`)."""

    def __init__(self, controller: FleetController, fl_ctx: FLContext, stop: Signal) -> None:
        self.controller, self.fl_ctx, self.stop = controller, fl_ctx, stop
        self.changed = threading.Condition()
        self.gone: set[str] = set()
        self.calls: dict[str, _Call] = {}  # of the current step
        self.pings: dict[str, _Call] = {}
        self.runner = fl_ctx.get_prop(FLContextKey.RUNNER)

    def _connected(self) -> set[str]:
        return {client.name for client in self.fl_ctx.get_engine().get_clients()}

    def map(self, step: str, packets: Mapping[str, Packet], timeout: float) -> Answers:
        there = self._connected()
        self.calls = calls = dict[str, _Call]()
        for site in packets.keys() & there:
            calls[site] = self._send(site, packets[site])
        began = time.monotonic()
        with self.changed:
            while not self.stop.triggered and (left := began + timeout - time.monotonic()) > 0:
                waiting = [s for s, c in calls.items() if c.answer is None and s not in self.gone]
                if not waiting:
                    break
                # Sites that have answered ask for work less often while a step takes long.
                self.runner.config.task_request_interval = pause(timeout - left)
                self.changed.wait(min(0.2, left))
        self.runner.config.task_request_interval = INTERVAL
        if self.stop.triggered:
            raise Aborted("the job was stopped; the run is saved up to the last complete round")
        replies: dict[str, Packet] = {}
        away = Failure(LOST, "it is not connected")
        failures = {site: away for site in packets if site not in there}
        for site, call in calls.items():
            if isinstance(call.answer, Packet):
                replies[site] = call.answer
            elif isinstance(call.answer, Failure):
                failures[site] = call.answer
            else:
                self.controller.cancel_task(call.task)
                late = f"no answer to '{step}' within {timeout:g} s"
                failures[site] = Failure(LOST, "its process is gone" if site in self.gone else late)
        return replies, failures

    def _send(self, site: str, packet: Packet) -> _Call:
        call: _Call

        def arrived(client_task: ClientTask, fl_ctx: FLContext) -> None:
            answer = _answer(client_task.result)
            client_task.result = None  # frees the arrays, because FLARE keeps finished tasks
            with self.changed:
                call.answer = answer
                self.changed.notify_all()

        call = _Call(Task(name=TASK, data=to_shareable(packet), result_received_cb=arrived))
        self.controller.send(task=call.task, fl_ctx=self.fl_ctx, targets=[site])
        return call

    def back(self, site: str) -> bool:
        if site not in self._connected() - self.gone:
            return False
        if site not in self.pings:
            # The packet waits at the server until the site asks for work again.
            self.pings[site] = self._send(site, Packet({"do": "ping"}, b""))
        if self.pings[site].answer is None:
            return False
        del self.pings[site]
        return True

    def mark(self, site: str, *, gone: bool) -> None:
        """Store FLARE's report that a site's process is gone, or that it is back."""
        with self.changed:
            self.gone = self.gone | {site} if gone else self.gone - {site}
            self.changed.notify_all()

    def refuse(self, site: str, reason: str) -> None:
        """Count a site as failed in the current step, unless it has already answered."""
        with self.changed:
            call = self.calls.get(site)
            if call is None or call.answer is not None:
                return
            call.answer = Failure(BAD, reason)
            self.changed.notify_all()
        self.controller.cancel_task(call.task)

    def close(self) -> None:
        self.controller.cancel_all_tasks()


def read_updates(fleet: FlareFleet) -> None:
    """Turn an update that cannot be decoded, or that asks to end the job, into a site's failure.

    FLARE would end the job's process in the first case, and the run in the second.
    """
    decode = cell.decode_payload

    def decode_payload(message: Any, *args: object, **options: object) -> None:
        head = message.get_header
        asked = head(StreamHeaderKey.CHANNEL), head(StreamHeaderKey.TOPIC)
        if asked != (CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE):
            decode(message, *args, **options)
            return
        try:
            decode(message, *args, **options)
            if message.payload.get_return_code() not in ServerRunner.ABORT_RETURN_CODES:
                return
        except Exception:  # a decoder may raise any error
            logging.getLogger(__name__).exception("an update cannot be decoded")
        site = FQCN.get_root(str(head(MessageHeaderKey.ORIGIN)))
        fleet.refuse(site, "its answer cannot be read, or asks to end the job; see its log")
        message.payload = Shareable()  # FLARE drops it, because it belongs to no task

    cell.decode_payload = decode_payload


def _answer(result: object) -> Packet | Failure:
    if not isinstance(result, Shareable) or result.get_return_code() != ReturnCode.OK:
        code = result.get_return_code() if isinstance(result, Shareable) else "nothing"
        return Failure(BAD, f"it answered with {one_line(code, 100)}; see its log")
    try:
        packet = from_shareable(result)
    except WireError as error:
        return Failure(BAD, str(error))
    if "failure" in packet.head:
        return failure_in(packet.head)
    return packet


class FleetController(Controller):  # type: ignore[misc]  # nvflare has no types
    """Run `main` on the server, with the job's sites as a fleet.

    `order` is the text of the administrator's request. Only `main` reads it.
    """

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.fleet: FlareFleet | None = None
        self.progress: dict[str, object] = {}

    @abstractmethod
    def main(self, fleet: FlareFleet, kit: Path, out: Path) -> None:
        """Run the server's program.

        `kit` is the server's folder, which outlives the job. An administrator can download `out`.
        """

    def start_controller(self, fl_ctx: FLContext) -> None:
        AuditService.close()  # FLARE's task log is unlimited, and Atoll's audit log has more
        engine = fl_ctx.get_engine()
        joined = {client.name: process_name(client.token) for client in engine.get_clients()}
        engine.register_app_command(PROGRESS, lambda *_args, **_more: dict(self.progress))
        engine.register_app_command(JOINED, lambda *_args, **_more: joined)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        workspace = fl_ctx.get_engine().get_workspace()
        self.fleet = FlareFleet(self, fl_ctx, abort_signal)
        read_updates(self.fleet)
        check_receipts()
        out = Path(workspace.get_run_dir(fl_ctx.get_job_id())) / "atoll"
        try:
            self.main(self.fleet, Path(workspace.get_root_dir()), out)
        finally:
            self.fleet.close()

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def process_result_of_unknown_task(self, *_args: object, **_options: object) -> None:
        """Ignore an answer after its deadline, because the round continued without it."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if self.fleet is None:
            return
        if event_type == EventType.CLIENT_DISCONNECTED:
            self.fleet.mark(fl_ctx.get_prop(FLContextKey.DISCONNECTED_CLIENT_NAME), gone=True)
        elif event_type == EventType.CLIENT_RECONNECTED:
            self.fleet.mark(fl_ctx.get_prop(FLContextKey.RECONNECTED_CLIENT_NAME), gone=False)


class SiteExecutor(Executor):  # type: ignore[misc]  # nvflare has no types
    """Answer packets at a site."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Callable[[Packet], Packet] | None = None
        close_site()  # before FLARE connects this process

    @abstractmethod
    def open(self, kit: Path) -> Callable[[Packet], Packet]:
        """Return a function that answers packets. `kit` is the site's own folder."""

    def sent(self) -> None:
        """React to an answer that has left. By default nothing happens."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.AFTER_SEND_TASK_RESULT:
            self.sent()

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        if task_name != TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        try:
            if self.answer is None:
                AuditService.close()  # as on the server
                root = fl_ctx.get_engine().get_workspace().get_root_dir()
                self.answer = self.open(Path(root))
            packet = from_shareable(shareable)
        except WireError as error:
            return to_shareable(Packet({"failure": BAD, "reason": str(error)}, b""))
        except AtollError as error:  # its text may quote the owner's files
            logging.getLogger(__name__).error("%s", error)
            reason = "it cannot open its data or its policy; its log says why"
            return to_shareable(Packet({"failure": BAD, "reason": reason}, b""))
        return to_shareable(self.answer(packet))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress FLARE's connection messages, and its tracebacks of errors that it also raises."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


class AdminSession:
    """An administrator's session with the server: submit, watch, stop, download."""

    def __init__(self, kit: Path, user: str, timeout: float = 20.0) -> None:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        logging.getLogger().setLevel(logging.CRITICAL)  # FLARE logs each attempt to connect
        try:
            with _quiet():
                self.session = new_secure_session(user, str(kit), timeout=timeout)
        except Exception as error:  # FLARE raises several types, some of them plain exceptions
            if "registration" in str(error):
                hint = "use the administrator's kit of this federation"
                raise ClientLost(f"the server refuses the kit {kit} ({error}); {hint}") from error
            raise ClientLost(
                f"the server does not answer the kit {kit} ({error}); start it with `atoll "
                "federate server`, or check the address"
            ) from error

    def _ask(self, action: Callable[[], Any]) -> Any:
        try:
            with _quiet():
                return action()
        except Exception as error:
            raise ClientLost(f"the server does not answer any more: {error}") from error

    def connected(self) -> dict[str, str]:
        """Return the names of the connected sites, each with the name of its process."""
        reply = self._ask(lambda: self.session.do_command("check_status server"))
        if "meta" not in reply:
            raise ClientLost(f"the server does not answer any more: {reply.get('details', reply)}")
        for part in reply.get("data", ()):
            head, *rows = part.get("rows") or [[]]
            if "TOKEN" in head:
                name, token = head.index("CLIENT"), head.index("TOKEN")
                return {row[name]: process_name(row[token]) for row in rows}
        return {}

    def last_seen(self) -> dict[str, float]:
        """Return the time of each connected site's last heartbeat, in seconds since 1970."""
        clients = self._ask(self.session.get_system_info).client_info
        return {client.name: client.last_connect_time for client in clients}

    def submit(self, job: Path, token: str) -> str:
        """Submit a job folder. Return its ID, or the ID of the first job with the same token."""
        return str(self._ask(lambda: self.session.submit_job(str(job), submit_token=token)))

    def status(self, job: str) -> str:
        """Return FLARE's name of a job's state."""
        return str(self._ask(lambda: self.session.get_job_status(job)))

    def jobs(self, name: str = "") -> list[dict[str, Any]]:
        """Return the server's jobs, newest first: all of them, or those with the given name."""
        found = self._ask(lambda: self.session.list_jobs(name_prefix=name or None, reverse=True))
        return [job for job in found if name in ("", job["job_name"])]

    def progress(self, job: str) -> dict[str, object]:
        """Return a running job's progress. It is {} before the first report and after the end."""
        return self._told(job, PROGRESS)

    def joined(self, job: str) -> dict[str, object]:
        """Return the sites that a running job began with, each with the name of its process."""
        return self._told(job, JOINED)

    def _told(self, job: str, command: str) -> dict[str, object]:
        try:
            with _quiet():
                return dict(self.session.do_app_command(job, command, {}) or {})
        except Exception:  # not running, just starting or just ended; `status` reports it
            return {}

    def abort(self, job: str) -> None:
        self._ask(lambda: self.session.abort_job(job))

    def remove(self, site: str) -> None:
        """Let the server refuse a site from now on, even after a restart."""
        self._ask(lambda: self.session.disable_client(site))

    def download(self, job: str, to: Path) -> Path:
        """Download the job's folder from the server into `to`, and return its path there."""
        to.mkdir(parents=True, exist_ok=True)
        return Path(self._ask(lambda: self.session.download_job_result(job, str(to))))

    def close(self) -> None:
        try:
            self.session.close()
        except Exception:  # the server may be gone already
            logging.getLogger(__name__).debug("the session could not be closed", exc_info=True)
