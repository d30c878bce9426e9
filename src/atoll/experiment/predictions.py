"""Predictions of a model: classes, probabilities, alerts, and their table."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from atoll.core.errors import ConfigError
from atoll.core.files import write_atomically


class Alert(NamedTuple):
    """A prediction is an alert if the probability of a class is at least the threshold."""

    positive: int  # the number of the class
    threshold: float


@dataclass(frozen=True, eq=False)
class Predictions:
    """The model's predictions for new nodes (or graphs), in the order of the new data."""

    ids: np.ndarray
    clients: np.ndarray  # the owner of each, or "" if the new data name no owner
    logits: np.ndarray  # (N, C)
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()  # sentences about the new data
    alert: Alert | None = None

    @property
    def probabilities(self) -> np.ndarray:
        """The probability of each class, (N, C) float64."""
        return np.asarray(torch.from_numpy(self.logits).double().softmax(-1).numpy())

    @property
    def labels(self) -> np.ndarray:
        """The name of the most likely class, (N,)."""
        return np.asarray(np.array(self.classes)[self.logits.argmax(-1)])

    @property
    def alerts(self) -> np.ndarray | None:
        """Whether each prediction is an alert, (N,) bool, or None without a threshold."""
        if self.alert is None:
            return None
        return np.asarray(self.probabilities[:, self.alert.positive] >= self.alert.threshold)

    def write(self, path: str | Path) -> Path:
        """Write columns id, client, class, alert if any, and p_CLASS as `.parquet` or `.csv`."""
        import pyarrow as pa
        import pyarrow.csv
        import pyarrow.parquet

        path, content, chances = check_table(path), io.BytesIO(), self.probabilities
        columns = {"id": self.ids, "client": self.clients, "class": self.labels}
        if (alerts := self.alerts) is not None:
            columns["alert"] = np.where(alerts, "yes", "no")
        columns |= {f"p_{name}": chances[:, place] for place, name in enumerate(self.classes)}
        table = pa.table(columns)
        if path.suffix == ".csv":
            pa.csv.write_csv(table, content)
        else:
            pa.parquet.write_table(table, content, compression="zstd")
        write_atomically(path, content.getvalue())
        return path


def check_table(path: str | Path) -> Path:
    """Check that predictions can be written to a file of this name, and return its path."""
    path = Path(path)
    if path.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"'{path}' is no table; give a file that ends with .parquet or .csv")
    return path
