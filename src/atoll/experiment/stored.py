"""A finished run's result, read from its folder alone: no data, no checkpoint, no method needed.

`saved.read_run` makes the federation again, which needs its data, and gives the server's tree; this
gives what was measured. Scores are those of metrics.csv, hence rounded to six digits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import ConfigError, DataError
from atoll.engines.ledger import Ledger
from atoll.experiment.config import RunConfig, make_config, read_config
from atoll.experiment.evaluate import ROLES
from atoll.experiment.facts import FACTS, FEDERATION_FACTS, read_facts
from atoll.experiment.metrics import METRICS
from atoll.experiment.result import Columns, Result, SeedResult
from atoll.experiment.rounds import History


class NotFinished(ConfigError):
    """The folder holds a run, but not its end."""


@dataclass(frozen=True, eq=False)
class StoredRun:
    """What a folder of a finished run tells.

    Attributes:
        folder: Where it is.
        result: As the run returned it.
        summary: What result.json holds: the reported numbers in full precision.
        federation: How the clients differ (`facts.save_federation_facts`); empty if not measured.
        relations: Each seed's similarity, mixing and cluster, where the method has them.
        notes: What the folder lacks and what that means, in sentences.
    """

    folder: Path
    result: Result
    summary: Mapping[str, Any]
    federation: Mapping[str, np.ndarray]
    relations: tuple[Mapping[str, np.ndarray], ...]
    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> RunConfig:
        return self.result.config


def read_result(folder: str | Path) -> Result:
    """The result of a finished run, as `atoll.run` returned it, from the folder it was saved in.

    Neither data nor method nor checkpoints are needed. Scores have six digits, as in metrics.csv.

    Example:
        >>> import atoll
        >>> result = atoll.run("fedavg", "lagoon", rounds=2, out="my-run")
        >>> atoll.read_result("my-run").bytes() == result.bytes()
        True
    """
    return read_stored(Path(folder)).result


def read_stored(folder: Path) -> StoredRun:
    """Everything that the folder of a finished run tells."""
    config, about = _finished(folder)
    metrics, ledger = (_table(folder, name) for name in ("metrics", "ledger"))
    numbers = range(config.seed, config.seed + config.seeds)
    facts = [read_facts(folder / f"seed-{number}" / FACTS) for number in numbers]
    try:
        names = set(metrics["scored"].tolist()) - {"local"}
        seeds = tuple(
            SeedResult(number, _history(metrics, number, kept), _ledger(ledger, number))
            for number, kept in zip(numbers, facts, strict=True)
        )
        result = Result(
            config,
            seeds,
            names.pop() if names else about["scored"],
            about["weights"],
            about["select"],
            about["engine"],
            about["device"],
            about["seconds"]["setup"],
            about["environment"],
            about["federation"],
            folder,
            about.get("metric", "accuracy"),
            about["hyperparameters"],
        )
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(
            f"the run in '{folder}' was saved by another version of Atoll, or its files were "
            f"changed ({type(error).__name__}: {error}); run it again"
        ) from error
    notes = []
    if not all(facts):
        notes.append(
            "was saved without its clients' sizes, by an earlier version: curves are plain means "
            "over clients and times of rounds are unknown"
        )
    kept = ("similarity", "mixing", "cluster")
    relations = tuple({name: one[name] for name in kept if name in one} for one in facts)
    return StoredRun(folder, result, about, read_facts(folder / FEDERATION_FACTS), relations, notes)


def _finished(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Configuration and result.json, or a clear word."""
    if not folder.is_dir():
        raise ConfigError(f"folder '{folder}' does not exist; give the folder of a run or a study")
    if not (folder / "config.toml").exists():
        raise ConfigError(f"'{folder}' holds no run (it has no config.toml)")
    path = folder / "result.json"
    if not path.exists():
        raise NotFinished(
            f"the run in '{folder}' is not finished; continue it with: atoll run --resume {folder}"
        )
    config, about = make_config(**read_config(folder / "config.toml")), read_json(path)
    if about.get("seeds", config.seeds) < config.seeds:
        raise NotFinished(
            f"the run in '{folder}' has {about['seeds']} of its {config.seeds} seeds; continue it "
            f"with: atoll run --resume {folder}"
        )
    return config, about


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file, or a clear word."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"'{path}' does not hold an object; it was changed, or is another file")
    return found


def _table(folder: Path, name: str) -> Columns:
    """A table of the folder, as text or as Parquet."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    path = folder / f"{name}.csv"
    try:
        if path.exists():
            kinds = dict.fromkeys(
                (f"{role}_{metric}" for role in ROLES for metric in METRICS), pa.float64()
            )
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


def _history(metrics: Columns, seed: int, facts: Mapping[str, np.ndarray]) -> History:
    """What a seed measured, round by round."""
    own = {key: values[metrics["seed"] == seed] for key, values in metrics.items()}
    clients = int(own["client"].max()) + 1
    numbers = np.stack(
        [own[f"{role}_{metric}"].astype(float) for role in ROLES for metric in METRICS], axis=-1
    ).reshape(-1, len(ROLES), len(METRICS))
    scores = {}
    for name, chosen in (("deployed", own["scored"] != "local"), ("local", None)):
        rows = np.flatnonzero(own["scored"] == "local" if chosen is None else chosen)
        rows = rows[np.lexsort((own["client"][rows], own["round"][rows]))]
        scores[name] = list(numbers[rows].reshape(-1, clients, len(ROLES), len(METRICS)))
    cached: list[list[int]] = [[] for _ in range(clients)] if len(facts.get("cached", ())) else []
    for client, number in facts.get("cached", np.empty((0, 2), dtype=int)).tolist():
        cached[client].append(number)
    alike = np.ones(clients, dtype=np.int64)
    return History(
        counts=facts.get("counts", np.stack([alike] * len(ROLES), axis=1)),
        nodes=facts.get("nodes", alike),
        scores=scores,
        seconds=facts["seconds"].tolist() if facts else [],
        cached=cached,
    )


def _ledger(table: Columns, seed: int) -> Ledger:
    """What crossed in a seed; neighbouring lines of one step are one entry, as they were."""
    ledger = Ledger()
    own = {key: values[table["seed"] == seed] for key, values in table.items()}
    client = own["client"]
    if not len(client):
        return ledger
    breaks = np.concatenate([[True], client[1:] <= client[:-1]])
    for key in ("round", "step", "bytes_down", "bytes_up"):
        breaks[1:] |= own[key][1:] != own[key][:-1]
    starts = np.flatnonzero(breaks)
    for first, end in zip(starts, [*starts[1:], len(client)], strict=True):
        ledger.add(
            int(own["round"][first]),
            str(own["step"][first]),
            client[first:end].tolist(),
            int(own["bytes_down"][first]),
            int(own["bytes_up"][first]),
        )
    return ledger
