"""`atoll watch`: sparklines and times, without torch."""

from __future__ import annotations

import subprocess
import sys

from atoll.present.watch import elapsed, sparkline


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


def test_watching_needs_no_torch() -> None:
    code = "import atoll.present.watch, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
