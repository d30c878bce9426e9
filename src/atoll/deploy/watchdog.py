"""A watchdog that ends a site's job if an answer takes more time or memory than the owner allows.

Only the end of its process stops a running step, so one thread computes the answer and another one
watches it. At the limit the server gets a refusal, and the process ends after sending it. The site
itself is another process and stays in the federation.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import psutil

from atoll.deploy.audit import Audit
from atoll.deploy.site import Site
from atoll.engines.fleet import BAD, Packet

INTERVAL = 0.2  # seconds between two checks of time and memory
GRACE = 30.0  # seconds for sending the refusal


def end_process() -> None:
    """End this process with status 0. To FLARE, any other status is a failure of the whole job."""
    os._exit(0)


class Watchdog:
    """Let a site answer packets, within its policy's limits of time and memory."""

    def __init__(self, site: Site, end: Callable[[], None] = end_process) -> None:
        self.site, self.end = site, end
        # One thread for all packets, because torch keeps further threads for each calling thread.
        self.worker = ThreadPoolExecutor(1, "answer")
        self.over = False

    def answer(self, packet: Packet) -> Packet:
        """Return the site's answer, or a refusal at the limit."""
        began, seconds = time.monotonic(), self.site.seconds(packet)
        answer = self.worker.submit(self.site.answer, packet)
        while not self.over:
            used = time.monotonic() - began
            if wait([answer], min(INTERVAL, max(0.0, seconds - used))).done:
                return answer.result()
            if (work := self.site.under_way) is not None:
                work.touch()
            memory, most = psutil.Process().memory_info().rss, self.site.policy.memory
            if memory > most:
                return self._refuse(packet, f"{most} bytes of memory", used, memory=memory)
            if used >= seconds:
                return self._refuse(packet, f"{seconds:.3g} seconds", used)
        return Packet({"failure": BAD, "reason": "over its limit before; its job has ended"}, b"")

    def sent(self) -> None:
        """End the process if the answer that just left was a refusal at the limit."""
        if self.over:
            self.end()

    def _refuse(self, packet: Packet, limit: str, used: float, **more: int) -> Packet:
        self.over = True
        timer = threading.Timer(GRACE, self.end)
        timer.daemon = True
        timer.start()
        # The server learns the limit. Only the owner learns how much was used.
        reason = f"over its limit: its policy allows {limit}, and the answer needs more"
        if (work := self.site.under_way) is not None:
            work.mark.unlink(missing_ok=True)  # the log entry below counts it
        log = Audit(self.site.audit.path)  # the other thread may be using the site's own log
        return self.site.refuse(packet, BAD, reason, log, seconds=round(used, 3), **more)
