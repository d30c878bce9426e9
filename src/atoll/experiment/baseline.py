"""Baselines: rows of a comparison that are not federated methods.

A baseline fits any model to a federation and predicts for each client, without messages, rounds or
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
import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation, each
from atoll.core.graph import Graph, Sparse, make_graph, sparse_matrix
from atoll.core.task import Scores
from atoll.core.tree import stack
from atoll.data.split import Growth
from atoll.experiment import history as histories
from atoll.experiment.config import RunConfig
from atoll.experiment.folder import RunFolder, check_folder
from atoll.experiment.hardware import tuned_process
from atoll.experiment.history import History
from atoll.experiment.loggers import open_logs
from atoll.experiment.metrics import score_numbers, toward
from atoll.experiment.observers import Observer, Observers
from atoll.experiment.problem import Data, Divide, Problem
from atoll.experiment.result import Result, SeedResult
from atoll.experiment.run import Stopped

Model = TypeVar("Model")
NOT_FEDERATED = "not federated"
POOLED = "not federated, pools all data"
KINDS = (NOT_FEDERATED, POOLED)  # names of a baseline's model in results
WINS = "needs no federation, and no federated method here has a higher mean"
BOUND = "pools all data, which breaks the clients' privacy"


class Baseline(ABC, Generic[Model]):
    """A non-federated model for comparison, usually a frozen dataclass of settings."""

    pools: ClassVar[bool] = False  # whether it pools several clients' data, which is not private
    trains: ClassVar[str] = ""  # the method whose network and training it uses, or ""

    @abstractmethod
    def fit(self, federation: Federation, seed: int) -> Model:
        """Fit to all clients, and return the model. Test nodes have no role, and a label of 0."""

    @abstractmethod
    def predict(self, model: Model, client: int, graph: Graph) -> Tensor:
        """Return class scores for each node of a client, (N, C). The largest one is predicted."""

    def fit_in(self, problem: Problem, federation: Federation, seed: int) -> Model:
        """Call `fit`. Override this method to use the run's options or the undivided data."""
        return self.fit(federation, seed)


AnyBaseline = Baseline[Any]  # a baseline with any kind of model


def without_test(federation: Federation) -> Federation:
    """Return the federation without test roles. The labels of test nodes become 0."""

    def hide(graph: Graph) -> Graph:
        y = torch.where(graph.test > 0, torch.zeros_like(graph.y), graph.y)
        return replace(graph, y=y, test=torch.zeros_like(graph.test))

    return replace(federation, graphs=each(hide, federation.graphs))


def pooled_graph(problem: Problem, federation: Federation, seed: int) -> Graph:
    """Pool the clients' nodes in one graph, client after client, with the edges between clients.

    Data that are already partitioned have no edges between clients. A node that belongs to two
    clients appears twice.
    """
    graphs = list(federation.graphs)
    starts = np.cumsum([0, *(graph.num_nodes for graph in graphs)])
    edges = [graph.edges + int(start) for graph, start in zip(graphs, starts, strict=False)]
    weights = [graph.edge_weight for graph in graphs]
    since, stages = ([getattr(graph, name) for graph in graphs] for name in ("since", "edge_since"))
    grows = since[0] is not None
    if (source := problem.undivided(seed)) is not None:
        place, owner = np.full((2, source.num_nodes), -1)
        for client, graph in enumerate(graphs):
            ids = graph.ids.numpy()
            place[ids], owner[ids] = np.arange(starts[client], starts[client + 1]), client
        ends = source.edges
        between = (place[ends] >= 0).all(0) & (owner[ends[0]] != owner[ends[1]])
        edges.append(torch.from_numpy(place[ends[:, between]]))
        ones = np.ones(int(between.sum()), dtype=np.float32)
        weights.append(torch.from_numpy(ones if source.weight is None else source.weight[between]))
        if grows:
            when = None if source.edge_time is None else source.edge_time[between]
            part = replace(source, edges=edges[-1].numpy(), edge_time=when)
            cuts = federation.about.get("cuts")
            rule = Growth("time", tuple(cuts)) if cuts else Growth()
            stages.append(torch.from_numpy(rule.of_edges(part, torch.cat(since).numpy())))
    names = ("y", "train", "val", "test")
    y, *roles = (torch.cat([getattr(graph, name) for graph in graphs]) for name in names)
    x = _joined_features([graph.x for graph in graphs])
    whole = make_graph(x, torch.cat(edges, 1), y, *roles, edge_weight=torch.cat(weights))
    if not grows:
        return whole
    return replace(whole, since=torch.cat(since), edge_since=torch.cat(stages))


def _joined_features(parts: Sequence[Tensor | Sparse]) -> Tensor | Sparse:
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    sparse, rows, first = [part for part in parts if isinstance(part, Sparse)], [], 0
    for part in sparse:
        rows.append(part.rows.long() + first)
        first += part.shape[0]
    columns, values = (torch.cat([getattr(p, n) for p in sparse]) for n in ("columns", "values"))
    shape = first, sparse[0].shape[1]
    return sparse_matrix(torch.cat(rows), columns.long(), values, shape, square=False)


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
    """Fit a baseline for every seed, score it like a method of one round, and save the result."""
    problem = Problem.of(config, data)
    if problem.config.dp is not None:
        why = f"protects federated training, but '{config.method}' is a baseline without any"
        raise ConfigError(f"differential privacy {why}; remove dp, or the baseline")
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
        history = _fit_and_score(baseline, problem, federation, number)
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
        select=histories.select_rule(full, problem.rules),
        engine="none",
        device="cpu",
        setup_seconds=time.perf_counter() - began - sum(s.history.seconds[0] for s in seeds),
        federation=federation.about,
        out=out,
        metric=histories.metric_of(full, federation),
        positive=histories.positive_of(full, federation),
        hyperparameters=asdict(baseline) if is_dataclass(baseline) else {},
    )
    if out is not None:
        result.save(out)
    observers.end(result)
    return result


def _fit_and_score(
    baseline: AnyBaseline, problem: Problem, federation: Federation, seed: int
) -> History:
    began, hidden, found = time.perf_counter(), without_test(federation), []
    config, metric = problem.config, histories.bins_metric(problem.config, federation)
    counted = {"with_auc": federation.classes == 2, "with_bins": metric is not None}
    history = histories.empty_history(federation, metric)
    model = baseline.fit_in(problem, hidden, seed)
    for client, (blind, graph) in enumerate(zip(hidden.graphs, federation.graphs, strict=True)):
        scores = baseline.predict(model, client, blind)
        if tuple(scores.shape) != (shape := (graph.num_nodes, federation.classes)):
            given = f"gave scores of shape {tuple(scores.shape)} for client {client}"
            wanted = f"one row a node and one column a class, {shape}"
            raise ConfigError(f"{type(baseline).__name__}.predict {given}; it must give {wanted}")
        found.append(graph.task.score(scores, graph, **counted))
    counts: Scores = toward(stack(found), histories.positive_of(config, federation))
    table = score_numbers(counts, history.chosen)
    for name in history.scores:
        history.pool(name, counts, 0)
    history.scores = {name: [table] for name in history.scores}
    history.seconds = [time.perf_counter() - began]
    return history
