"""Predict a large new graph: seconds and peak memory of the whole `atoll predict` process.

    python -m bench predict                 1 million nodes, 10 million edges, 32 columns, GCN-64
    python -m bench predict --nodes 100000 --edges 1000000

The model is trained on small tables of the same columns. Limits: 30 s and 4 GB on two cores.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

SMALL = 2000
COMMAND = [sys.executable, "-c", "from atoll.cli import main; main()"]


def write_tables(folder: Path, nodes: int, edges: int, columns: int, seed: int) -> None:
    """Write numeric columns, a label that depends on them, and random edges as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet

    rng = np.random.default_rng(seed)
    x = rng.standard_normal((nodes, columns), dtype=np.float32)
    ids = rng.permutation(nodes).astype(np.int64) * 7 + 1_000_003  # the time includes their lookup
    table = {"id": ids, **{f"f{place}": x[:, place] for place in range(columns)}}
    table["label"] = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    folder.mkdir(parents=True)
    pa.parquet.write_table(pa.table(table), folder / "nodes.parquet")
    ends = {name: ids[rng.integers(0, nodes, edges)] for name in ("source", "target")}
    pa.parquet.write_table(pa.table(ends), folder / "edges.parquet")


def measure(nodes: int, edges: int, columns: int, block: int | None) -> dict[str, float]:
    """Train on small tables, then predict the large ones in another process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tables(folder / "old", SMALL, 5 * SMALL, columns, 0)
        write_tables(folder / "new", nodes, edges, columns, 1)
        run, out = folder / "run", folder / "scores.parquet"
        train = ["run", "fedavg", "--data", str(folder / "old"), "--clients", "2", "--rounds", "2"]
        train += ["--partition", "random", "--out", str(run), "--quiet"]
        subprocess.run([*COMMAND, *train], check=True)
        command = ["predict", str(run), "--data", str(folder / "new"), "--out", str(out)]
        command += ["--quiet", *([] if block is None else ["--block", str(block)])]
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, *command], check=True)
        seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        return {
            "nodes": nodes,
            "edges": edges,
            "columns": columns,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),
            "peak_mb": round(used.ru_maxrss / 1024),
            "written_mb": round(out.stat().st_size / 2**20, 1),
        }


@click.command()
@click.option("--nodes", default=1_000_000, show_default=True)
@click.option("--edges", default=10_000_000, show_default=True)
@click.option("--columns", default=32, show_default=True)
@click.option("--block", type=int, help="Nodes at a time; all by default.")
def predict(nodes: int, edges: int, columns: int, block: int | None) -> None:
    """Measure seconds and peak memory of predictions on a large new graph with GCN-64."""
    click.echo(json.dumps(measure(nodes, edges, columns, block)))
