"""`python -m bench gpu`: openfgl-lib and Atoll on one GPU, alternately, in one run."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.compare import ATOLL_PACKAGES, OURS, RUNNER
from bench.peer_runner import METHODS
from bench.processes import RunError, capture
from bench.roofline import floor, gpu_peaks, round_of_fedavg

MANY = 10
"""Seeds that are trained at once."""

PEER_ROUNDS = {"fedtad": 5}
"""Rounds of a peer's method for which twenty would take minutes."""


def run_peer(method: str, data_root: Path, peer_path: Path | None) -> dict[str, Any]:
    """Run the peer. Its seconds per round are the median without the first two."""
    where = [] if peer_path is None else ["--path", str(peer_path.absolute())]
    run = capture(
        [
            *(sys.executable, str(RUNNER), method, "--data-root", str(data_root)),
            *("--rounds", str(PEER_ROUNDS.get(method, 20)), "--device", "cuda", *where),
        ],
        f"the peer's {method}",
        {**_environment(), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
    )
    return {"seconds_per_round": median(run["round_seconds"][2:]), **run}


def run_atoll(method: str, data_root: Path, seeds: int = 1) -> dict[str, Any]:
    """Run 100 rounds of Atoll, which reports its seconds per round."""
    run = capture(
        [
            *(sys.executable, str(OURS), "run", method, "--data", "cora", "--clients", "10"),
            *("--partition", "louvain", "--epochs", "3", "--rounds", "100"),
            *("--seeds", str(seeds), "--device", "cuda", "--json", "--quiet"),
            *("--data-root", str(data_root)),
        ],
        f"Atoll's {method}",
        _environment(),
    )
    seconds = run["seconds"]
    return {
        "seconds_per_round": seconds["per_round"],
        "training_seconds": seconds["train"],
        "test_accuracy": run["metrics"]["test_accuracy"]["mean"],
        "seconds": seconds,
        "gpu_peak_gb": run["gpu_peak_gb"],
        "process_seconds": run["process_seconds"],
    }


def _environment() -> dict[str, str]:
    """Return variables with absolute package paths, because children run in other folders."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def measure(
    methods: list[str],
    data_root: Path,
    peer_path: Path | None,
    repeats: int,
    tell: Callable[[str], object],
    out: Path | None,
) -> dict[str, Any]:
    """Return all measurements, and write them after every method."""
    result: dict[str, Any] = {"benchmark": "gpu", **_machine(), "results": []}
    for method in methods:
        row: dict[str, Any] = {"method": method, "note": METHODS[method].note}
        try:
            tell(f"{method}: Atoll")
            # The first run compiles kernels, which torch then keeps on disk.
            row["atoll"] = [run_atoll(method, data_root) for _ in range(repeats)]
            tell(f"{method}: peer")
            row["peer"] = run_peer(method, data_root, peer_path)
            best = min(run["seconds_per_round"] for run in row["atoll"])
            row["ratio"] = row["peer"]["seconds_per_round"] / best
        except RunError as error:
            row["error"] = str(error)
        result["results"].append(row)
        _keep(out, result)
    try:
        tell(f"fedavg: Atoll, {MANY} seeds at once")
        result["many_seeds"] = [
            {"seeds": seeds, "method": "fedavg", **run_atoll("fedavg", data_root, seeds)}
            for seeds in (1, MANY)
        ]
    except RunError as error:
        result["many_seeds_error"] = str(error)
    result["roofline"] = {**gpu_peaks(), **_floor(data_root)}
    _keep(out, result)
    return result


def _keep(out: Path | None, result: dict[str, Any]) -> None:
    if out:
        out.write_text(json.dumps(result, indent=2) + "\n")


def _floor(data_root: Path) -> dict[str, Any]:
    """The lower bound of a round of FedAvg in seconds, from its bytes and flops."""
    from atoll.data.divide import federate
    from atoll.data.public.registry import load_dataset

    cora = load_dataset("cora", data_root).undirected_simple()
    work = round_of_fedavg(federate(cora, clients=10, partition="louvain", seed=0))
    return floor(work, gpu_peaks())


def _machine() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("torch finds no GPU here; `python -m bench peer` needs none.")
    versions = {"python": platform.python_version()}
    for package in ATOLL_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {"gpu": torch.cuda.get_device_name(), "versions": versions}


def table(result: dict[str, Any]) -> Table:
    """Return a table with seconds per round of both sides and of 100 rounds of Atoll."""
    drawn = Table(title=f"openfgl-lib against Atoll on {result['gpu']} (Cora, 10 clients, GCN-64)")
    headings = ("method", "peer ms", "Atoll ms", "ratio", "100 rounds of Atoll, s", "GPU GB")
    for heading in headings:
        drawn.add_column(heading, justify="left" if heading == "method" else "right")
    for row in result["results"]:
        if "error" in row:
            drawn.add_row(row["method"], row["error"].splitlines()[-1][:60], "", "", "", "")
            continue
        best = min(row["atoll"], key=lambda run: run["seconds_per_round"])
        drawn.add_row(
            row["method"],
            f"{1e3 * row['peer']['seconds_per_round']:.1f}",
            f"{1e3 * best['seconds_per_round']:.2f}",
            f"{row['ratio']:.0f}x",
            f"{min(run['training_seconds'] for run in row['atoll']):.2f}",
            f"{best['gpu_peak_gb']:.2f}",
        )
    return drawn


def remarks(result: dict[str, Any]) -> list[str]:
    """Return sentences about many seeds and about the limits of this GPU."""
    found = []
    if "many_seeds" in result:
        one, many = result["many_seeds"]
        ratio = many["training_seconds"] / one["training_seconds"]
        found.append(
            f"FedAvg, 100 rounds: {MANY} seeds at once {many['training_seconds']:.2f} s of "
            f"training, one seed {one['training_seconds']:.2f} s: {ratio:.1f} times"
        )
    if "roofline" in result:
        limits = result["roofline"]
        found.append(
            f"This GPU: {limits['bytes_per_s'] / 1e12:.2f} TB/s (triad), "
            f"{limits['flops_per_s'] / 1e12:.1f} Tflop/s (float32 product); a round of FedAvg is "
            f"{limits['flops'] / 1e9:.2f} Gflop and {limits['bytes'] / 1e9:.2f} GB, at least "
            f"{1e3 * limits['floor_seconds']:.3f} ms ({limits['bound_by']})"
        )
    return found


@click.command()
@click.option("--data-root", envvar="ATOLL_DATA", required=True, type=click.Path(path_type=Path),
              help="Folder that holds Planetoid/Cora/raw; ATOLL_DATA by default.")  # fmt: skip
@click.option("--methods", default="fedavg,fedprox,scaffold,moon,fedgta,fedtad", show_default=True)
@click.option("--peer-path", type=click.Path(path_type=Path), help="Folder with the peer's package,"
              " if it is not installed.")  # fmt: skip
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(min=1),
              help="Runs of Atoll. The first compiles kernels, and the best counts.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
def gpu(
    data_root: Path, methods: str, peer_path: Path | None, repeats: int, out: Path | None
) -> None:
    """Compare the seconds per round of openfgl-lib and Atoll on a GPU, on Cora."""
    console = Console(stderr=True)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    lacking = [name for name in names if name not in METHODS]
    if lacking:
        raise click.ClickException(
            f"unknown method {lacking[0]!r}; choose from {', '.join(METHODS)}."
        )
    result = measure(names, data_root.absolute(), peer_path, repeats, console.print, out)
    shown = Console(width=110, highlight=False)
    shown.print(table(result))
    for remark in remarks(result):
        shown.print(remark)
    failed = [row for row in result["results"] if "error" in row]
    for row in failed:
        console.print(f"{row['method']}: {row['error']}", markup=False)
    if failed:
        raise click.ClickException(f"{len(failed)} of {len(names)} methods failed.")
