"""Run FedAvg in Flower's own simulator, in Flower's environment.

    python flower_runner.py FOLDER --rounds 3 --epochs 3 --cpus 2

`bench.simulators.write_clients` wrote FOLDER, and `plain_owner.py` contains the client's code.
The script prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from plain_owner import Owner, first_model


class Client(NumPyClient):  # type: ignore[misc]
    """One owner of a graph."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def fit(self, parameters: Any, config: Any) -> Any:
        """Train for the local epochs."""
        return self.owner.train(parameters), self.owner.nodes, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        """Score the model on the test nodes."""
        loss, accuracy, count = self.owner.score(parameters)
        return loss, count, {"accuracy": accuracy}


class Timed(FedAvg):  # type: ignore[misc]
    """FedAvg that records the time when a round's evaluation is complete."""

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        if failures:
            raise RuntimeError(f"{len(failures)} clients failed, the first with: {failures[0]}")
        MARKS.append(time.perf_counter())
        shares = [(reply.num_examples, reply.metrics["accuracy"]) for _, reply in results]
        ACCURACIES.append(sum(n * a for n, a in shares) / sum(n for n, _ in shares))
        return super().aggregate_evaluate(server_round, results, failures)

    def configure_fit(self, server_round: int, *rest: Any, **named: Any) -> Any:
        if not MARKS:
            MARKS.append(time.perf_counter())
        return super().configure_fit(server_round, *rest, **named)


MARKS: list[float] = []
ACCURACIES: list[float] = []


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds in Flower's simulator."""
    folder, hidden, epochs = options.folder.absolute(), options.hidden, options.epochs
    about = json.loads((folder / "about.json").read_text())
    start = ndarrays_to_parameters(first_model(about, hidden))

    def make_client(context: Context) -> Any:
        torch.set_num_threads(1)
        number = int(context.node_config["partition-id"])
        return Client(Owner(folder, number, epochs, hidden)).to_client()

    def make_server(context: Context) -> ServerAppComponents:
        strategy = Timed(
            fraction_fit=1.0, fraction_evaluate=1.0, min_available_clients=about["clients"],
            initial_parameters=start,
        )  # fmt: skip
        return ServerAppComponents(strategy=strategy, config=ServerConfig(options.rounds))

    began = time.perf_counter()
    run_simulation(
        ServerApp(server_fn=make_server),
        ClientApp(client_fn=make_client),
        num_supernodes=about["clients"],
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": options.cpus, "include_dashboard": False},
        },
    )
    peak = [resource.getrusage(who).ru_maxrss for who in (0, -1)]  # this process, its children
    return {
        "round_seconds": [b - a for a, b in pairwise(MARKS)],
        "accuracies": ACCURACIES,
        "setup_seconds": MARKS[0] - began,
        "peak_gb_of_largest_process": max(peak) / 2**20,
        "versions": {p: version(p) for p in ("flwr", "ray", "torch", "torch_geometric")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--cpus", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    logging.getLogger("flwr").setLevel(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        result = run(options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
