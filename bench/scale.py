"""Seconds, client updates per second and peak memory of large federations."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.processes import capture, environment

CASES = {
    "10,000 clients of 50-200 nodes": ("--data", "archipelago", "--clients", "10000"),
    "1M nodes, 10M edges, 20 clients": (
        *("--data", "lagoon:nodes=1000000,degree=20", "--clients", "20"),
    ),
}
ARXIV = "ogbn-arxiv topology, Louvain, 10 clients"


def run_case(options: tuple[str, ...], rounds: int, threads: int) -> dict[str, Any]:
    """Run one federation through Atoll's command line."""
    run = capture(
        [
            *(sys.executable, "-m", "atoll", "run", "fedavg", *options, "--device", "cpu"),
            *("--rounds", str(rounds), "--json", "--quiet", "--out", "run"),
        ],
        f"Atoll on {options[1]}",
        environment(threads),
    )
    return {
        "clients": run["clients"],
        "setup_seconds": run["seconds"]["setup"],
        "seconds_per_round": run["seconds"]["per_round"],
        "updates_per_second": run["clients"] / run["seconds"]["per_round"],
        "accuracy": run["metrics"]["test_accuracy"]["mean"],
        **{key: run[key] for key in ("peak_gb", "process_seconds", "process_cpu_seconds")},
    }


def divide_arxiv(root: Path, out: Path) -> dict[str, float]:
    """Divide the real topology with generated features by Louvain and save it in one file."""
    from atoll.data.archive import save_federation
    from atoll.data.divide import federate
    from atoll.data.public.registry import load_dataset

    start = time.perf_counter()
    source = load_dataset("ogbn-arxiv-structure", root).undirected_simple()
    loaded = time.perf_counter()
    rng = np.random.default_rng(0)
    means = rng.standard_normal((source.classes, 128), dtype=np.float32)
    x = means[source.y] + 4 * rng.standard_normal((source.num_nodes, 128), dtype=np.float32)
    federation = federate(replace(source, x=x), clients=10, partition="louvain", seed=0)
    divided = time.perf_counter()
    save_federation(federation, out)
    return {"load_seconds": loaded - start, "louvain_seconds": divided - loaded}


def measure(
    data_root: Path | None, rounds: int, threads: int, tell: Callable[[str], object]
) -> dict[str, dict[str, Any]]:
    """Measure every case, and ogbn-arxiv if its topology is in the data folder."""
    from atoll.data.public.registry import is_present

    found = {}
    for name, options in CASES.items():
        tell(name)
        found[name] = run_case(options, rounds, threads)
    if data_root is not None and is_present("ogbn-arxiv-structure", data_root):
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            tell(ARXIV)
            file = Path(folder, "arxiv.atoll")
            seconds = divide_arxiv(data_root, file)
            found[ARXIV] = {**run_case(("--data", str(file)), rounds, threads), **seconds}
    return found


def table(found: dict[str, dict[str, Any]], threads: int) -> Table:
    """One row for each federation."""
    drawn = Table(title=f"FedAvg, GCN-64, 3 epochs, two models scored, {threads} thread(s)")
    drawn.add_column("federation")
    for heading in ("set-up s", "s/round", "updates/s", "peak GB", "accuracy"):
        drawn.add_column(heading, justify="right")
    for name, run in found.items():
        drawn.add_row(
            name,
            f"{run['setup_seconds'] + run.get('louvain_seconds', 0):.1f}",
            f"{run['seconds_per_round']:.2f}",
            f"{run['updates_per_second']:,.0f}",
            f"{run['peak_gb']:.2f}",
            f"{run['accuracy']:.3f}",
        )
    return drawn
