"""A site answers only what a run needs, and only to the server, which passes nothing on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from nvflare.apis.event_type import EventType
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader, SysCommandTopic, TrainingTopic
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from atoll.engines.gate import TOPICS, ServerGate, SiteGate, refuse_peers, refuse_transit

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
    SiteGate()
    (deploy,) = [one for one in processors if one.get_topics() == [TrainingTopic.DEPLOY]]
    asked = []
    deploy.inner = SimpleNamespace(process=lambda req, app_ctx: asked.append(req))
    request = Message(TrainingTopic.DEPLOY, b"")
    request.set_header(RequestHeader.JOB_ID, job)
    reply = deploy.process(request, None)
    assert asked == ([request] if job == NUMBER else [])
    assert job == NUMBER or "UUID" in str(reply.body)


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
