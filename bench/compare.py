"""Run the peer and Atoll alternately on the same work and compare their seconds per round."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from bench.peer_runner import METHODS
from bench.processes import RunError, capture, environment

RUNNER = Path(__file__).with_name("peer_runner.py")
OURS = Path(__file__).with_name("atoll_runner.py")
RAW = Path("Planetoid", "Cora", "raw")
WARM_UP = 2  # rounds excluded from the peer's median; fewer in short runs
HEADINGS = (
    "peer s",
    "Atoll s",
    "ratio",
    "by CPU time",
    "peer acc.",
    "its last",
    "Atoll acc.",
    "rounds",
)
ATOLL_PACKAGES = ("atoll-fgl", "torch", "torch_geometric", "numpy", "scikit-network")


@dataclass(frozen=True)
class Work:
    """The work of both sides, and the number of threads for it."""

    data_root: Path
    rounds: int = 10
    clients: int = 10
    epochs: int = 3
    threads: int = 1

    def rounds_of(self, method: str) -> int:
        """Return the rounds of one run of either side. There are fewer if the peer is slow."""
        return min(self.rounds, METHODS[method].max_rounds or self.rounds)


@dataclass
class Row:
    """The measurements of one method, with the reason in `error` if a run failed."""

    method: str
    rounds: int
    peer: list[dict[str, Any]] = field(default_factory=list)
    atoll: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def ratio(self) -> float | None:
        """The peer's seconds per round divided by Atoll's."""
        return self.ratio_of("seconds_per_round")

    def ratio_of(self, clock: str) -> float | None:
        """Return the ratio by one clock. Other load on the machine hardly changes CPU time."""
        peer, atoll = best(self.peer, clock), best(self.atoll, clock)
        return peer / atoll if peer and atoll else None

    def to_json(self) -> dict[str, Any]:
        """Return the figures of the table and every run behind them."""
        return {
            "method": self.method,
            "rounds": self.rounds,
            "peer_seconds_per_round": best(self.peer),
            "atoll_seconds_per_round": best(self.atoll),
            "ratio": self.ratio,
            "peer_cpu_seconds_per_round": best(self.peer, CPU),
            "atoll_cpu_seconds_per_round": best(self.atoll, CPU),
            "cpu_ratio": self.ratio_of(CPU),
            "note": METHODS[self.method].note,
            "error": self.error,
            "disturbed": was_disturbed(self.peer) or was_disturbed(self.atoll),
            "runs": {"peer": self.peer, "atoll": self.atoll},
        }


CPU = "cpu_seconds_per_round"


def best(runs: list[dict[str, Any]], clock: str = "seconds_per_round") -> float | None:
    """Seconds per round of the run that the machine's other load disturbed least."""
    return min((run[clock] for run in runs), default=None)


def was_disturbed(runs: list[dict[str, Any]]) -> bool:
    """Whether other programs slowed even the best run: it had less than 0.9 CPUs."""
    if not runs:
        return False
    run = min(runs, key=lambda run: run["seconds_per_round"])
    return run["process_cpu_seconds"] < 0.9 * run["process_seconds"]


def run_peer(python: Path, method: str, work: Work) -> dict[str, Any]:
    """Run the peer once. Its seconds per round are the median after the warm-up rounds."""
    rounds = work.rounds_of(method)
    run = capture(
        [
            *(str(python), "-I", str(RUNNER), method, "--data-root", str(work.data_root)),
            *("--rounds", str(rounds), "--clients", str(work.clients)),
            *("--epochs", str(work.epochs), "--threads", str(work.threads)),
        ],
        f"the peer's {method}",
        # The peer's torch.load reads whole pickled objects, which torch has refused since 2.6.
        {**environment(work.threads), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
    )
    return {
        "seconds_per_round": _after_warm_up(run["round_seconds"]),
        "cpu_seconds_per_round": _after_warm_up(run["round_cpu_seconds"]),
        **run,
    }


def _after_warm_up(seconds: list[float]) -> float:
    return median(seconds[min(WARM_UP, len(seconds) // 2) :])


GRAPHS = ("--data", "molecules", "--protocol", "gcfl")


def _cora(work: Work) -> list[str]:
    """Return Atoll's options for the peer's partition of Cora."""
    return [
        *("--data", "cora", "--clients", str(work.clients), "--partition", "louvain"),
        *("--epochs", str(work.epochs)),
    ]


def run_atoll(method: str, work: Work) -> dict[str, Any]:
    """Run Atoll's command line once and read the JSON object that it prints."""
    run = capture(
        [
            *(sys.executable, str(OURS), "run", method, *METHODS[method].ours),
            *(GRAPHS if METHODS[method].sets else _cora(work)),
            *("--rounds", str(work.rounds_of(method))),
            *("--seeds", "1", "--engine", "auto", "--device", "cpu", "--json", "--quiet"),
            *("--data-root", str(work.data_root)),
        ],
        f"Atoll's {method}",
        environment(work.threads),
    )
    try:
        # The peer scores every client's own model after training. So does this metric, if the
        # method has it.
        local = "local_test_accuracy"
        accuracy = local if local in run["metrics"] else "test_accuracy"
        return {
            "seconds_per_round": run["seconds"]["per_round"],
            "cpu_seconds_per_round": _after_warm_up(run["round_cpu_seconds"]),
            "test_accuracy": run["metrics"][accuracy]["mean"],
            "accuracy_of": accuracy,
            **{key: run.get(key) for key in ("engine", "scored", "seconds")},
            **{key: run[key] for key in ("process_seconds", "process_cpu_seconds", "peak_gb")},
        }
    except (KeyError, TypeError) as error:
        raise RunError(f"the JSON object of Atoll's {method} lacks {error}.") from error


def compare(
    method: str,
    work: Work,
    *,
    python: Path,
    repeats: int,
    peer_only: bool,
    tell: Callable[[str], object],
) -> Row:
    """Measure one method, peer and Atoll alternately, so that other load affects both equally.

    Args:
        method: A name in `METHODS`.
        work: The work of one run.
        python: The peer's interpreter.
        repeats: Runs of each side.
        peer_only: Do not run Atoll.
        tell: Receives a short description of each run before it starts.

    Returns:
        The row, with the runs so far and `error` set if a run failed.
    """
    row = Row(method, work.rounds_of(method))
    try:
        for repeat in range(1, repeats + 1):
            tell(f"{method}: peer, run {repeat} of {repeats}")
            row.peer.append(run_peer(python, method, work))
            if not peer_only:
                tell(f"{method}: Atoll, run {repeat} of {repeats}")
                row.atoll.append(run_atoll(method, work))
    except RunError as error:
        row.error = str(error)
    return row


def machine(threads: int) -> dict[str, Any]:
    """Describe the processor, without the name of the machine."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {"cpu": model, "cores": os.cpu_count(), "threads": threads, "load": os.getloadavg()[0]}


def report(rows: list[Row], work: Work, load: float) -> dict[str, Any]:
    """Return all measurements as one JSON-ready object."""
    peer_versions = next((run["versions"] for row in rows for run in row.peer), None)
    atoll_versions = {"python": platform.python_version()} | {p: version(p) for p in ATOLL_PACKAGES}
    return {
        "benchmark": "peer",
        "machine": {**machine(work.threads), "load": load},
        "work": {
            "data": "cora",
            "partition": "louvain",
            "net": "gcn-64",
            "lr": 0.01,
            "clients": work.clients,
            "epochs": work.epochs,
            "rounds": work.rounds,
        },
        "versions": {"peer": peer_versions, "atoll": atoll_versions},
        "results": [row.to_json() for row in rows],
    }


def table(rows: list[Row]) -> Table:
    """Return the comparison as a table. A star marks a row with a note."""
    drawn = Table(title="Seconds per round: openfgl-lib against Atoll (Cora, 10 clients, GCN-64)")
    drawn.add_column("method", no_wrap=True)
    for heading in HEADINGS:
        drawn.add_column(heading, justify="right")
    for row in rows:
        star = "*" if METHODS[row.method].note or row.error else ""
        drawn.add_row(
            row.method + star,
            _cell(best(row.peer), "{:.4f}"),
            _cell(best(row.atoll), "{:.4f}"),
            _cell(row.ratio, "{:.2f}x"),
            _cell(row.ratio_of(CPU), "{:.2f}x"),
            _cell(row.peer[-1]["test_accuracy"] if row.peer else None, "{:.3f}"),
            _cell(row.peer[-1]["last_test_accuracy"] if row.peer else None, "{:.3f}"),
            _cell(row.atoll[-1]["test_accuracy"] if row.atoll else None, "{:.3f}"),
            str(row.rounds),
        )
    return drawn


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
