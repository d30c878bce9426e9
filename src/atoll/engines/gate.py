"""Gates: the requests that a party's process of FLARE answers, and from whom.

FLARE's client prints files (`cat`), deletes folders and names its machine's software for whoever
asks in the right words. It trusts the server to check rights, and the server passes on what one
site sends to another, and obeys a site that poses as one of the server's own jobs. A kit names its
gate in `local/atoll__p_resources.json`, so that every way to start the party has it: a site answers
only what a run needs, and only to the server; a server passes nothing on between sites.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
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
STARTS = (TrainingTopic.DEPLOY, TrainingTopic.START_JOB)
JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A job's number, which is the name of a folder in the kit: no other folder has such a name."""
CONFIG = "config/config_fed_client.json"
SIGNED = {
    f"{folder}.__nvfl_{file}"
    for folder in ("", "config/")
    for file in ("sig.json", "submitter.crt")
}
"""What an administrator's FLARE adds to each folder of a job: a signature and a certificate."""
FILES = {CONFIG, "config/", *SIGNED}
LONGEST_FILE, LONGEST_META = 1 << 16, 1 << 20
ROLES = ("project_admin", "lead")
UNUSED = (
    "resource_spec",
    "launcher_spec",
    "scope",
    "stats_pool_config",
    "custom_props",
    "edge_method",
)
"""What FLARE lets a job choose for its process at a site, and Atoll's job never does."""

INTERNAL = ("_net_manager", CellChannel.SERVER_PARENT_LISTENER)
"""Channels between the server's own processes, and for FLARE's network tests."""
ASKED = (ServerCommandNames.GET_TASK, ServerCommandNames.SUBMIT_UPDATE)
"""All that a site asks of a job on the server."""


def site_job(interval: float) -> dict[str, object]:
    """The configuration of a job at a site, which asks for work so often (in seconds)."""
    participant = {"path": "atoll.deploy.jobs.Participant", "args": {}}
    executors = [{"tasks": ["atoll"], "executor": participant}]
    job = {"format_version": 2, "executors": executors}
    return {**job, "default_task_fetch_interval": interval}


def job_text(config: dict[str, object]) -> str:
    """A configuration as a job's file has it."""
    return json.dumps(config, indent=1)


def is_own_job(archive: object) -> bool:
    """Whether an archive holds the job of `site_job` to the letter, and no other file."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:  # type: ignore[arg-type]
            found = opened.infolist()
            names = [file.filename for file in found]
            if len(names) > len(FILES) or any(file.file_size > LONGEST_FILE for file in found):
                return False
            text = opened.read(CONFIG)
        interval = json.loads(text)["default_task_fetch_interval"]
        own = isinstance(interval, float) and text == job_text(site_job(interval)).encode()
        return (
            own
            and 0.01 <= interval <= 60
            and FILES.issuperset(names)
            and len(set(names)) == len(names)
        )
    except Exception:  # zipfile raises many kinds for bytes that are no archive
        return False


def is_own_meta(meta: object, job: str) -> bool:
    """Whether a job's description is of that job, and chooses nothing about its process."""
    return (
        isinstance(meta, dict)
        and meta.get("job_id") == job
        and meta.get("submitter_role") in ROLES
        and not any(meta.get(name) for name in UNUSED)
        and len(json.dumps(meta, default=str)) <= LONGEST_META
    )


class Checked(RequestProcessor):  # type: ignore[misc]  # nvflare has no types
    """Answers a request as FLARE does, if it names a job by its number and holds no other job."""

    def __init__(self, inner: RequestProcessor) -> None:
        self.inner = inner

    def get_topics(self) -> list[str]:
        return list(self.inner.get_topics())

    def process(self, req: Message, app_ctx: object) -> Message:
        job = req.get_header(RequestHeader.JOB_ID)
        if job is not None and not (isinstance(job, str) and JOB.fullmatch(job)):
            return error_reply("a job's number is a UUID")
        about = req.get_header(RequestHeader.JOB_META)
        if req.topic in STARTS and (job is None or not is_own_meta(about, job)):
            return error_reply("a job is described as Atoll describes it")
        if req.topic == TrainingTopic.DEPLOY and not is_own_job(req.body):
            return error_reply("a job is Atoll's own configuration and no code")
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
