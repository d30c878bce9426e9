"""The two large tables of a run, metrics and ledger: as columns, as files, and read back.

A table is CSV, or Parquet where that would be long. A CSV has six digits of each score.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from atoll.core.errors import DataError
from atoll.core.task import ROLES
from atoll.engines.ledger import Ledger
from atoll.experiment.history import SCORED, History
from atoll.experiment.metrics import METRICS

Columns = dict[str, np.ndarray]
MAX_CSV_ROWS = 200_000
"""Longest table that is written as text; a longer one becomes Parquet, a tenth of the size."""
SCORES = tuple(f"{role}_{metric}" for role in ROLES for metric in METRICS)


def metrics_table(seeds: Mapping[int, History], deployed: str) -> Columns:
    """Seed, round, client, scored model and every metric of every role."""
    blocks = [
        (seed, number, deployed if scored == "deployed" else scored, table)
        for seed, history in seeds.items()
        for scored in SCORED
        for number, table in enumerate(history.scores[scored])
    ]
    sizes = [len(table) for *_, table in blocks]
    numbers = np.concatenate([table.reshape(len(table), -1) for *_, table in blocks])
    return {
        "seed": np.repeat([seed for seed, *_ in blocks], sizes),
        "round": np.repeat([number for _, number, *_ in blocks], sizes),
        "client": np.concatenate([np.arange(size) for size in sizes]),
        "scored": np.repeat([label for _, _, label, _ in blocks], sizes),
        **dict(zip(SCORES, numbers.T, strict=True)),
    }


def ledger_table(seeds: Mapping[int, Ledger]) -> Columns:
    """Seed, round, step, client and the bytes that crossed."""
    entries = [(seed, entry) for seed, ledger in seeds.items() for entry in ledger.entries]
    sizes = [entry.size for _, entry in entries]
    none = np.empty(0, dtype=np.int64)
    return {
        "seed": np.repeat([seed for seed, _ in entries], sizes),
        "round": np.repeat([entry.round for _, entry in entries], sizes),
        "step": np.repeat([entry.step for _, entry in entries], sizes),
        "client": np.concatenate([none, *(entry.clients for _, entry in entries)]),
        "bytes_down": np.repeat([entry.down for _, entry in entries], sizes),
        "bytes_up": np.repeat([entry.up for _, entry in entries], sizes),
    }


def table_file(name: str, columns: Columns) -> tuple[str, bytes]:
    """The name and content of a table's file; undefined numbers stay empty."""
    if len(columns["seed"]) <= MAX_CSV_ROWS:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*map(_cells, columns.values()), strict=True))
        return f"{name}.csv", text.getvalue().encode()
    import pyarrow as pa
    import pyarrow.parquet

    slim = {
        key: pa.array(values.astype(np.float32), from_pandas=True)
        if values.dtype.kind == "f"
        else pa.array(values)
        for key, values in columns.items()
    }
    content = io.BytesIO()
    pa.parquet.write_table(pa.table(slim), content, compression="zstd")
    return f"{name}.parquet", content.getvalue()


def _cells(values: np.ndarray) -> Sequence[object]:
    if values.dtype.kind != "f":
        return list(values.tolist())
    return ["" if np.isnan(v) else f"{v:.6g}" for v in values.tolist()]


def read_table(folder: Path, name: str) -> Columns:
    """A table that `table_file` made."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    path = folder / f"{name}.csv"
    try:
        if path.exists():
            kinds = dict.fromkeys(SCORES, pa.float64())
            options = pa.csv.ConvertOptions(column_types=kinds)
            table = pa.csv.read_csv(path, convert_options=options)
        else:
            path = folder / f"{name}.parquet"
            table = pa.parquet.read_table(path)
    except FileNotFoundError:
        raise DataError(f"the run in '{folder}' has no {name}.csv; copy it whole") from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"'{path}' cannot be read ({error})") from error
    return {key: table.column(key).to_numpy() for key in table.column_names}


def read_history(metrics: Columns, seed: int, arrays: Mapping[str, np.ndarray]) -> History:
    """A seed's history from the metrics table and from the arrays of `RunFolder.seed_data`."""
    own = {key: values[metrics["seed"] == seed] for key, values in metrics.items()}
    clients = int(own["client"].max()) + 1
    shape = -1, clients, len(ROLES), len(METRICS)
    unknown = np.full(len(own["client"]), np.nan)  # a run of a version without this metric
    numbers = np.stack([own.get(name, unknown).astype(float) for name in SCORES], axis=-1)
    local = own["scored"] == "local"
    scores = {}
    for name, chosen in (("deployed", ~local), ("local", local)):
        rows = np.flatnonzero(chosen)
        rows = rows[np.lexsort((own["client"][rows], own["round"][rows]))]
        scores[name] = list(numbers[rows].reshape(shape))
    pairs = arrays.get("cached", np.empty((0, 2), dtype=int)).tolist()
    cached: list[list[int]] = [[] for _ in range(clients)] if pairs else []
    for client, number in pairs:
        cached[client].append(number)
    alike = np.ones(clients, dtype=np.int64)
    return History(
        counts=arrays.get("counts", np.stack([alike] * len(ROLES), axis=1)),
        nodes=arrays.get("nodes", alike),
        scores=scores,
        seconds=arrays["seconds"].tolist() if arrays else [],
        cached=cached,
    )


def read_ledger(table: Columns, seed: int) -> Ledger:
    """A seed's ledger; neighbouring lines of one step are one entry, as they were."""
    ledger = Ledger()
    own = {key: values[table["seed"] == seed] for key, values in table.items()}
    client = own["client"]
    breaks = np.ones(len(client), dtype=bool)
    breaks[1:] = client[1:] <= client[:-1]
    for key in ("round", "step", "bytes_down", "bytes_up"):
        breaks[1:] |= own[key][1:] != own[key][:-1]
    for first, end in pairwise([*np.flatnonzero(breaks), len(client)]):
        ledger.add(
            int(own["round"][first]),
            str(own["step"][first]),
            client[first:end].tolist(),
            int(own["bytes_down"][first]),
            int(own["bytes_up"][first]),
        )
    return ledger
