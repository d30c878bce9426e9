"""Thousands of clients: Atoll compared with Flower's simulator and a plain loop over clients.

All programs run the same FedAvg on clients of one generator: GCN-64, three epochs, Adam without
state between rounds, and the global model scored at every client. The other programs get fewer
clients, because thousands would take hours. The benchmark compares client updates per second.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from atoll.core.federation import Federation
from atoll.data.divide import federate
from atoll.data.synthetic import Archipelago, make_lagoon
from bench.processes import capture, environment

HERE = Path(__file__).parent
FLOWER_PINS = HERE / "flower-constraints.txt"
FLOWER_ENV = HERE.parent / ".bench-flower"


def archipelago(clients: int) -> Federation:
    """The federation of `--data archipelago`."""
    source = make_lagoon(Archipelago(), clients, 0)
    return federate(source, clients=None, partition="column:owner", seed=0)


def write_clients(federation: Federation, folder: Path) -> None:
    """Write the concatenated arrays of all clients, for programs without Atoll."""
    graphs = federation.graphs
    joined = {
        "x": np.concatenate([np.asarray(graph.x) for graph in graphs]),
        "y": np.concatenate([graph.y.numpy() for graph in graphs]),
        "train": np.concatenate([graph.train.numpy() > 0 for graph in graphs]),
        "test": np.concatenate([graph.test.numpy() > 0 for graph in graphs]),
        "edges": np.concatenate([graph.edges.numpy() for graph in graphs], axis=1),
        "nodes": np.cumsum([0, *(graph.num_nodes for graph in graphs)]),
        "edges_at": np.cumsum([0, *(graph.edges.shape[1] for graph in graphs)]),
    }
    for name, array in joined.items():
        np.save(folder / f"{name}.npy", array)
    about = {"clients": len(graphs), "features": federation.features, "classes": federation.classes}
    (folder / "about.json").write_text(json.dumps(about))


@dataclass
class Side:
    """One program and its runs."""

    name: str
    clients: int
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds per round of the best run, without its first round."""
        return min(median(run["round_seconds"][1:]) for run in self.runs)

    @property
    def updates(self) -> float:
        """Client updates per second."""
        return self.clients / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.name,
            "clients": self.clients,
            "seconds_per_round": self.seconds,
            "updates_per_second": self.updates,
            "peak_gb": min(run["peak_gb"] for run in self.runs),
            "runs": self.runs,
        }


def run_atoll(clients: int, rounds: int, threads: int) -> dict[str, Any]:
    """Run Atoll through its command line."""
    run = capture(
        [
            *(sys.executable, "-m", "atoll", "run", "fedavg", "--data", "archipelago"),
            *("--clients", str(clients), "--rounds", str(rounds), "--device", "cpu"),
            *("--set", "optimizer_state=reset", "--json", "--quiet", "--out", "run"),
        ],
        "Atoll's FedAvg",
        environment(threads),
    )
    # Atoll reports one median over all rounds, which is used for each of them.
    seconds = [run["seconds"]["per_round"]] * rounds
    return {
        "round_seconds": seconds,
        "accuracies": [run["metrics"]["last_test_accuracy"]["mean"]],
        **{key: run[key] for key in ("seconds", "process_seconds", "process_cpu_seconds")},
        "peak_gb": run["peak_gb"],
    }


def run_other(python: Path, script: str, folder: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Run another program on the written clients, with one thread per process."""
    variables = {**environment(1), "PYTHONPATH": str(HERE)}
    cpus = ["--cpus", str(threads)] if script == "flower_runner.py" else []
    command = [str(python), str(HERE / script), str(folder), "--rounds", str(rounds), *cpus]
    return capture(command, script, variables)


def compare(
    *,
    clients: int,
    theirs: int,
    rounds: int,
    repeats: int,
    threads: int,
    flower: Path | None,
    tell: Callable[[str], object],
) -> list[Side]:
    """Run all programs in turn, so that other load affects them equally.

    Args:
        clients: Clients of Atoll.
        theirs: Clients of the other programs.
        rounds: Rounds of each run; the first does not count.
        repeats: Runs of each program.
        threads: Processors of each program.
        flower: The interpreter of Flower's environment, or None to skip Flower.
        tell: Receives a short description of each run before it starts.
    """
    sides = [Side("Atoll", clients), Side("plain PyG loop", theirs)]
    sides += [Side("Flower's simulator", theirs)] if flower else []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        write_clients(archipelago(theirs), folder)
        for repeat in range(1, repeats + 1):
            for side in sides:
                tell(f"{side.name}, {side.clients} clients, run {repeat} of {repeats}")
                if side.name == "Atoll":
                    side.runs.append(run_atoll(clients, rounds, threads))
                elif side.name == "plain PyG loop":
                    python, script = Path(sys.executable), "plain_loop.py"
                    side.runs.append(run_other(python, script, folder, rounds, threads))
                else:
                    assert flower is not None
                    run = run_other(flower, "flower_runner.py", folder, rounds, threads)
                    side.runs.append(run)
    return sides


def table(sides: list[Side]) -> Table:
    """One row for each program."""
    drawn = Table(title="FedAvg on many clients of 50 to 200 nodes, GCN-64, 3 epochs, scored")
    drawn.add_column("program", no_wrap=True)
    for heading in ("clients", "s/round", "updates/s", "Atoll is", "peak GB", "accuracy"):
        drawn.add_column(heading, justify="right")
    for side in sides:
        drawn.add_row(
            side.name,
            f"{side.clients:,}",
            f"{side.seconds:.3f}",
            f"{side.updates:,.0f}",
            f"{sides[0].updates / side.updates:.1f}x",
            f"{side.to_json()['peak_gb']:.2f}",
            f"{side.runs[-1]['accuracies'][-1]:.3f}",
        )
    return drawn
