"""A site answers only what a run needs, and only to the server, which passes nothing on."""

from __future__ import annotations

import io
import json
import zipfile
from types import SimpleNamespace

import pytest
from nvflare.apis.event_type import EventType
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader, SysCommandTopic, TrainingTopic
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from atoll.deploy.kits import CLASSES
from atoll.engines.fleet import INTERVAL
from atoll.engines.gate import (
    CONFIG,
    SIGNED,
    TOPICS,
    ServerGate,
    SiteGate,
    job_text,
    refuse_peers,
    refuse_transit,
    site_job,
)

NUMBER = "1b4e28ba-2fa1-41d2-883f-0016d3cca427"


@pytest.fixture
def processors(monkeypatch):
    known = list(ClientRequestProcessors.request_processors)
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", known)
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


def ask(processors, topic, body, meta=META, job=NUMBER):
    """The answer of a site's gate; None where FLARE gets the request."""
    SiteGate()
    (gate,) = [one for one in processors if one.get_topics() == [topic]]
    gate.inner = SimpleNamespace(process=lambda req, app_ctx: None, get_topics=lambda: [topic])
    request = Message(topic, body)
    request.set_header(RequestHeader.JOB_ID, job)
    request.set_header(RequestHeader.JOB_META, meta)
    return gate.process(request, None)


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


@pytest.mark.parametrize(
    ("origin", "answered"),
    [
        ("server", True),
        (f"server.{NUMBER}", True),
        (f"bank-a.{NUMBER}", True),
        ("bank-b", False),
        (f"bank-b.{NUMBER}", False),
        ("server-2", False),
        ("bank-a-2", False),
        ("", False),
    ],
)
def test_a_site_answers_no_other_site(origin, answered, processors):
    filters = []
    core = SimpleNamespace(add_incoming_request_filter=lambda **given: filters.append(given))
    cell = SimpleNamespace(core_cell=core, get_fqcn=lambda: "bank-a")
    context = SimpleNamespace(get_engine=lambda: SimpleNamespace(get_cell=lambda: cell))
    SiteGate().handle_event(EventType.SYSTEM_BOOTSTRAP, context)
    (given,) = filters
    assert given == {"channel": "*", "topic": "*", "cb": refuse_peers, "own": "bank-a"}
    reply = refuse_peers(CellMessage({MessageHeaderKey.ORIGIN: origin}), own="bank-a")
    assert (
        reply is None
        if answered
        else reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.UNAUTHENTICATED
    )


JOB = f"server.{NUMBER}"


@pytest.mark.parametrize(
    ("origin", "target", "channel", "topic", "passed"),
    [
        ("bank-a", "server", CellChannel.SERVER_MAIN, "heart_beat", True),
        (f"bank-a.{NUMBER}", JOB, CellChannel.SERVER_COMMAND, "get_task", True),
        (f"bank-a.{NUMBER}", JOB, CellChannel.SERVER_COMMAND, "submit_update", True),
        (f"bank-a.{NUMBER}", "bank-a", CellChannel.AUX_COMMUNICATION, "x", True),
        ("admin", "server", CellChannel.HCI, "command", True),
        (JOB, "server", CellChannel.SERVER_PARENT_LISTENER, "heartbeat", True),
        ("server", "bank-a", CellChannel.CLIENT_MAIN, TrainingTopic.DEPLOY, True),
        ("bank-a", "bank-b", CellChannel.CLIENT_MAIN, SysCommandTopic.SHELL, False),
        ("bank-a", f"bank-b.{NUMBER}", CellChannel.CLIENT_COMMAND, "abort", False),
        ("bank-a", "server", CellChannel.SERVER_PARENT_LISTENER, "update_run_status", False),
        ("bank-a", "server", CellChannel.SERVER_PARENT_LISTENER, "get_clients", False),
        ("bank-a", "server", "_net_manager", "process_info", False),
        ("bank-a", JOB, CellChannel.SERVER_COMMAND, "abort", False),
        ("bank-a", JOB, CellChannel.SERVER_COMMAND, None, False),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_the_server_passes_nothing_on_and_runs_no_order_of_a_site(
    origin, target, channel, topic, passed, streamed
):
    filters = []
    core = SimpleNamespace(add_incoming_filter=lambda **given: filters.append(given))
    cell = SimpleNamespace(core_cell=core)
    context = SimpleNamespace(get_engine=lambda: SimpleNamespace(get_cell=lambda: cell))
    ServerGate().handle_event(EventType.SYSTEM_BOOTSTRAP, context)
    assert filters == [{"channel": "*", "topic": "*", "cb": refuse_transit}]
    head = {MessageHeaderKey.ORIGIN: origin, MessageHeaderKey.DESTINATION: target}
    where = {MessageHeaderKey.CHANNEL: channel, MessageHeaderKey.TOPIC: topic}
    if streamed:
        where = {MessageHeaderKey.CHANNEL: "stream", MessageHeaderKey.TOPIC: "data"}
        where |= {StreamHeaderKey.CHANNEL: channel, StreamHeaderKey.TOPIC: topic or "none"}
    reply = refuse_transit(CellMessage({**head, **where}))
    code = ReturnCode.UNAUTHENTICATED
    assert reply is None if passed else reply.get_header(MessageHeaderKey.RETURN_CODE) == code
