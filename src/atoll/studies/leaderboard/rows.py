"""The rows of the leaderboard, in a CSV file that grows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from atoll.core.errors import ConfigError
from atoll.core.files import write_atomically
from atoll.experiment.config import run_command
from atoll.experiment.metrics import spread
from atoll.studies.compare.tables import settings_text
from atoll.studies.study_run import RunOutcome

TRIALS = "trials"
Key = tuple[str, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one set and partition, over all seeds. Rows of trials are in another file.

    `recipe` is a hash of the configuration with all defaults, so it detects a changed default.
    """

    league: str
    data: str
    partition: str  # its name in the recipe
    clients: int | None = None
    method: str  # its label
    settings: str = ""
    rounds: int | None = None
    epochs: int | None = None
    metric: str = ""
    mean: float | None = None  # None if training diverged
    std: float | None = None  # None for one seed
    seeds: int
    values: str = ""  # value of each seed
    bytes_per_round: float | None = None  # up and down, all clients
    ms_per_round: float | None = None  # of one seed; on a GPU, several seeds train at once
    device: str = ""
    recipe: str
    command: str

    @property
    def key(self) -> Key:
        """The columns that identify a row. A new row replaces an earlier row with the same key."""
        known = self.league, self.data, self.partition, self.method
        return (*known, self.recipe) if self.league == TRIALS else known

    @property
    def problem(self) -> tuple[str, str]:
        return self.data, self.partition

    @property
    def scores(self) -> tuple[float, ...]:
        return tuple(map(float, self.values.split()))


def make_row(outcome: RunOutcome, recipe: str, role: str = "test") -> Row:
    """Make the row of a run that ended. `role` is "test", or "val" for a trial."""
    config, labels = outcome.run.config, outcome.run.labels
    about = {name: labels[name] for name in ("league", "data", "partition", "method")}
    plain = msgspec.structs.replace(config, data_root=None, device="auto")
    about |= {name: getattr(config, name) for name in ("rounds", "epochs", "seeds")}
    about |= {"recipe": recipe, "command": run_command(plain)}
    about["settings"] = settings_text(config.set)
    if (summary := outcome.summary) is None:
        return Row(**about)
    metrics, metric = summary["metrics"], summary["metric"]
    if len(metrics.get(f"{role}_{metric}", {}).get("per_seed", ())) < summary["seeds"]:
        metric = "accuracy"  # no client of some seed has both classes
    values, rounds = metrics[f"{role}_{metric}"]["per_seed"], summary["rounds"] * summary["seeds"]
    return Row(
        **about,
        clients=summary["clients"],
        metric=metric,
        mean=float(np.mean(values)),
        std=spread(values),
        values=" ".join(f"{value:.6g}" for value in values),
        bytes_per_round=round(sum(summary["bytes"].values()) / rounds, 1),
        ms_per_round=round(1000 * summary["seconds"]["per_round"], 4),
        device=summary["device"],
    )


def read_rows(path: Path) -> dict[Key, Row]:
    """Read the rows of a file. A missing file has no rows."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        if tuple(lines.fieldnames or ()) != Row.__struct_fields__:
            hint = "give a file that `atoll leaderboard` wrote, or a new name"
            raise ConfigError(f"'{path}' has other columns than a leaderboard; {hint}")
        try:
            filled = ({key: text for key, text in line.items() if text} for line in lines)
            rows = [msgspec.convert(line, Row, strict=False) for line in filled]
        except msgspec.ValidationError as error:
            raise ConfigError(f"'{path}' has a damaged row ({error}); delete the row") from error
    return {row.key: row for row in rows}


def add_rows(path: Path, new: Iterable[Row]) -> None:
    """Add rows to a file in sorted order, so that two versions of the file are easy to compare."""
    rows = read_rows(path) | {row.key: row for row in new}
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row.__struct_fields__)
    for key in sorted(rows):
        row = msgspec.structs.astuple(rows[key])
        writer.writerow([f"{one:.10g}" if isinstance(one, float) else one for one in row])
    write_atomically(path, text.getvalue().encode())
