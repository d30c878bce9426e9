"""`atoll watch`: sparklines and times, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from atoll.experiment.status import Status
from atoll.present.watch import elapsed, plain, sparkline


def test_sparklines_and_times() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([None, 1.0, 2.0]) == " ▁█"
    assert sparkline([None]) == sparkline([]) == ""
    long = sparkline([float(i) for i in range(1000)])
    assert len(long) <= 50
    assert long[-1] == "█"
    times = [5, 100, 3600, 7500, 200_000]
    assert [elapsed(t) for t in times] == ["5 s", "2 min", "1 h", "2 h 5 min", "2 d 7 h"]


def test_programs_read_the_same_keys_as_ever() -> None:
    found = plain(
        Status(Path("here"), "compare", "a study", {"running": 2}, others=[{"cell": "b"}])
    )
    assert list(found) == [
        *("folder", "kind", "title", "cells", "now", "beside", "silent", "gone", "left", "best"),
        *("failures", "result", "metric", "finished"),
    ]
    assert (found["folder"], found["beside"], found["finished"]) == ("here", [{"cell": "b"}], False)


def test_watching_needs_no_torch() -> None:
    code = "import atoll.present.watch, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
