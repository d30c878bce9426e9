"""Ends a site's job whose answer takes more time or memory than the owner allows.

A step cannot be stopped from outside of it, only its process can. So the answer is computed in
another thread. At the limit the server gets a refusal, and the process ends when that is sent. The
site itself is another process and stays in the federation.
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

INTERVAL = 0.2  # seconds between two looks at time and memory
GRACE = 30.0  # seconds that the refusal has to leave


def end_process() -> None:
    """End this process at once; FLARE takes any other status for a failure of the whole job."""
    os._exit(0)


class Watchdog:
    """Answers packets by a site, within the limits of its policy."""

    def __init__(self, site: Site, end: Callable[[], None] = end_process) -> None:
        self.site, self.end = site, end
        # One thread for all packets: torch keeps further threads for each one that calls it.
        self.worker = ThreadPoolExecutor(1, "answer")
        self.over = False

    def answer(self, packet: Packet) -> Packet:
        """The site's answer, or a refusal at the limit."""
        began, seconds = time.monotonic(), self.site.seconds(packet)
        answer = self.worker.submit(self.site.answer, packet)
        while not self.over:
            used = time.monotonic() - began
            if wait([answer], min(INTERVAL, max(0.0, seconds - used))).done:
                return answer.result()
            memory, most = psutil.Process().memory_info().rss, self.site.policy.memory
            if memory > most:
                return self._refuse(packet, f"{most} bytes of memory", used, memory=memory)
            if used >= seconds:
                return self._refuse(packet, f"{seconds:.3g} seconds", used)
        return Packet({"failure": BAD, "reason": "over its limit before; its job has ended"}, b"")

    def sent(self) -> None:
        """An answer has left: if it was a refusal at the limit, the process ends."""
        if self.over:
            self.end()

    def _refuse(self, packet: Packet, limit: str, used: float, **more: int) -> Packet:
        self.over = True
        timer = threading.Timer(GRACE, self.end)
        timer.daemon = True
        timer.start()
        # The server learns the limit; how much was used is the owner's.
        reason = f"over its limit: its policy allows {limit}, and the answer needs more"
        if self.site.job is not None:
            self.site.job.work.mark.unlink(missing_ok=True)  # it is noted here
        log = Audit(self.site.audit.path)  # the site's own may be in use by the other thread
        return self.site.refuse(packet, BAD, reason, log, seconds=round(used, 3), **more)
