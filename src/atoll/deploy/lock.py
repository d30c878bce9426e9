"""A lock on a folder, so that only one process at a time works in it.

The kernel releases the lock of a process that dies, so no stale lock remains.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

from atoll.core.errors import AtollError

LOCK = ".lock"
PATIENCE = 10.0  # seconds that a job of FLARE may need to end


class Busy(AtollError):
    """Another process works in the folder."""


class FolderLock(AbstractContextManager["FolderLock"]):
    """Hold the lock of a folder until `close`, or until the end of a `with` block.

    The constructor raises `Busy(sentence)` if the folder stays locked for `wait` seconds.
    """

    def __init__(self, folder: Path, sentence: str, wait: float = PATIENCE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, end = folder, time.monotonic() + wait
        self.handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while True:
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    self.close()
                    raise Busy(sentence) from None
                time.sleep(0.1)

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def __exit__(self, *_: object) -> None:
        self.close()
