"""Atoll's command line, which waits for a line before each round and prints its CPU seconds.

    PYTHONPATH=SOURCE python rounds_runner.py run fedavg --data cora --json --quiet

`rounds.py` starts one process for each of two source trees and alternates between them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time

from atoll.cli import main
from atoll.experiment.rounds import Run


def stepped(arguments: list[str]) -> None:
    """Run the command. Print one line for each round, then the test accuracy."""
    one_round = Run.one_round
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:

        def watched(run: Run) -> None:
            sys.stdin.readline()
            start = time.process_time()
            one_round(run)
            print(time.process_time() - start, file=answers, flush=True)

        Run.one_round = watched  # type: ignore[method-assign]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main(arguments, standalone_mode=False)
        result = json.loads(printed.getvalue().strip().splitlines()[-1])
        print(result["metrics"]["test_accuracy"]["mean"], file=answers, flush=True)


if __name__ == "__main__":
    stepped(sys.argv[1:])
