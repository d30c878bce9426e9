"""`python -m bench rounds-gpu`: rounds of two source trees on one GPU, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

RUNNER = Path(__file__).with_name("rounds_gpu_runner.py")
HERE = Path(__file__).resolve().parents[1] / "src"
CASES = "fedavg:cora:1,fedavg:cora:10,fedpub:cora:1"


def run_side(source: Path, side: str, cases: list[str], listing: Path | None) -> list[Any]:
    """Return the output of the runner with this source tree first on its path."""
    path = os.pathsep.join([str(source.absolute()), *map(os.path.abspath, sys.path)])
    command = [sys.executable, str(RUNNER), str(listing or ""), side, *cases]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise click.ClickException(f"the {side} side failed; its error is above.")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@click.command("rounds-gpu")
@click.option("--against", type=click.Path(path_type=Path),
              help="Source tree of another version (its folder src), measured first.")  # fmt: skip
@click.option("--cases", default=CASES, show_default=True, help="METHOD[+PRESET]:DATA:SEEDS, ...")
@click.option("--listing", type=click.Path(path_type=Path),
              help="Folder for lists of the kernels of a round.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
def rounds_gpu(against: Path | None, cases: str, listing: Path | None, out: Path | None) -> None:
    """Measure milliseconds and kernels of a round on a GPU, in this version and another."""
    for folder in filter(None, (against, listing)):
        if not folder.is_dir():
            raise click.ClickException(f"the folder '{folder}' does not exist.")
    wanted = [case.strip() for case in cases.split(",") if case.strip()]
    sides = {"new": run_side(HERE, "new", wanted, listing)} if against is None else {
        "old": run_side(against, "old", wanted, listing),
        "new": run_side(HERE, "new", wanted, listing),
    }  # fmt: skip
    drawn = Table("case", "side", "ms a round", "kernels", "busy us", "test accuracy")
    for rows in zip(*sides.values(), strict=True):
        for side, row in zip(sides, rows, strict=True):
            case = f"{row['method']}, {row['data']}, {row['seeds']} seed(s)"
            times = f"{row['ms']:.3f}", f"{row['kernels']:.0f}", f"{row['busy_us']:.0f}"
            drawn.add_row(case, side, *times, f"{row['test_accuracy']:.4f}")
    Console(width=110, highlight=False).print(drawn)
    if out:
        out.write_text(json.dumps(sides, indent=2) + "\n")
