"""A run as MLflow sees it: one run with a child for each seed, curves, parameters, final numbers.

Where `MLFLOW_TRACKING_URI` is set, that is where numbers go. Else they go into `mlflow.db` in the
run's folder, without a server: `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db`. (MLflow's
older store of plain files is no longer kept up, and refused by its newer versions.)
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.errors import ConfigError
from atoll.core.files import write_atomically
from atoll.experiment.config import RunConfig
from atoll.experiment.history import History
from atoll.experiment.loggers.base import NewRounds, flat, missing
from atoll.experiment.protocols import protocol
from atoll.experiment.result import Result, seed_metrics

EXPERIMENT = "atoll"
EVERY = 5.0
"""Least seconds between two deliveries: a database, or a server, is slower than a round."""
BATCH = 1000
"""Most numbers in one delivery, by MLflow's rules."""
LONGEST = 500
"""Most characters of a parameter's value."""


def need() -> Any:
    """MLflow's client; refuse where the package is not installed."""
    # A run of private data tells nobody that it happens, unless the user has said so.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise missing("mlflow", "mlflow") from error
    for name in ("mlflow", "alembic"):  # their news about tables are nobody's here
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient


def open_log(out: Path | None) -> MlflowLog:
    """The log of a run that is saved in `out`."""
    client = need()
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        if out is None:
            raise ConfigError(
                "log='mlflow' writes into the run's folder; give out=FOLDER as well, or set "
                "MLFLOW_TRACKING_URI"
            )
        out.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{out.absolute() / 'mlflow.db'}"
    return MlflowLog(client(tracking_uri=uri), uri, out)


def share() -> None:
    """Make the tables and the experiment of a place that several processes will deliver to."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is not None:
        _experiment(need()(tracking_uri=uri), None)


def _experiment(client: Any, artifacts: str | None) -> str:
    """The name of Atoll's experiment; made if it is not there."""
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    return str(client.create_experiment(EXPERIMENT, artifact_location=artifacts))


class MlflowLog:
    """Delivers numbers to MLflow (`experiment.run.Observer`).

    Args:
        client: MLflow's.
        uri: Where it delivers to.
        out: The run's folder, where the names of MLflow's runs are kept for a resumed run.
    """

    def __init__(self, client: Any, uri: str, out: Path | None) -> None:
        self.client, self.uri = client, uri
        self.names = None if out is None else out / "mlflow.json"
        self.artifacts = None if out is None else (out / "mlflow-artifacts").absolute().as_uri()
        self.runs: dict[str, str] = {}
        self.rounds: dict[int, NewRounds] = {}
        self.delivered = -float("inf")
        self.waiting: dict[int, History] = {}

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.config, self.weights = config, protocol(config.protocol).weights
        saved = json.loads(self.names.read_text()) if self.names and self.names.exists() else {}
        self.runs = saved.get("runs", {}) if saved.get("uri") == self.uri else {}
        if "all" not in self.runs:
            self._new("all", f"{config.method} on {config.data}")
            plain = flat(msgspec.to_builtins(config))
            self._parameters(self.runs["all"], {f"config.{k}": v for k, v in plain.items()})

    def round(self, seed: int, history: History) -> None:
        self.waiting[seed] = history
        if time.monotonic() - self.delivered >= EVERY:
            self._deliver()

    def should_stop(self) -> bool:
        return False

    def end(self, result: Result) -> None:
        self.waiting |= {one.seed: one.history for one in result.seeds}
        self._deliver()
        for one in result.seeds:
            run = self.runs[f"seed-{one.seed}"]
            final = seed_metrics(one.history, result)
            self._metrics(run, {0: {f"final/{name}": value for name, value in final.items()}})
            self.client.set_terminated(run)
        means = {f"final/{name}": found["mean"] for name, found in result.metrics().items()}
        self._metrics(self.runs["all"], {0: means})
        self._parameters(self.runs["all"], flat(dict(result.hyperparameters)))
        self.client.set_terminated(self.runs["all"])

    def _deliver(self) -> None:
        for seed, history in self.waiting.items():
            name = f"seed-{seed}"
            if name not in self.runs:
                self._new(name, name, parent=self.runs["all"])
            if seed not in self.rounds:
                self.rounds[seed] = NewRounds(self.weights, self._known(self.runs[name]))
            new = {number + 1: found for number, found in self.rounds[seed].of(seed, history)}
            self._metrics(self.runs[name], new)
        self.waiting.clear()
        self.delivered = time.monotonic()

    def _new(self, name: str, title: str, parent: str | None = None) -> None:
        """A run of MLflow's, and a note of its name for the case that this run goes on."""
        own = self.uri.startswith("sqlite:")
        experiment = _experiment(self.client, self.artifacts if own else None)
        tags = {"mlflow.parentRunId": parent} if parent else {}
        made = self.client.create_run(experiment, run_name=title, tags=tags)
        self.runs[name] = made.info.run_id
        if self.names is not None:
            text = json.dumps({"uri": self.uri, "runs": self.runs}, indent=2)
            write_atomically(self.names, text.encode())

    def _known(self, run: str) -> int:
        """How many rounds of a seed MLflow has already."""
        steps = [metric.step for metric in self.client.get_metric_history(run, "seconds")]
        return max(steps, default=0)

    def _metrics(self, run: str, found: dict[int, dict[str, float]]) -> None:
        """Numbers by step and name, in as few deliveries as possible."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = [
            Metric(name, value, now, step)
            for step, row in found.items()
            for name, value in row.items()
        ]
        for first in range(0, len(numbers), BATCH):
            self.client.log_batch(run, metrics=numbers[first : first + BATCH])

    def _parameters(self, run: str, found: dict[str, Any]) -> None:
        from mlflow.entities import Param

        pairs = [Param(name, str(value)[:LONGEST]) for name, value in found.items()]
        for first in range(0, len(pairs), 100):
            self.client.log_batch(run, params=pairs[first : first + 100])
