"""A folder that one process at a time works in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from atoll.deploy.lock import Busy, FolderLock

HOLD = """
import sys, time
from pathlib import Path
from atoll.deploy.lock import FolderLock
held = FolderLock(Path(sys.argv[1]), "")
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path):
    with FolderLock(tmp_path / "run", "it is busy", wait=0):
        with pytest.raises(Busy, match="it is busy"):
            FolderLock(tmp_path / "run", "it is busy", wait=0.2)
        FolderLock(tmp_path / "another", "", wait=0).close()
    FolderLock(tmp_path / "run", "", wait=0).close()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Busy):
            FolderLock(tmp_path, "", wait=0)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    FolderLock(tmp_path, "", wait=0).close()
