"""FedAvg in Flower's own simulator; runs in Flower's environment, not in Atoll's.

    python flower_runner.py FOLDER --rounds 3 --epochs 3 --cpus 2

FOLDER holds what `bench.simulators.write_clients` wrote. The client is what a user of Flower and
PyG would write: a two-layer GCN of stock layers, Adam, three local epochs, then an evaluation of
the global model. Prints one JSON object.
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

import numpy as np
import torch
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from torch.nn import functional
from torch_geometric.nn import GCNConv


class Net(torch.nn.Module):
    """A two-layer GCN of stock layers."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = GCNConv(features, hidden, cached=True)
        self.second = GCNConv(hidden, classes, cached=True)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = functional.dropout(self.first(x, edges).relu(), 0.5, training=self.training)
        out: torch.Tensor = self.second(h, edges)
        return out


class Client(NumPyClient):  # type: ignore[misc]
    """One owner of a graph."""

    def __init__(self, folder: Path, number: int, epochs: int, hidden: int) -> None:
        self.data = {k: torch.from_numpy(v) for k, v in load_client(folder, number).items()}
        about = json.loads((folder / "about.json").read_text())
        self.net, self.epochs = Net(about["features"], hidden, about["classes"]), epochs

    def load(self, arrays: list[np.ndarray]) -> None:
        for parameter, array in zip(self.net.parameters(), arrays, strict=True):
            parameter.data = torch.from_numpy(array)

    def fit(self, parameters: Any, config: Any) -> Any:
        """Train for some epochs."""
        self.load(parameters)
        data, net = self.data, self.net.train()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
        for _ in range(self.epochs):
            optimizer.zero_grad()
            out = net(data["x"], data["edges"])[data["train"]]
            functional.cross_entropy(out, data["y"][data["train"]]).backward()
            optimizer.step()
        arrays = [parameter.detach().numpy() for parameter in net.parameters()]
        return arrays, len(data["y"]), {}

    @torch.no_grad()
    def evaluate(self, parameters: Any, config: Any) -> Any:
        """Score the model on the test nodes."""
        self.load(parameters)
        data = self.data
        out = self.net.eval()(data["x"], data["edges"])[data["test"]]
        y = data["y"][data["test"]]
        right = float((out.argmax(-1) == y).float().mean())
        return float(functional.cross_entropy(out, y)), len(y), {"accuracy": right}


def load_client(folder: Path, number: int) -> dict[str, np.ndarray]:
    """One client's arrays, cut from the files of all, which are mapped, not read."""
    nodes, edges = np.load(folder / "nodes.npy"), np.load(folder / "edges_at.npy")
    (a, b), (c, d) = nodes[number : number + 2], edges[number : number + 2]
    cut = {
        name: np.array(np.load(folder / f"{name}.npy", mmap_mode="r")[a:b])
        for name in ("x", "y", "train", "test")
    }
    return {**cut, "edges": np.array(np.load(folder / "edges.npy", mmap_mode="r")[:, c:d])}


class Timed(FedAvg):  # type: ignore[misc]
    """FedAvg that notes when a round's evaluation is in."""

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
    """All rounds in Flower's simulator."""
    folder, hidden, epochs = options.folder.absolute(), options.hidden, options.epochs
    about = json.loads((folder / "about.json").read_text())
    torch.manual_seed(0)
    first = Net(about["features"], hidden, about["classes"])
    start = ndarrays_to_parameters([p.detach().numpy() for p in first.parameters()])

    def make_client(context: Context) -> Any:
        torch.set_num_threads(1)
        number = int(context.node_config["partition-id"])
        return Client(folder, number, epochs, hidden).to_client()

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
