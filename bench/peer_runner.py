"""Run one method of `openfgl-lib` and print one JSON line with the seconds of every round.

The peer's Python executes this file as a script, so it imports neither atoll nor the rest of
`bench`. The peer's training loop runs as published. The trainer's `evaluate` is the last step of a
round; this script reads the clock when it returns, and records the accuracy that it logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

PACKAGES = ("openfgl-lib", "torch", "torch_geometric", "numpy", "scikit-network")


@dataclass(frozen=True)
class Peer:
    """A method of the peer.

    Attributes:
        algorithm: The peer's name of the method (`--fl_algorithm`).
        max_rounds: The most rounds of one run of either side, if the method is slow there.
        note: A remark below the table, such as the reason why the method crashes there.
        ours: Further options of Atoll's command for the same method.
        sets: Sets of graphs, one per client, for graph classification. Empty: Cora.
    """

    algorithm: str
    max_rounds: int | None = None
    note: str = ""
    ours: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()


UNSTABLE = (
    "the peer's accuracy collapses after the first round, probably because it adds terms meant for "
    "SGD to Adam's gradients. Compare the times only"
)

MOLECULES = ("MUTAG", "BZR", "COX2", "DHFR", "PTC_MR", "AIDS", "NCI1")

METHODS = {  # Atoll's name: the peer's
    "local": Peer("isolate"),
    "fedavg": Peer("fedavg"),
    "fedprox": Peer("fedprox"),
    "scaffold": Peer("scaffold", note=UNSTABLE),
    "moon": Peer("moon"),
    "feddc": Peer("feddc", note=UNSTABLE),
    "fedproto": Peer("fedproto"),
    "fedtgp": Peer("fedtgp"),
    "fedgta": Peer("fedgta"),
    "fedtad": Peer("fedtad", max_rounds=3, ours=("--set", "iterations=5")),
    "fedsage+": Peer(
        "fedsage_plus",
        max_rounds=3,
        note="the peer trains its generator in its first 10 rounds, and only those are timed; "
        "Atoll trains it in the first round only. Do not quote the ratio",
    ),
    "adafgl": Peer(
        "adafgl",
        note="the first 50 rounds are FedAvg on both sides, and only those can be timed: in round "
        "51 the peer loads a library from a path on its author's machine",
    ),
    "gcfl": Peer(
        "gcfl_plus",
        note="GCFL+ on the seven sets of MOLECULES, GIN-64, one epoch in batches of 128; on Cora "
        "the peer crashes",
        ours=("--set", "preset=plus"),
        sets=MOLECULES,
    ),
    "fedpub": Peer(
        "fedpub",
        note="the peer imports torch_scatter and torch_sparse, to be compiled by hand (README)",
    ),
    "fgssl": Peer("fgssl", note="the peer imports torch_scatter, to be compiled by hand (README)"),
}


def parse() -> argparse.Namespace:
    """Read this script's options, from which `load_args` builds the peer's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--data-root", type=Path, required=True, help="folder with the raw files")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--path", help="folder with the peer's packages, if not installed")
    return parser.parse_args()


def load_args(options: argparse.Namespace, root: Path) -> Any:
    """Return the peer's global options, which it reads from `sys.argv` during its import."""
    peer = METHODS[options.method]
    if peer.sets:
        work = [
            *("--scenario", "graph_fl", "--simulation_mode", "graph_fl_cross_domain"),
            *("--task", "graph_cls", "--model", "gin", "--num_layers", "3", "--lr", "0.001"),
            *(word for name in peer.sets for word in ("--dataset", name)),
            *("--num_clients", str(len(peer.sets)), "--num_epochs", "1", "--batch_size", "128"),
        ]
    else:
        work = [
            *("--dataset", "Cora", "--simulation_mode", "subgraph_fl_louvain"),
            *("--model", "gcn", "--num_layers", "2", "--lr", "0.01"),
            *("--num_clients", str(options.clients), "--num_epochs", str(options.epochs)),
        ]
    sys.argv = [
        "openfgl",
        *("--root", str(root), "--fl_algorithm", peer.algorithm, "--seed", str(options.seed)),
        *("--num_rounds", str(options.rounds), "--hid_dim", "64", "--metrics", "accuracy"),
        *work,
    ]
    from openfgl.config import args

    # The flag is `type=bool`, so no value on the command line turns it off.
    args.use_cuda = options.device == "cuda"
    return args


def watched_rounds(trainer: Any) -> tuple[list[float], list[float], list[float]]:
    """Run the trainer. Return wall seconds, CPU seconds and accuracy of each round."""
    marks, accuracies = [now()], []
    evaluate, add_log = trainer.evaluate, trainer.logger.add_log

    def evaluate_and_mark() -> None:
        evaluate()
        marks.append(now())

    def keep_and_add_log(scores: dict[str, Any]) -> None:
        accuracies.append(float(scores["current_test_accuracy"]))
        add_log(scores)

    trainer.evaluate, trainer.logger.add_log = evaluate_and_mark, keep_and_add_log
    marks[0] = now()
    trainer.train()
    wall, cpu = ([end[clock] - begin[clock] for begin, end in pairwise(marks)] for clock in (0, 1))
    return wall, cpu, accuracies


def now() -> tuple[float, float]:
    """The wall time, and the CPU time of this process."""
    return time.perf_counter(), time.process_time()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train one method in a new folder: the peer's cache ignores the seed of a partition."""
    import torch

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as folder:
        root = Path(folder)
        for name in METHODS[options.method].sets:
            raw = options.data_root / "TUDataset" / name / "raw"
            shutil.copytree(raw, root / "global" / "graph_fl" / name / "raw")
        raw = options.data_root / "Planetoid" / "Cora" / "raw"
        shutil.copytree(raw, root / "global" / "subgraph_fl" / "Cora" / "raw")
        args = load_args(options, root)
        from openfgl.flcore.trainer import FGLTrainer
        from openfgl.utils.basic_utils import seed_everything

        start = time.perf_counter()
        seed_everything(args.seed)
        trainer = FGLTrainer(args)
        setup = time.perf_counter() - start
        seconds, cpu_seconds, accuracies = watched_rounds(trainer)
    return {
        "round_seconds": seconds,
        "round_cpu_seconds": cpu_seconds,
        "round_accuracies": accuracies,
        "setup_seconds": setup,
        "test_accuracy": float(trainer.evaluation_result["best_test_accuracy"]),
        "last_test_accuracy": accuracies[-1],
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
    }


if __name__ == "__main__":
    chosen = parse()
    if chosen.path:
        sys.path.append(chosen.path)
    with contextlib.redirect_stdout(sys.stderr):  # the peer reports every client of every round
        result = run(chosen)
    print(json.dumps(result))
