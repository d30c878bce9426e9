"""Loggers that send the numbers of every round to other tools (`--log tensorboard`).

Each tool is imported on demand. All tools get the same numbers: bytes, seconds, and every metric
of every role for the deployed and the local models. A metric is a mean with the protocol's weights,
but a chosen pooled metric is computed over all clients' nodes together.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from atoll.core.errors import ConfigError, check_name, not_installed
from atoll.core.files import write_atomically
from atoll.core.space import Value
from atoll.core.task import ROLES
from atoll.engines.ledger import SCORE
from atoll.experiment.config import RunConfig
from atoll.experiment.history import SCORED, History, weight_of
from atoll.experiment.metrics import METRICS, mean_over_clients
from atoll.experiment.observers import Observer
from atoll.experiment.protocols import protocol
from atoll.experiment.result import Result

EXPERIMENT = "atoll"  # Atoll's experiment in MLflow
EVERY = 5.0  # least seconds between two uploads to MLflow, whose database is slower than a round
BATCH = {"metrics": 1000, "params": 100}  # most entries in one upload, by MLflow's rules
LONGEST = 500  # most characters of a parameter's value in MLflow


class RoundLog(Observer):
    """Send the numbers of each round to a tool, once for each round and seed."""

    package: ClassVar[str]

    def __init__(self, out: Path | None) -> None:
        self.out = out

    @staticmethod
    def load() -> Any:
        """Import the tool's class."""

    @classmethod
    def need(cls) -> Any:
        """Return the tool's class, or raise an error if its package is not installed."""
        try:
            return cls.load()
        except ImportError as error:
            raise not_installed(f"--log {cls.package}", cls.package, cls.package) from error

    @classmethod
    def share(cls) -> None:
        """Create files that several processes would otherwise create at once, if necessary."""

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.config, self.weights = config, protocol(config.protocol).weights
        self.next: dict[int, int] = {}
        self.read: dict[int, int] = {}

    def new_rounds(self, seed: int, history: History) -> dict[int, dict[str, float]]:
        """Return the numbers of this seed's rounds since the last call, by round, from 1 on."""
        first = self.next.get(seed, 0)
        self.next[seed] = max(first, history.rounds)
        entries, sent = history.ledger.entries, defaultdict[int, Counter[str]](Counter)
        for entry in entries[self.read.get(seed, 0) :]:
            if entry.step != SCORE:
                sent[entry.round]["up"] += entry.up * entry.size
                sent[entry.round]["down"] += entry.down * entry.size
        self.read[seed] = len(entries)
        found: dict[int, dict[str, float]] = {}
        for number in range(first, history.rounds):
            row = {"seconds": history.seconds[number]}
            for scored, (place, role) in product(SCORED, enumerate(ROLES)):
                values = history.scores[scored][number][:, place].T
                means = mean_over_clients(values, weight_of(history, role, self.weights)).tolist()
                del means[len(METRICS) :]
                for metric in history.chosen:  # pooled, not a mean
                    this = slice(number, number + 1)
                    means += history.pooled_metric(scored, metric, role, this).tolist()
                named = zip(history.columns, means, strict=True)
                row |= {f"{scored}/{role}_{k}": mean for k, mean in named if not np.isnan(mean)}
            row |= {f"bytes_{way}": float(sent[number][way]) for way in ("up", "down")}
            found[number + 1] = row
        return found


def final_metrics(history: History, result: Result) -> dict[str, float]:
    """Return one seed's reported numbers, by their names in the tools."""
    return {f"final/{name}": value for name, value in result.seed_metrics(history).items()}


class TensorBoardLog(RoundLog):
    """Write `tensorboard/seed-N/` in the run's folder: curves, hyper-parameters, final numbers."""

    package = "tensorboard"

    def __init__(self, out: Path | None) -> None:
        super().__init__(out)
        self.writer_class = self.need()
        if out is None:
            problem = "log='tensorboard' writes into the run's folder"
            raise ConfigError(f"{problem}; give out=FOLDER as well")
        self.folder = out / "tensorboard"
        self.writers: dict[int, Any] = {}  # their class is in an optional package

    @staticmethod
    def load() -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter

    def round(self, seed: int, history: History) -> None:
        if seed not in self.writers:
            # A resumed run writes all its rounds again, and TensorBoard drops the old ones.
            folder = str(self.folder / f"seed-{seed}")
            self.writers[seed] = self.writer_class(folder, purge_step=0, flush_secs=10)
        for number, found in self.new_rounds(seed, history).items():
            for name, value in found.items():
                self.writers[seed].add_scalar(name, value, number)

    def end(self, result: Result) -> None:
        names = {"method": result.config.method, "data": result.config.data}
        for one in result.seeds:
            self.round(one.seed, one.history)  # an earlier call may have finished this seed
            writer, final = self.writers[one.seed], final_metrics(one.history, result)
            # Into the folder of the curves, because by default every call makes another one.
            writer.add_hparams(names | flat(result.hyperparameters), final, run_name=".")
            writer.close()


class MlflowLog(RoundLog):
    """Send curves, parameters and final numbers to MLflow: one run with a child for each seed.

    Numbers go to `MLFLOW_TRACKING_URI` or, if it is not set, into `mlflow.db` in the run's
    folder: `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db`. Newer versions of MLflow refuse
    plain files. `mlflow.json` stores the IDs of MLflow's runs for a resumed run.
    """

    package = "mlflow"

    def __init__(self, out: Path | None) -> None:
        super().__init__(out)
        client, uri = self.need(), os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            if out is None:
                give = "give out=FOLDER as well, or set MLFLOW_TRACKING_URI"
                raise ConfigError(f"log='mlflow' writes into the run's folder; {give}")
            out.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{out.absolute() / 'mlflow.db'}"
        self.client, self.uri = client(tracking_uri=uri), uri
        self.runs: dict[str, str] = {}
        self.waiting: dict[int, History] = {}
        self.delivered = -float("inf")

    @staticmethod
    def load() -> Any:
        # A run on private data must not report to a third party, unless the user wants it.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # they log every table that they create
            logging.getLogger(name).setLevel(logging.WARNING)
        return MlflowClient

    @classmethod
    def share(cls) -> None:
        if (uri := os.environ.get("MLFLOW_TRACKING_URI")) is not None:
            _experiment(cls.need()(tracking_uri=uri), None)

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        super().begin(config, engine, why, notes)
        names = None if self.out is None else self.out / "mlflow.json"
        known = json.loads(names.read_text()) if names and names.exists() else {}
        self.runs = known.get("runs", {}) if known.get("uri") == self.uri else {}
        if "all" not in self.runs:
            self._new_run("all", f"{config.method} on {config.data}")
            self._log_parameters(flat(msgspec.to_builtins(config), "config."))

    def round(self, seed: int, history: History) -> None:
        self.waiting[seed] = history
        if time.monotonic() - self.delivered >= EVERY:
            self._deliver()

    def end(self, result: Result) -> None:
        self.waiting |= {one.seed: one.history for one in result.seeds}
        self._deliver()
        for one in result.seeds:
            name = f"seed-{one.seed}"
            self._log_metrics(name, {0: final_metrics(one.history, result)})
            self.client.set_terminated(self.runs[name])
        means = {f"final/{name}": found["mean"] for name, found in result.metrics().items()}
        self._log_metrics("all", {0: means})
        self._log_parameters(flat(result.hyperparameters))
        self.client.set_terminated(self.runs["all"])

    def _deliver(self) -> None:
        for seed, history in self.waiting.items():
            name = f"seed-{seed}"
            if name not in self.runs:
                self._new_run(name, name, {"mlflow.parentRunId": self.runs["all"]})
            if seed not in self.next:  # MLflow may have rounds of an earlier call
                steps = self.client.get_metric_history(self.runs[name], "seconds")
                self.next[seed] = max((metric.step for metric in steps), default=0)
            self._log_metrics(name, self.new_rounds(seed, history))
        self.waiting.clear()
        self.delivered = time.monotonic()

    def _new_run(self, name: str, title: str, tags: Mapping[str, str] | None = None) -> None:
        """Create a run in MLflow, and save its ID for a resumed run."""
        artifacts = None
        if self.out is not None and self.uri.startswith("sqlite:"):
            artifacts = (self.out / "mlflow-artifacts").absolute().as_uri()
        experiment = _experiment(self.client, artifacts)
        made = self.client.create_run(experiment, run_name=title, tags=tags or {})
        self.runs[name] = made.info.run_id
        if self.out is not None:
            text = json.dumps({"uri": self.uri, "runs": self.runs}, indent=2)
            write_atomically(self.out / "mlflow.json", text.encode())

    def _log_metrics(self, run: str, found: Mapping[int, Mapping[str, float]]) -> None:
        """Send numbers by step and name."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [(step, *pair) for step, row in found.items() for pair in row.items()]
        self._log(run, "metrics", [Metric(name, value, now, step) for step, name, value in rows])

    def _log_parameters(self, found: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        self._log("all", "params", [Param(k, str(value)[:LONGEST]) for k, value in found.items()])

    def _log(self, run: str, kind: str, entries: Sequence[object]) -> None:
        for first in range(0, len(entries), BATCH[kind]):
            self.client.log_batch(self.runs[run], **{kind: entries[first : first + BATCH[kind]]})


def _experiment(client: Any, artifacts: str | None) -> str:
    """Return the id of Atoll's experiment in MLflow. Create it if it does not exist."""
    if (found := client.get_experiment_by_name(EXPERIMENT)) is not None:
        return str(found.experiment_id)
    return str(client.create_experiment(EXPERIMENT, artifact_location=artifacts))


LOGS: dict[str, type[RoundLog]] = {"tensorboard": TensorBoardLog, "mlflow": MlflowLog}
"""All tools by their names on the command line."""


def open_logs(names: str | Sequence[str], out: Path | None) -> list[RoundLog]:
    """Return one observer for each tool, for a run that is saved in `out`."""
    return [log(out) for log in _logs(names)]


def check_logs(names: str | Sequence[str]) -> None:
    """Refuse tools that do not exist or are not installed, before the first of many runs."""
    for log in _logs(names):
        log.need()


def share_logs(names: str | Sequence[str]) -> None:
    """Create shared files before several processes log at once."""
    for log in _logs(names):
        log.share()


def _logs(names: str | Sequence[str]) -> list[type[RoundLog]]:
    wanted = dict.fromkeys([names] if isinstance(names, str) else names)
    for name in wanted:
        check_name("value of --log", name, LOGS)
    return [LOGS[name] for name in wanted]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Flatten nested settings to one table of plain values: {"optimizer.lr": 0.01}."""
    found: dict[str, Value] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            plain = isinstance(value, bool | int | float | str)
            found[f"{prefix}{key}"] = value if plain else str(value)
    return found
