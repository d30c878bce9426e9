"""Run FedAvg as a loop over the clients, with PyG only, and print one JSON object.

    python plain_loop.py FOLDER --rounds 3 --epochs 3

`bench.simulators.write_clients` wrote FOLDER, and `plain_owner.py` contains the client's code.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from plain_owner import Owner, first_model


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds, one client after another, with every client in memory."""
    about = json.loads((options.folder / "about.json").read_text())
    owners = [
        Owner(options.folder, number, options.epochs, options.hidden)
        for number in range(about["clients"])
    ]
    model, seconds, accuracies = first_model(about, options.hidden), [], []
    shares = np.array([owner.nodes for owner in owners]) / sum(owner.nodes for owner in owners)
    for _ in range(options.rounds):
        start = time.perf_counter()
        trained = [owner.train(model) for owner in owners]
        model = [
            sum(share * array for share, array in zip(shares, arrays, strict=True)).astype("f4")
            for arrays in zip(*trained, strict=True)
        ]
        scores = [owner.score(model) for owner in owners]
        seconds.append(time.perf_counter() - start)
        accuracies.append(sum(a * n for _, a, n in scores) / sum(n for *_, n in scores))
    return {"round_seconds": seconds, "accuracies": accuracies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
