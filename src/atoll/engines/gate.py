"""A site's gate: the requests that its process of FLARE answers, and from whom.

FLARE's client prints files (`cat`), deletes folders and names its machine's software for whoever
asks in the right words. It trusts the server to check rights, and the server passes on what one
site sends to another. A kit names `SiteGate` in `local/atoll__p_resources.json`, so that every way
to start the site has it: the process answers only what a run needs, and only to the server.
"""

from __future__ import annotations

import re
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
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
