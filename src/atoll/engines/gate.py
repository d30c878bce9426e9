"""Gates: filters for the requests that a party's FLARE process answers, and for their senders.

FLARE's client prints files (`cat`), deletes folders and names its machine's software for any party
that knows the request. It relies on the server to check permissions. The server forwards messages
between sites, and obeys a site that poses as one of the server's own jobs. A kit names its gate in
`local/atoll__p_resources.json`, so each start of the party loads it. A gate drops another party's
request before FLARE processes it, unless a list contains the request's channel and topic.
"""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ReservedTopic, ServerCommandNames
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import (
    CellChannel,
    CellChannelTopic,
    MessageHeaderKey,
    MessageType,
)
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.f3.streaming.byte_streamer import TxTask
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC
from nvflare.fuel.f3.streaming.stream_const import (
    STREAM_ACK_TOPIC,
    STREAM_CHANNEL,
    STREAM_DATA_TOPIC,
    STREAM_ERROR_TOPIC,
    StreamHeaderKey,
)
from nvflare.fuel.sec.audit import Auditor
from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.defs import RequestHeader, TrainingTopic
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.stream_runner import TOPIC_STREAM_ABORT, TOPIC_STREAM_REQUEST

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
"""Requests that a run needs. FLARE has a dozen more."""
STARTS = (TrainingTopic.DEPLOY, TrainingTopic.START_JOB)
JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A job's ID, which is also the name of a folder in the kit. No other folder has such a name."""
CONFIG = "config/config_fed_client.json"
SIGNED = {
    f"{folder}.__nvfl_{file}"
    for folder in ("", "config/")
    for file in ("sig.json", "submitter.crt")
}
"""Files that an administrator's FLARE adds to each job folder: a signature and a certificate."""
FILES = {CONFIG, "config/", *SIGNED}
LONGEST_FILE, LONGEST_META = 1 << 16, 1 << 20
LONGEST_APP = 200  # characters of the name that FLARE writes into a job's folder
MOST_JOBS = 8  # processes at a site; an honest server has 4 jobs at a time
KEPT_JOBS = 100  # folders of old jobs in a kit, which contain logs
ROLES = ("project_admin", "lead")
UNUSED = (
    "resource_spec",
    "launcher_spec",
    "scope",
    "stats_pool_config",
    "custom_props",
    "edge_method",
    "byoc",
)
"""Settings of a job's process at a site that FLARE allows, and that Atoll's job never uses."""

ANY = "*"
COMMON = {
    (STREAM_CHANNEL, STREAM_ACK_TOPIC),
    (STREAM_CHANNEL, STREAM_ERROR_TOPIC),
    (CellChannel.CELLNET, CellChannelTopic.Bye),
    (CellChannel.RETURN_ONLY, ANY),  # a reply
}
"""Channels and topics that any party may use. Bulk messages and network tests are excluded."""
TO_SITE = {
    *COMMON,
    (CellChannel.CLIENT_MAIN, ANY),  # restricted by `TOPICS`
    (CellChannel.AUX_COMMUNICATION, ReservedTopic.END_RUN),
}
JOIN = {
    (CellChannel.SERVER_MAIN, CellChannelTopic.Challenge),
    (CellChannel.SERVER_MAIN, CellChannelTopic.Register),
}
FROM_SITE = {
    *COMMON,
    *JOIN,
    (CellChannel.SERVER_MAIN, CellChannelTopic.HEART_BEAT),
    (CellChannel.SERVER_MAIN, CellChannelTopic.Quit),
    (CellChannel.SERVER_MAIN, CellChannelTopic.REPORT_JOB_FAILURE),
    (CellChannel.SERVER_COMMAND, ServerCommandNames.GET_TASK),
    (CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE),
    (CellChannel.AUX_COMMUNICATION, ReservedTopic.JOB_HEART_BEAT),
    (CellChannel.AUX_COMMUNICATION, ReservedTopic.SYNC_RUNNER),
    (CellChannel.AUX_COMMUNICATION, ReservedTopic.TASK_CHECK),
}
FROM_ADMIN = {
    *COMMON,
    *JOIN,
    (CellChannel.HCI, ANY),  # FLARE checks its permissions
    (CellChannel.AUX_COMMUNICATION, TOPIC_STREAM_REQUEST),  # to submit a job
    (CellChannel.AUX_COMMUNICATION, TOPIC_STREAM_ABORT),
    (OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC),  # to download its result
}


def site_job(interval: float) -> dict[str, object]:
    """Return the configuration of a job at a site that asks for work every `interval` seconds."""
    participant = {"path": "atoll.deploy.jobs.Participant", "args": {}}
    executors = [{"tasks": ["atoll"], "executor": participant}]
    job = {"format_version": 2, "executors": executors}
    return {**job, "default_task_fetch_interval": interval}


def job_text(config: dict[str, object]) -> str:
    """Format a configuration as in a job's file."""
    return json.dumps(config, indent=1)


def is_own_job(archive: object) -> bool:
    """Return whether an archive contains only the job of `site_job`, and signatures (`SIGNED`)."""
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
    except Exception:  # zipfile raises many types of errors for bytes that are not an archive
        return False


def is_own_meta(meta: object, job: str) -> bool:
    """Return whether a description names this job, a known role and no process options."""
    return (
        isinstance(meta, dict)
        and meta.get("job_id") == job
        and meta.get("submitter_role") in ROLES
        and not any(meta.get(name) for name in UNUSED)
        and len(json.dumps(meta, default=str)) <= LONGEST_META
    )


class Checked(RequestProcessor):  # type: ignore[misc]  # nvflare has no types
    """Pass a request to FLARE's own processor. Refuse jobs that are not Atoll's, or too many."""

    def __init__(self, inner: RequestProcessor) -> None:
        self.inner = inner

    def get_topics(self) -> list[str]:
        return list(self.inner.get_topics())

    def process(self, req: Message, app_ctx: Any) -> Message:
        job = req.get_header(RequestHeader.JOB_ID)
        if job is not None and not (isinstance(job, str) and JOB.fullmatch(job)):
            return error_reply("a job's number is a UUID")
        about = req.get_header(RequestHeader.JOB_META)
        if req.topic in STARTS and (job is None or not is_own_meta(about, job)):
            return error_reply("a job is described as Atoll describes it")
        if req.topic == TrainingTopic.DEPLOY and not is_own_job(req.body):
            return error_reply("a job is Atoll's own configuration and no code")
        if req.topic == TrainingTopic.DEPLOY:
            if len(str(req.get_header(RequestHeader.APP_NAME))) > LONGEST_APP:
                return error_reply("the name of an app is too long")
            forget_jobs(Path(app_ctx.args.workspace), app_ctx.get_all_job_ids())
        if req.topic == TrainingTopic.START_JOB and len(app_ctx.get_all_job_ids()) >= MOST_JOBS:
            return error_reply(f"a site has at most {MOST_JOBS} jobs at a time")
        return self.inner.process(req, app_ctx)


def forget_jobs(kit: Path, running: Collection[str]) -> None:
    """Delete the oldest folders of ended jobs, so that with a new one `KEPT_JOBS` remain."""
    found = [path for path in kit.glob("*") if JOB.fullmatch(path.name)]
    over = [path for path in found if path.name not in running]
    for path in sorted(over, key=lambda path: path.stat().st_mtime)[: 1 - KEPT_JOBS]:
        shutil.rmtree(path, ignore_errors=True)


class SiteGate(FLComponent):  # type: ignore[misc]  # nvflare has no types
    """Restrict the process that connects a site to the server. A job's process restricts itself."""

    def __init__(self) -> None:
        super().__init__()
        known = ClientRequestProcessors.request_processors
        known[:] = [Checked(one) for one in known if TOPICS.issuperset(one.get_topics())]
        # FLARE's log of requests is unlimited, and quotes any text that the server sends.
        Auditor.add_event = lambda *_given, **_more: ""
        close_site()


class ServerGate(FLComponent):  # type: ignore[misc]  # nvflare has no types
    """Restrict the server's process, through which all messages of sites pass."""

    def __init__(self) -> None:
        super().__init__()
        _guard(passes_server)
        check_receipts()


def close_site() -> None:
    """Let this process of a site accept from other parties only what `passes_site` accepts."""
    _guard(passes_site)


def _guard(passes: Callable[[CoreCell, Endpoint, object, CellMessage], bool]) -> None:
    """Drop every message that the rule `passes` rejects, before FLARE processes it."""
    process = CoreCell.process_message

    def process_message(
        self: CoreCell, endpoint: Endpoint, connection: Any, app_id: int, message: CellMessage
    ) -> None:
        name = connection.get_conn_properties().get(DriverParams.PEER_CN.value)
        # FLARE would connect to this address without TLS, and trust any name that answers there.
        message.remove_header(MessageHeaderKey.CONN_URL)
        if passes(self, endpoint, name, message):
            process(self, endpoint, connection, app_id, message)
        else:
            place = [str(word)[:100] for word in (endpoint.name, *asked(message))]
            logging.getLogger(__name__).warning("a message was refused: %s", place)

    CoreCell.process_message = process_message


def asked(message: CellMessage) -> tuple[str, str]:
    """Return the channel and the topic by which FLARE finds the handler of a message."""
    head = message.get_header
    found = str(head(MessageHeaderKey.CHANNEL)), str(head(MessageHeaderKey.TOPIC))
    if found == (STREAM_CHANNEL, STREAM_DATA_TOPIC):  # part of a longer message
        return str(head(StreamHeaderKey.CHANNEL)), str(head(StreamHeaderKey.TOPIC))
    return found


def _listed(message: CellMessage, known: set[tuple[str, str]]) -> bool:
    """Return whether a message is a reply, or a request in the list `known`."""
    if message.get_header(MessageHeaderKey.MSG_TYPE) != MessageType.REQ:
        return True
    channel, topic = asked(message)
    return not known.isdisjoint({(channel, topic), (channel, ANY)})


def _root(message: CellMessage, key: str) -> str:
    return str(FQCN.get_root(str(message.get_header(key, ""))))


def passes_site(cell: CoreCell, endpoint: Endpoint, _name: object, message: CellMessage) -> bool:
    """Return whether a site accepts a message.

    It accepts any message of the site's processes, and the server's replies and requests in
    `TO_SITE`.
    """
    own, origin = cell.my_info.root, _root(message, MessageHeaderKey.ORIGIN)
    if origin == own:  # the server could use this name, too
        return bool(FQCN.get_root(endpoint.name) == own)
    return origin == FQCN.ROOT_SERVER and _listed(message, TO_SITE)


def passes_server(_cell: CoreCell, endpoint: Endpoint, name: object, message: CellMessage) -> bool:
    """Return whether the server accepts a message.

    It accepts any message of the server's processes. From others it accepts replies, and requests
    in `FROM_SITE` or `FROM_ADMIN`, if they are addressed to the server and name their true origin.
    FLARE has compared the endpoint with the certificate's name, but not the message's origin.
    """
    sender = FQCN.get_root(endpoint.name)
    if sender == FQCN.ROOT_SERVER:
        return True
    # For one type of error FLARE ends the job's process. A site could simply claim that error.
    message.remove_header(StreamHeaderKey.ERROR_TYPE)
    origin, target = MessageHeaderKey.ORIGIN, MessageHeaderKey.DESTINATION
    if (_root(message, origin), _root(message, target)) != (sender, FQCN.ROOT_SERVER):
        return False
    # FLARE treats a returned request as the answer of its target. Sites share request numbers.
    first = message.get_header(MessageHeaderKey.ORIGINAL_HEADERS, {})
    meant = first.get(target, sender) if isinstance(first, dict) else ""
    if FQCN.get_root(str(meant)) != sender:
        return False
    return _listed(message, FROM_ADMIN if "@" in str(name) else FROM_SITE)


def check_receipts() -> None:
    """Accept a receipt of a stream only from the receiver of the stream.

    FLARE numbers streams consecutively, and ignores the origin of a receipt. A site could guess
    the numbers of other sites' streams, and end them.
    """
    handle = TxTask.handle_ack

    def handle_ack(self: TxTask, message: CellMessage) -> None:
        if _root(message, MessageHeaderKey.ORIGIN) == FQCN.get_root(self.target):
            handle(self, message)

    TxTask.handle_ack = handle_ack
