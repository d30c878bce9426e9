"""Baselines: rows of a comparison that are not federated methods.

A baseline fits any model to a federation and predicts for each client, without messages, rounds and
engines. `run_baseline` gives it the clients, the metrics and the files of an ordinary run, so that
tables and tests treat it like a method. Its results are marked "not federated".
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation, each
from atoll.core.graph import Graph
from atoll.core.tree import stack
from atoll.experiment.config import RunConfig
from atoll.experiment.folder import RunFolder, check_folder
from atoll.experiment.hardware import tuned_process
from atoll.experiment.history import History, empty_history, select_rule
from atoll.experiment.loggers import open_logs
from atoll.experiment.metrics import score_numbers
from atoll.experiment.observers import Observer, Observers
from atoll.experiment.problem import Data, Divide, Problem
from atoll.experiment.result import Result, SeedResult
from atoll.experiment.run import Stopped

Model = TypeVar("Model")
NOT_FEDERATED = "not federated"
POOLED = "not federated, pools all data"
KINDS = (NOT_FEDERATED, POOLED)  # the model behind a baseline's scores, as results name it


class Baseline(ABC, Generic[Model]):
    """Predictions to compare federated methods with; usually a frozen dataclass of settings."""

    pools: ClassVar[bool] = False  # whether it uses several clients' data together: not private

    @abstractmethod
    def fit(self, federation: Federation, seed: int) -> Model:
        """Fit to all clients, and return the model. Test nodes and their labels are hidden."""

    @abstractmethod
    def predict(self, model: Model, client: int, graph: Graph) -> Tensor:
        """Scores of the classes for each node of a client, (N, C); the largest is predicted."""


AnyBaseline = Baseline[Any]  # a baseline with any kind of model


def without_test(federation: Federation) -> Federation:
    """The federation without test nodes: no test role, and none of those labels."""

    def hide(graph: Graph) -> Graph:
        y = torch.where(graph.test > 0, torch.zeros_like(graph.y), graph.y)
        return replace(graph, y=y, test=torch.zeros_like(graph.test))

    return replace(federation, graphs=each(hide, federation.graphs))


@tuned_process()
def run_baseline(
    config: RunConfig,
    baseline: AnyBaseline,
    *,
    out: Path | None = None,
    observer: Observer | None = None,
    data: Data | None = None,
    log: str | Sequence[str] = (),
    divide: Divide | None = None,
) -> Result:
    """Fit a baseline for every seed, a round each, score it like a method, and save it as a run."""
    problem = Problem.of(config, data)
    if problem.config.dp is not None:
        why = f"protects federated training, but '{config.method}' is a baseline without any"
        raise ConfigError(f"differential privacy {why}; leave out dp, or the baseline")
    full = msgspec.structs.replace(problem.config, rounds=1, evaluate="deployed")
    problem = replace(problem, config=full)
    folder = None if out is None else RunFolder(out)
    if out is not None:
        check_folder(out, resuming=True)
    observers = Observers(observer, out, open_logs(log, out))
    seeds, began = list[SeedResult](), time.perf_counter()
    for number in full.all_seeds:
        made = (divide or Problem.divide)(problem, number)
        federation, full = made.federation, made.config
        if not seeds:
            observers.begin(full, "none", "a baseline is not federated", made.notes)
        if observers.should_stop():
            raise Stopped(out, number, 0)
        history = _fit_and_score(baseline, federation, number)
        if folder is not None:
            if not seeds:
                folder.begin(full, federation)
            folder.write_partition(number, federation)
            folder.write_clients(number, history)
        seeds.append(SeedResult(number, history))
        observers.round(number, history)
    result = Result(
        config=full,
        seeds=tuple(seeds),
        deployed=POOLED if baseline.pools else NOT_FEDERATED,
        weights=problem.rules.weights,
        select=select_rule(full, problem.rules),
        engine="none",
        device="cpu",
        setup_seconds=time.perf_counter() - began - sum(s.history.seconds[0] for s in seeds),
        federation=federation.about,
        out=out,
        metric=federation.metric,
        hyperparameters=asdict(baseline) if is_dataclass(baseline) else {},
    )
    if out is not None:
        result.save(out)
    observers.end(result)
    return result


def _fit_and_score(baseline: AnyBaseline, federation: Federation, seed: int) -> History:
    began, hidden, found = time.perf_counter(), without_test(federation), []
    history, model = empty_history(federation), baseline.fit(hidden, seed)
    for client, (blind, graph) in enumerate(zip(hidden.graphs, federation.graphs, strict=True)):
        scores = baseline.predict(model, client, blind)
        if tuple(scores.shape) != (shape := (graph.num_nodes, federation.classes)):
            given = f"gave scores of shape {tuple(scores.shape)} for client {client}"
            wanted = f"one row a node and one column a class, {shape}"
            raise ConfigError(f"{type(baseline).__name__}.predict {given}; it must give {wanted}")
        found.append(graph.task.score(scores, graph, with_auc=federation.classes == 2))
    table = score_numbers(stack(found))
    history.scores = {name: [table] for name in history.scores}
    history.seconds = [time.perf_counter() - began]
    return history
