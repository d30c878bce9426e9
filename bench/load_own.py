"""Load a large user graph: seconds, peak memory, and memory relative to the arrays' size.

    python bench/load_own.py                      1 million nodes, 16 features, 10 million edges
    python bench/load_own.py --format csv --ids text --weights

One process makes the files in a temporary folder, and another loads them, so that the peak memory
belongs to loading only. Limits: 60 s, 6 GB, 3 times the arrays' size.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def make(folder: Path, args: argparse.Namespace) -> None:
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.csv
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    # Ids are not 0..N-1, so that the time includes their lookup.
    ids = pa.array(rng.permutation(args.nodes).astype(np.int64) * 7 + 1_000_003)
    if args.ids == "text":
        ids = pa.compute.binary_join_element_wise("account-", ids.cast(pa.string()), "")
    nodes = {"id": ids, "label": pa.array(rng.integers(0, 5, args.nodes))}
    for column in range(args.features):
        nodes[f"f{column}"] = pa.array(rng.standard_normal(args.nodes))
    edges = {
        name: ids.take(rng.integers(0, args.nodes, args.edges)) for name in ("source", "target")
    }
    if args.weights:
        edges["weight"] = pa.array(rng.random(args.edges))
    for name, columns in (("nodes", nodes), ("edges", edges)):
        file = folder / f"{name}.{args.format}"
        if args.format == "csv":
            pa.csv.write_csv(pa.table(columns), file)
        else:
            pa.parquet.write_table(pa.table(columns), file)


def load(folder: Path) -> None:
    from atoll.data.own.reader import load_own

    before = peak()
    start, cpu = time.perf_counter(), time.process_time()
    source, _ = load_own(folder)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    optional = [array for array in (source.weight, source.split) if array is not None]
    arrays = [source.x, source.edges, source.y, *source.columns.values(), *optional]
    size = sum(array.nbytes for array in arrays) / 2**20
    found = {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_mb": round(peak()),
        "imports_mb": round(before),
        "arrays_mb": round(size),
        "times_arrays": round((peak() - before) / size, 2),
        "nodes": source.num_nodes,
        "edges": int(source.edges.shape[1]),
    }
    print(json.dumps(found))


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--format", choices=["parquet", "csv"], default="parquet")
    parser.add_argument("--ids", choices=["number", "text"], default="number")
    parser.add_argument("--weights", action="store_true")
    parser.add_argument("--make", type=Path, help="make the files here and stop")
    parser.add_argument("--load", type=Path, help="load this folder and stop")
    args = parser.parse_args()
    if args.make:
        make(args.make, args)
    elif args.load:
        load(args.load)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for step in ("--make", "--load"):
                subprocess.run([sys.executable, *sys.argv, step, folder], check=True)


if __name__ == "__main__":
    main()
