"""Atoll's command line with a second clock: the CPU seconds of each round beside its own figures.

    python atoll_runner.py run fedavg --data cora --json --quiet

On a machine that others use too, CPU time says what a round costs when wall time says who waited.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time

from atoll.cli import main
from atoll.study.experiment import Run


def timed(arguments: list[str]) -> dict[str, object]:
    """The JSON object that the command prints, and `round_cpu_seconds`."""
    seconds: list[float] = []
    one_round = Run.one_round

    def watched(run: Run) -> None:
        start = time.process_time()
        one_round(run)
        seconds.append(time.process_time() - start)

    Run.one_round = watched  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(arguments, standalone_mode=False)
    result: dict[str, object] = json.loads(printed.getvalue().strip().splitlines()[-1])
    return {**result, "round_cpu_seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(timed(sys.argv[1:])))
