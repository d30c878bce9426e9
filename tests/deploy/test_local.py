"""Processes of a federation on this machine."""

from __future__ import annotations

import os
import sys
import time

from atoll.deploy.local import Processes, marked


def test_no_process_outlives_its_block(tmp_path):
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    child = f"import subprocess, sys; subprocess.Popen({sleep}, start_new_session=True).wait()"
    with Processes() as processes:
        processes.start("parent", [sys.executable, "-c", child], tmp_path / "log")
        end = time.monotonic() + 20
        while len(processes.alive()) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(processes.alive()) == 2
        # The parent is killed; the child goes on, and is found by the mark that it inherited.
        processes.started["parent"].kill()
        processes.started["parent"].wait()
        assert len(processes.alive()) == 1
        assert processes.dead() == ["parent"]
    assert processes.alive() == []
    assert os.getpid() not in dict(marked())
