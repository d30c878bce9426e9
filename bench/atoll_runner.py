"""Atoll's command line, with the CPU seconds of each round and the peak memory of a GPU.

    python atoll_runner.py run fedavg --data cora --json --quiet

On a shared machine CPU time measures the cost of a round; wall time also includes waiting.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time

from atoll.cli import main
from atoll.experiment.rounds import Run


def timed(arguments: list[str]) -> dict[str, object]:
    """Return the JSON object of the command, with `round_cpu_seconds` and `gpu_peak_gb`."""
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
    import torch

    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    return {**result, "round_cpu_seconds": seconds, "gpu_peak_gb": peak}


if __name__ == "__main__":
    print(json.dumps(timed(sys.argv[1:])))
