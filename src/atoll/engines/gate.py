"""Gates: the requests that a party's process of FLARE answers, and from whom.

FLARE's client prints files (`cat`), deletes folders and names its machine's software for whoever
asks in the right words. It trusts the server to check rights, and the server passes on what one
site sends to another, and obeys a site that poses as one of the server's own jobs. A kit names its
gate in `local/atoll__p_resources.json`, so that every way to start the party has it: a site answers
only what a run needs, and only to the server; a server passes nothing on between sites.
"""

from __future__ import annotations

import re
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.defs import RequestHeader, TrainingTopic
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

TOPICS = {
    TrainingTopic.ABORT,
    TrainingTopic.ABORT_TASK,
    TrainingTopic.CANCEL_RESOURCE,
    TrainingTopic.CHECK_RESOURCE,
    TrainingTopic.CHECK_STATUS,
    TrainingTopic.DEPLOY,
    TrainingTopic.NOTIFY_JOB_STATUS,
    TrainingTopic.START_JOB,
}
"""Requests that a run needs; FLARE has a dozen more."""
JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A job's number, which is the name of a folder in the kit: no other folder has such a name."""

INTERNAL = ("_net_manager", CellChannel.SERVER_PARENT_LISTENER)
"""Channels between the server's own processes, and for FLARE's network tests."""
ASKED = (ServerCommandNames.GET_TASK, ServerCommandNames.SUBMIT_UPDATE)
"""All that a site asks of a job on the server."""


class Checked(RequestProcessor):  # type: ignore[misc]  # nvflare has no types
    """Answers a request as FLARE does, unless it names a job by anything but a job's number."""

    def __init__(self, inner: RequestProcessor) -> None:
        self.inner = inner

    def get_topics(self) -> list[str]:
        return list(self.inner.get_topics())

    def process(self, req: Message, app_ctx: object) -> Message:
        job = req.get_header(RequestHeader.JOB_ID)
        if job is not None and not (isinstance(job, str) and JOB.fullmatch(job)):
            return error_reply("a job's number is a UUID")
        return self.inner.process(req, app_ctx)


class SiteGate(FLComponent):  # type: ignore[misc]  # nvflare has no types
    """Narrows the process that connects a site to the server; each job narrows its own."""

    def __init__(self) -> None:
        super().__init__()
        known = ClientRequestProcessors.request_processors
        known[:] = [Checked(one) for one in known if TOPICS.issuperset(one.get_topics())]

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_BOOTSTRAP:  # connected, but not registered yet
            close_to_peers(fl_ctx)


def close_to_peers(fl_ctx: FLContext) -> None:
    """Have this process answer the server and the site's own processes alone."""
    cell = fl_ctx.get_engine().get_cell()
    own = FQCN.get_root(cell.get_fqcn())
    cell.core_cell.add_incoming_request_filter(channel="*", topic="*", cb=refuse_peers, own=own)


def refuse_peers(message: Any, own: str) -> Any:
    """A refusal for the request of another site or an administrator; None for any other."""
    # An honest server lets no party send under the name of another one.
    origin = str(message.get_header(MessageHeaderKey.ORIGIN, ""))
    if FQCN.get_root(origin) in (FQCN.ROOT_SERVER, own):
        return None
    return make_reply(ReturnCode.UNAUTHENTICATED, error="a site answers its server alone")


class ServerGate(FLComponent):  # type: ignore[misc]  # nvflare has no types
    """Narrows the server's process, through which all messages of sites pass."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            core = fl_ctx.get_engine().get_cell().core_cell
            core.add_incoming_filter(channel="*", topic="*", cb=refuse_transit)


def refuse_transit(message: Any) -> Any:
    """A refusal for a message between two parties, or for the server's own business, else None."""
    origin, target = (
        FQCN.get_root(str(message.get_header(key, "")))
        for key in (MessageHeaderKey.ORIGIN, MessageHeaderKey.DESTINATION)
    )
    # A stream has the channel and the topic of its content in separate headers.
    channel, topic = (
        message.get_header(inner) or message.get_header(outer)
        for inner, outer in (
            (StreamHeaderKey.CHANNEL, MessageHeaderKey.CHANNEL),
            (StreamHeaderKey.TOPIC, MessageHeaderKey.TOPIC),
        )
    )
    strange = channel in INTERNAL or (channel == CellChannel.SERVER_COMMAND and topic not in ASKED)
    if origin == FQCN.ROOT_SERVER or (target in (FQCN.ROOT_SERVER, origin) and not strange):
        return None
    return make_reply(ReturnCode.UNAUTHENTICATED, error="the server answers runs alone")
