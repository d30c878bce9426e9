"""Numbers of every round for other tools, beside Atoll's own files: `--log tensorboard`.

Each tool has a module of its own, which is imported when it is asked for. What they log is the
same: every metric of every role for the deployed and the local models, as a mean over clients under
the protocol's weights, bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core.errors import ConfigError, unknown
from atoll.core.task import ROLES
from atoll.engines.ledger import SCORE
from atoll.experiment.history import SCORED, History
from atoll.experiment.metrics import METRICS, mean_over_clients
from atoll.experiment.selection import weight_of

if TYPE_CHECKING:
    from atoll.experiment.run import Observer

LOGS = {
    "tensorboard": "atoll.experiment.loggers.tensorboard",
    "mlflow": "atoll.experiment.loggers.mlflow",
}
"""Where each tool's `open_log`, `need` and `share` are."""


def open_logs(names: str | Sequence[str], out: Path | None) -> list[Observer]:
    """One observer for each tool, ready to hear about a run that is saved in `out`."""
    return [module.open_log(out) for module in _modules(names)]


def check_logs(names: str | Sequence[str]) -> None:
    """Refuse tools that do not exist or are not installed, before the first of many runs."""
    for module in _modules(names):
        module.need()


def share_logs(names: str | Sequence[str]) -> None:
    """Before several processes log: make what they would all make at once."""
    for module in _modules(names):
        module.share()


def _modules(names: str | Sequence[str]) -> list[Any]:
    wanted = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    for name in wanted:
        if name not in LOGS:
            raise unknown("value of --log", name, LOGS)
    return [import_module(LOGS[name]) for name in wanted]


def missing(package: str, extra: str) -> ConfigError:
    """The error for a tool that is not installed."""
    return ConfigError(
        f"--log {extra} needs the package {package}, which is not installed; install it with: "
        f"pip install 'atoll-fgl[{extra}]'"
    )


class NewRounds:
    """What each round found, as plain numbers, once for each round and seed."""

    def __init__(self, weights: str, first: int = 0) -> None:
        self.weights, self.first = weights, first
        self.next: dict[int, int] = {}
        self.read: dict[int, int] = {}

    def of(self, seed: int, history: History) -> Iterator[tuple[int, dict[str, float]]]:
        """Number and scalars of each round that this seed has played since the last call."""
        traffic = self._traffic(seed, history)
        for number in range(self.next.get(seed, self.first), history.rounds):
            crossed = traffic.get(number, {"up": 0, "down": 0})
            yield (
                number,
                {
                    **_scores(history, number, self.weights),
                    "seconds": history.seconds[number],
                    **{f"bytes_{way}": float(size) for way, size in crossed.items()},
                },
            )
        self.next[seed] = max(history.rounds, self.next.get(seed, self.first))

    def _traffic(self, seed: int, history: History) -> dict[int, dict[str, int]]:
        """Bytes of training in each round that the ledger has got since the last call."""
        entries = [] if history.ledger is None else history.ledger.entries
        found: dict[int, dict[str, int]] = {}
        for entry in entries[self.read.get(seed, 0) :]:
            if entry.step != SCORE:
                row = found.setdefault(entry.round, {"up": 0, "down": 0})
                row["up"] += entry.up * entry.size
                row["down"] += entry.down * entry.size
        self.read[seed] = len(entries)
        return found


def _scores(history: History, number: int, weights: str) -> dict[str, float]:
    found = {}
    for scored in SCORED:
        table = history.scores[scored][number]
        for place, role in enumerate(ROLES):
            weight = weight_of(history, role, weights)
            means = mean_over_clients(table[:, place].T, weight)
            for metric, value in zip(METRICS, means.tolist(), strict=True):
                if not np.isnan(value):
                    found[f"{scored}/{role}_{metric}"] = value
    return found


def flat(settings: Any, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested settings as one table of plain values: {"optimizer.lr": 0.01}."""
    found: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= flat(value, f"{name}.")
        elif value is not None:
            plain = isinstance(value, bool | int | float | str)
            found[name] = value if plain else str(value)
    return found
