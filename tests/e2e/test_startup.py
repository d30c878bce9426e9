"""How long a user waits for the first sign of life. Bounds are in CPU seconds, and generous."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FIRST_ROUND = """
import sys, time
from atoll.cli import main
from atoll.present.terminal import Watcher
def first(self, seed, history):
    print("CPU", time.process_time())
    raise SystemExit
Watcher.round = first
sys.argv = ["atoll", "demo", "--out", "demo"]
main()
"""


def spent(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120,
    )  # fmt: skip
    return done.stdout


def test_help_takes_no_torch_and_less_than_a_blink(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.argv = ['atoll', '--help']; from atoll.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('CPU', time.process_time(), 'torch' in sys.modules)"
    )
    _, seconds, loaded = spent(code, tmp_path).splitlines()[-1].split()
    assert loaded == "False"
    assert float(seconds) < 0.3


def test_the_first_round_of_the_demo_comes_soon(tmp_path: Path) -> None:
    _, seconds = spent(FIRST_ROUND, tmp_path).splitlines()[-1].split()
    assert float(seconds) < 5
