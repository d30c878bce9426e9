"""A site answers only what a run needs, and only to the server, which passes nothing on."""

from __future__ import annotations

import io
import json
import os
import zipfile
from types import SimpleNamespace

import pytest
from nvflare.fuel.f3.cellnet.core_cell import CoreCell, TargetMessage
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.cellnet.fqcn import FqcnInfo
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.f3.streaming.byte_streamer import TxTask
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.sec.audit import Auditor
from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader, SysCommandTopic, TrainingTopic
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from atoll.deploy.kits import CLASSES
from atoll.engines.fleet import INTERVAL
from atoll.engines.gate import (
    CONFIG,
    KEPT_JOBS,
    MOST_JOBS,
    SIGNED,
    TOPICS,
    ServerGate,
    SiteGate,
    job_text,
    site_job,
)

NUMBER = "1b4e28ba-2fa1-41d2-883f-0016d3cca427"


@pytest.fixture
def processors(monkeypatch):
    known = list(ClientRequestProcessors.request_processors)
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", known)
    monkeypatch.setattr(CoreCell, "process_message", CoreCell.process_message)
    monkeypatch.setattr(TxTask, "handle_ack", TxTask.handle_ack)
    monkeypatch.setattr(Auditor, "add_event", Auditor.add_event)
    return known


def test_a_site_has_no_shell_and_deletes_no_folder(processors):
    before = {topic for one in processors for topic in one.get_topics()}
    assert {SysCommandTopic.SHELL, TrainingTopic.DELETE_RUN} < before  # FLARE still has them
    SiteGate()
    assert {topic for one in processors for topic in one.get_topics()} == TOPICS


@pytest.mark.parametrize("job", ["atoll", "local", "startup", "..", "", f"{NUMBER}/..", 3, NUMBER])
def test_a_job_has_a_number_and_names_no_folder_of_the_kit(job, processors):
    reply = ask(processors, TrainingTopic.DEPLOY, archive(), META, job)
    assert reply is None if job == NUMBER else "UUID" in str(reply.body)


META = {"job_id": NUMBER, "submitter_role": "project_admin", "resource_spec": {}}
OWN = job_text(site_job(INTERVAL))
SIGNATURES = {"config/": "", **dict.fromkeys(SIGNED, "{}")}


def archive(files=(), **more):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, text in {CONFIG: OWN, **dict(files), **more}.items():
            file.writestr(name, text)
    return content.getvalue()


def engine(kit="/nowhere", *running):
    """The part of FLARE that a request reaches at a site."""
    args = SimpleNamespace(workspace=str(kit))
    return SimpleNamespace(args=args, get_all_job_ids=lambda: list(running))


def ask(processors, topic, body, meta=META, job=NUMBER, there=None, **heads):
    """Return the answer of a site's gate, or None if FLARE gets the request."""
    SiteGate()
    (gate,) = [one for one in processors if one.get_topics() == [topic]]
    gate.inner = SimpleNamespace(process=lambda req, app_ctx: None, get_topics=lambda: [topic])
    request = Message(topic, body)
    request.set_header(RequestHeader.JOB_ID, job)
    request.set_header(RequestHeader.JOB_META, meta)
    for name, value in heads.items():
        request.set_header(name, value)
    return gate.process(request, there or engine())


def changed(place, value):
    """Atoll's job with another value at one place."""
    job = site_job(INTERVAL)
    inner = job["executors"][0]["executor"]
    {"path": inner, "args": inner}.get(place, job)[place] = value
    return job_text(job)


def test_a_site_takes_the_job_that_the_administrator_writes(processors):
    assert site_job(INTERVAL)["executors"][0]["executor"]["path"] == CLASSES["site"][0]
    for body in (archive(), archive(SIGNATURES), archive({CONFIG: job_text(site_job(0.5))})):
        assert ask(processors, TrainingTopic.DEPLOY, body) is None


EVIL = [
    ("custom/sitecustomize.py", "print()"),
    ("config/evil.py", "print()"),
    ("config/config_fed_client.conf", OWN),
    ("config/config_fed_client.yml", "executors: []"),
    ("p/app_site-1/custom/sitecustomize.py", "print()"),
    ("../x", ""),
    ("/x", ""),
    ("config/.__nvfl_sig.json", "x" * 70000),
    (CONFIG, "{}"),
    (CONFIG, "no JSON"),
    (CONFIG, OWN + " "),
    (CONFIG, OWN.replace("{", '{"components": [],', 1)),
    (CONFIG, changed("path", "subprocess.Popen")),
    (CONFIG, changed("args", {"order": "x"})),
    (CONFIG, changed("components", [{"id": "x", "path": "os.system", "args": {}}])),
    (CONFIG, changed("default_task_fetch_interval", 0.0)),
    (CONFIG, changed("default_task_fetch_interval", float("nan"))),
    (CONFIG, changed("default_task_fetch_interval", 1e9)),
    (CONFIG, changed("default_task_fetch_interval", "{x}")),
]


@pytest.mark.parametrize(("file", "text"), EVIL)
def test_a_site_takes_no_code_from_the_server(file, text, processors):
    for body in (archive({file: text}), archive({**SIGNATURES, file: text})):
        reply = ask(processors, TrainingTopic.DEPLOY, body)
        assert "Atoll's own configuration and no code" in json.dumps(reply.body)


def test_a_site_takes_no_bytes_that_are_not_one_archive(processors):
    twice = io.BytesIO(archive())
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(twice, "a") as file:
        file.writestr(CONFIG, OWN)
    none = archive()[:40], b"", b"no archive", "text", None, 3, [], {"a": b""}
    for body in (*none, twice.getvalue()):
        assert "no code" in json.dumps(ask(processors, TrainingTopic.DEPLOY, body).body)


@pytest.mark.parametrize("topic", [TrainingTopic.DEPLOY, TrainingTopic.START_JOB])
@pytest.mark.parametrize(
    "lie",
    [
        {"submitter_role": "super"},  # FLARE lets it do anything
        {"job_id": "../../elsewhere"},  # the folder whose code FLARE would load
        {"launcher_spec": {"site-1": {"docker": {"image": "evil"}}}},
        {"resource_spec": {"site-1": {"num_of_gpus": 8}}},
        {"scope": "public"},
        {"name": "x" * (1 << 21)},
        None,
        "text",
        [],
    ],
)
def test_a_job_chooses_nothing_about_its_process(topic, lie, processors):
    meta = {**META, **lie} if isinstance(lie, dict) else lie
    assert ask(processors, topic, archive()) is None
    assert "described" in json.dumps(ask(processors, topic, archive(), meta).body)
    assert "described" in json.dumps(ask(processors, topic, archive(), job=None).body)


def test_jobs_of_a_server_fill_no_disk_and_no_memory(processors, tmp_path):
    names = [f"{number:08x}{NUMBER[8:]}" for number in range(KEPT_JOBS + 5)]
    for age, name in enumerate(["atoll", "startup", *names]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (age, age))
    kit = engine(tmp_path, names[0])
    assert ask(processors, TrainingTopic.DEPLOY, archive(), there=kit) is None
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"atoll", "startup", names[0], *names[6:]}  # the first one runs
    long = ask(processors, TrainingTopic.DEPLOY, archive(), there=kit, app_name="x" * 10_000)
    assert "too long" in json.dumps(long.body)  # FLARE writes it into a file
    full = engine(tmp_path, *names[:MOST_JOBS])
    assert "at a time" in json.dumps(ask(processors, TrainingTopic.START_JOB, "", there=full).body)
    assert ask(processors, TrainingTopic.START_JOB, "", there=kit) is None


def test_requests_of_a_server_are_in_no_log_without_a_limit(processors, tmp_path):
    SiteGate()
    log = Auditor(str(tmp_path / "audit.log"))
    assert log.add_event(user="x" * 10_000, action=TrainingTopic.CHECK_STATUS) == ""
    assert (tmp_path / "audit.log").read_text() == ""
    log.close()


@pytest.mark.parametrize("gate", [ServerGate, SiteGate])
def test_no_party_calls_an_address_of_another_ones_choice(gate, processors):
    """There is no TLS on such a connection: its other end could pose as any party."""
    gate()
    own, other = ("server", "bank-a") if gate is ServerGate else ("bank-a", "server")
    offer = message("task", "heart_beat", other, own, kind="reply")
    offer.set_header(MessageHeaderKey.FROM_CELL, "elsewhere")
    offer.set_header(MessageHeaderKey.CONN_URL, "tcp://10.0.0.1:22")
    assert Received(own).passes(offer, other, other)
    assert offer.get_header(MessageHeaderKey.CONN_URL) is None


JOB = f"server.{NUMBER}"
WORKER = f"bank-a.{NUMBER}"
NET = [
    "bulk_item", "bulk_test", "cells", "change_root", "comm_config", "config_vars", "conns",
    "echo", "heartbeat", "list_pools", "msg_stats", "peers", "process_info", "route",
    "show_pool", "speed", "start_route", "stop", "stop_cell", "stress", "url_use",
]  # fmt: skip
EVERYWHERE = {
    *(f"_net_manager:{topic}" for topic in NET),
    "aux_communication:*",
    "cellnet.channel:bulk",
    "cellnet.channel:bye",
    "credential_manager:key_exchange",
    "sm__STREAM:sm__ACK",
    "sm__STREAM:sm__DATA",
    "sm__STREAM:sm__ERROR",
}
WORK = {"server_command:get_task", "server_command:submit_update"}
SITE = EVERYWHERE | WORK | {"admin:*"}
"""What the process of a site registers; tests/e2e/test_federation_peers.py looks into one."""
SITE_JOB = EVERYWHERE | WORK | {
    "client_command:*",
    "download_service__:download_service__download",
    "download_service__:download_service__source_failure",
}  # fmt: skip
SERVER = EVERYWHERE | {
    "download_service__:download_service__download",
    "download_service__:download_service__source_failure",
    "hci_channel:*",
    "server_parent_listener:*",
    *(f"task:{topic}" for topic in ("challenge", "heart_beat", "quit", "register")),
    "task:report_job_failure",
}
AUX = [
    "ObjectStreamer.Abort", "ObjectStreamer.Request", "RM.RELIABLE_REPLY", "RM.RELIABLE_REQUEST",
    "__do_task__", "__end_run__", "__job_heartbeat__", "__sync_runner__", "__task_check__",
    "fed.event",
]  # fmt: skip
"""Topics of auxiliary messages that have a handler in some process."""
COMMANDS = ["check_status", "abort", "abort_task", "shutdown", "show_stats", "configure_job_log"]


def requests(registered):
    """A channel and a topic for each handler, several for one that reads the topic itself."""
    topics = {"aux_communication": AUX, "client_command": COMMANDS, "hci_channel": ["command"]}
    for name in sorted(registered - {"sm__STREAM:sm__DATA"}):
        channel, topic = name.split(":")
        yield from (
            (channel, one) for one in (topics.get(channel, ["x"]) if topic == "*" else [topic])
        )


def message(channel, topic, origin="server", target="bank-a", streamed=False, kind="req"):
    head = {MessageHeaderKey.ORIGIN: origin, MessageHeaderKey.DESTINATION: target}
    where = {MessageHeaderKey.CHANNEL: channel, MessageHeaderKey.TOPIC: topic}
    if streamed:
        where = {MessageHeaderKey.CHANNEL: "sm__STREAM", MessageHeaderKey.TOPIC: "sm__DATA"}
        where |= {StreamHeaderKey.CHANNEL: channel, StreamHeaderKey.TOPIC: topic}
    return CellMessage({**head, **where, MessageHeaderKey.MSG_TYPE: kind})


class Received:
    """A cell of FLARE behind a gate, and the messages that got through to it."""

    def __init__(self, fqcn):
        self.cell = CoreCell.__new__(CoreCell)
        self.cell.my_info, self.found = FqcnInfo(fqcn), []
        self.cell._process_received_msg = lambda *given: self.found.append(given[-1])

    def passes(self, message, sender="server", name=None):
        props = {} if name is None else {"peer_cn": name}
        connection = SimpleNamespace(get_conn_properties=lambda: props)
        before = len(self.found)
        self.cell.process_message(Endpoint(sender), connection, 1, message)
        return len(self.found) > before


def passed(registered, cell, streamed, **who):
    sender, name = who.pop("sender"), who.pop("name", None)
    return {
        f"{channel}:{topic}"
        for channel, topic in requests(registered)
        if cell.passes(message(channel, topic, streamed=streamed, **who), sender, name)
    }


STREAM = {"cellnet.channel:bye", "sm__STREAM:sm__ACK", "sm__STREAM:sm__ERROR"}


@pytest.mark.parametrize("streamed", [False, True])
def test_every_handler_of_a_site_is_open_by_name_or_closed(streamed, processors):
    SiteGate()
    to_parent, to_job = (
        {"origin": origin, "sender": "server", "target": target}
        for origin, target in (("server", "bank-a"), (JOB, WORKER))
    )
    end = "aux_communication:__end_run__"
    assert passed(SITE, Received("bank-a"), streamed, **to_parent) == STREAM | {"admin:x", end}
    assert passed(SITE_JOB, Received(WORKER), streamed, **to_job) == STREAM | {end}
    own = {"origin": "bank-a", "sender": "bank-a", "target": WORKER}
    assert "client_command:abort" in passed(SITE_JOB, Received(WORKER), streamed, **own)
    # A lying server sends under the site's own name.
    lie = {"origin": "bank-a", "sender": "server", "target": WORKER}
    assert passed(SITE_JOB, Received(WORKER), streamed, **lie) == set()
    for other in ("bank-b", f"bank-b.{NUMBER}", "server-2", "bank-a-2", ""):
        peer = {"origin": other, "sender": "server", "target": "bank-a"}
        assert passed(SITE, Received("bank-a"), streamed, **peer) == set()


TASKS = {f"task:{topic}" for topic in ("challenge", "register")}


@pytest.mark.parametrize("streamed", [False, True])
def test_every_handler_of_a_server_is_open_by_name_or_closed(streamed, processors):
    ServerGate()
    cell, site = Received("server"), {"sender": WORKER, "name": "bank-a"}
    to_parent = {"origin": "bank-a", "target": "server", **site}
    work = {
        *WORK,
        *(f"aux_communication:__{t}__" for t in ("job_heartbeat", "sync_runner", "task_check")),
    }
    more = {f"task:{topic}" for topic in ("heart_beat", "quit", "report_job_failure")}
    assert passed(SERVER | WORK, cell, streamed, **to_parent) == STREAM | TASKS | more | work
    job = {"origin": WORKER, "target": JOB, **site}
    assert passed(EVERYWHERE | WORK, cell, streamed, **job) == STREAM | work
    orders = {
        f"server_command:{topic}" for topic in ("abort", "app_command", "handle_dead_job", "x")
    }
    assert passed(orders, cell, streamed, **job) == set()
    for target in ("bank-b", f"bank-b.{NUMBER}", "bank-a", "", "admin"):
        assert passed(SITE | SITE_JOB, cell, streamed, **{**job, "target": target}) == set()
    for origin in ("server", JOB, "bank-b"):  # FLARE does not compare it with the certificate
        assert passed(SERVER, cell, streamed, **{**to_parent, "origin": origin}) == set()
    admin = {"origin": "_admin_1", "sender": "_admin_1", "target": "server"}
    found = passed(SERVER, cell, streamed, **admin, name="admin@atoll.federation")
    files = {f"aux_communication:ObjectStreamer.{topic}" for topic in ("Abort", "Request")}
    assert found == STREAM | TASKS | files | {
        "hci_channel:command", "download_service__:download_service__download",
    }  # fmt: skip
    # A site can connect under such a name, but with its own certificate.
    assert "hci_channel:command" not in passed(SERVER, cell, streamed, **admin, name="bank-a")
    own = {"origin": JOB, "sender": JOB, "target": "server"}
    assert "server_parent_listener:x" in passed(SERVER, cell, streamed, **own)


def test_a_message_that_only_claims_to_be_a_stream_counts_as_it_is(processors):
    ServerGate()
    place = {"origin": "bank-a", "target": "server"}
    lie = message("_net_manager", "stop", **place)
    lie.set_header(StreamHeaderKey.CHANNEL, CellChannel.SERVER_MAIN)
    lie.set_header(StreamHeaderKey.TOPIC, "heart_beat")
    assert not Received("server").passes(lie, "bank-a", "bank-a")
    odd = message(["_net_manager"], {"a": 1}, **place)
    assert not Received("server").passes(odd, "bank-a", "bank-a")


def test_a_bulk_is_refused_whatever_it_holds(processors):
    SiteGate()
    inner = TargetMessage("bank-a", "aux_communication", "__end_run__", CellMessage())
    bulk = message("cellnet.channel", "bulk")
    bulk.payload = [inner.to_dict()]
    assert not Received("bank-a").passes(bulk)


def test_a_reply_passes(processors):
    SiteGate()
    assert Received("bank-a").passes(message("task", "heart_beat", kind="reply"))


def test_a_site_answers_no_request_to_another_site(processors):
    """A request to many sites has one number, and FLARE believes who it was returned from."""
    ServerGate()
    for target, passes in (("bank-a", True), (WORKER, True), ("bank-b", False), ("server", False)):
        returned = message("admin", "x", "bank-a", "server", kind="return")
        first = {MessageHeaderKey.DESTINATION: target}
        returned.set_header(MessageHeaderKey.ORIGINAL_HEADERS, first)
        assert Received("server").passes(returned, "bank-a", "bank-a") == passes
    returned.set_header(MessageHeaderKey.ORIGINAL_HEADERS, ["bank-b"])
    assert not Received("server").passes(returned, "bank-a", "bank-a")


def test_a_site_cannot_claim_the_errors_that_end_a_job(processors):
    ServerGate()
    error = message("sm__STREAM", "sm__ERROR", origin=WORKER, target=JOB)
    error.set_header(StreamHeaderKey.ERROR_TYPE, "BlobSizeError")
    assert Received("server").passes(error, WORKER, "bank-a")
    assert error.get_header(StreamHeaderKey.ERROR_TYPE) is None


def test_a_site_cannot_end_the_streams_to_another(processors):
    ServerGate()
    stopped, task = [], TxTask.__new__(TxTask)
    task.sid, task.target, task.channel, task.topic = 7, WORKER, "return_only", "x"
    task.stop = lambda error, notify: stopped.append(str(error))
    for origin in (f"bank-b.{NUMBER}", "bank-b", "server", WORKER):
        error = message("sm__STREAM", "sm__ACK", origin=origin, target=JOB)
        error.set_header(StreamHeaderKey.ERROR_MSG, "no")
        task.handle_ack(error)
    assert len(stopped) == 1
    assert f"Received error from {WORKER}: no" in stopped[0]
