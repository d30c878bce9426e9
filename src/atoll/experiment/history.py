"""The measurements of one seed's rounds, and the rule that selects the reported round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from typing import Protocol as Structural

import numpy as np
import torch

from atoll.core.errors import ConfigError, check_name
from atoll.core.federation import Federation
from atoll.core.task import ROLES, Scores
from atoll.core.tree import Tree
from atoll.engines.ledger import Ledger
from atoll.experiment.metrics import METRICS, best_round, find_metric, mean_over_clients, of_bins
from atoll.experiment.threshold import Threshold, choose, parse_rule

if TYPE_CHECKING:
    from atoll.experiment.config import RunConfig
    from atoll.experiment.protocols import Protocol

SCORED = ("deployed", "local")
BEST_CACHED = "best-cached-test"
"""Each client's best test score over its cached models and the last one. It leaks test data."""


@dataclass
class History:
    """All measurements, round by round."""

    counts: np.ndarray  # training, validation and test nodes (or graphs) of each client, (K, 3)
    nodes: np.ndarray  # nodes (or graphs) of each client, (K,)
    # By `SCORED`, for each round an array by client, role and metric, (K, 3, len(columns)).
    scores: dict[str, list[np.ndarray]] = field(default_factory=lambda: {k: [] for k in SCORED})
    seconds: list[float] = field(default_factory=list)  # of each round, training and scoring
    cached: list[list[int]] = field(default_factory=list)  # rounds of cached models, by client
    ledger: Ledger = field(default_factory=Ledger)  # the traffic of every round
    chosen: tuple[str, ...] = ()  # a chosen pooled metric, which is a column after `METRICS`
    # Counts of all clients by role after each round, such as "deployed_bins" (`core.task.Scores`).
    pooled: dict[str, list[np.ndarray]] = field(default_factory=dict)
    _tables: dict[str, tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def rounds(self) -> int:
        return len(self.seconds)

    @property
    def columns(self) -> tuple[str, ...]:
        """The metrics of each client."""
        return METRICS + self.chosen

    def array(self, scored: str, metric: str, role: str) -> np.ndarray:
        """Return one number for each round and client, (R, K), or NaN if it is undefined."""
        # Cache the stacked tables of all rounds, because a result reads them hundreds of times.
        rounds, known = self.scores[scored], self._tables.get(scored)
        if known is None or len(known[1]) != len(rounds) or known[0] is not rounds[-1]:
            table = np.stack(rounds)
            table.flags.writeable = False
            known = self._tables[scored] = rounds[-1], table
        whole = known[1][:, :, ROLES.index(role)]
        if metric not in self.columns:
            return np.full(whole.shape[:2], np.nan)
        return whole[:, :, self.columns.index(metric)]

    def pool(self, scored: str, scores: Scores, number: int, *, complete: bool = True) -> None:
        """Add up the clients' counts, (K, 3, ...), of a round. Store zeros unless `complete`."""
        for kind, counts in (("confusion", scores.confusion), ("bins", scores.bins)):
            rounds = self.pooled.setdefault(f"{scored}_{kind}", [])
            if counts is not None and len(rounds) == number:  # older checkpoints lack the counts
                rounds.append((counts.sum(0) * complete).numpy().astype(np.int32))

    def counts_of(self, scored: str, kind: str, role: str, rounds: slice) -> np.ndarray | None:
        """Return pooled counts of `rounds`, (R, ...), or None if a round lacks them."""
        known = self.pooled.get(f"{scored}_{kind}", [])
        if not known[rounds] or len(known) != self.rounds:
            return None
        return np.stack(known[rounds])[:, ROLES.index(role)]

    @property
    def bins_known(self) -> bool:
        """Whether the clients counted their scores in bins."""
        return any(self.pooled.get(f"{scored}_bins") for scored in SCORED)

    def pooled_metric(
        self, scored: str, metric: str, role: str, rounds: slice = slice(None)
    ) -> np.ndarray:
        """Return a pooled metric after each of `rounds`, (R,). It is NaN if undefined."""
        if (counts := self.counts_of(scored, "bins", role, rounds)) is None:
            return np.full(len(range(self.rounds)[rounds]), np.nan)
        return of_bins(metric, counts)

    def restore(self, checkpoint: Tree) -> None:
        """Continue with the scores, pooled counts, seconds and traffic of a checkpoint."""
        self.scores = {name: list(rounds.numpy()) for name, rounds in checkpoint["scores"].items()}
        self.seconds = checkpoint["seconds"].tolist()
        self.ledger.restore(checkpoint["ledger"])
        pooled = checkpoint.get("pooled", {})
        self.pooled = {name: list(rounds.numpy()) for name, rounds in pooled.items()}


def empty_history(federation: Federation, metric: str | None = None) -> History:
    """Make a history with the clients' sizes. A chosen pooled metric is an additional column."""
    masks = [torch.stack([g.train, g.val, g.test]).sum(1) for g in federation.graphs]
    nodes = np.array([int(g.size("nodes")) for g in federation.graphs])
    sizes = torch.stack(masks).numpy().astype(np.int64)
    more = (metric,) if metric is not None and find_metric(metric).pooled else ()
    return History(sizes, nodes, chosen=more)


@dataclass(frozen=True)
class Selection:
    """The rule that selects the reported round."""

    scored: str  # "deployed" or "local": the model whose scores select
    metric: str  # the metric that selects, or accuracy if no client has that metric
    weights: str  # the mean over clients, one of `metrics.WEIGHTINGS`
    select: str  # "best-val" (mean over clients), "best-val-per-client", "last" or `BEST_CACHED`

    def picked_by(self, history: History) -> str:
        """Return the metric that selects the round."""
        if find_metric(self.metric).pooled:
            values = self.mean(history, self.metric, "val")
        else:
            values = history.array(self.scored, self.metric, "val")
        return "accuracy" if np.isnan(values).all() else self.metric

    def rounds(self, history: History) -> np.ndarray:
        """Return the selected round of each client, (K,)."""
        by, clients = self.picked_by(history), len(history.nodes)
        if self.select == "last":
            return np.full(clients, len(history.scores[self.scored]) - 1)
        if self.select == "best-val":
            return np.full(clients, best_round(self.mean(history, by, "val")))
        if self.select == BEST_CACHED:
            scores = history.array(self.scored, by, "test")
            cached = np.zeros(scores.shape, dtype=bool)
            cached[-1] = True
            for client, rounds in enumerate(history.cached):
                cached[rounds, client] = True
            scores = np.where(cached, scores, np.nan)
        else:
            scores = history.array(self.scored, by, "val")
        if np.isnan(scores).all():
            return np.full(clients, len(scores) - 1)
        return np.asarray(np.nan_to_num(scores, nan=-1.0).argmax(0))

    def of_clients(self, history: History, metric: str, role: str) -> np.ndarray:
        """Return a metric of each client, (K,), at its selected round."""
        values = history.array(self.scored, metric, role)
        return np.asarray(values[self.rounds(history), np.arange(values.shape[1])])

    def mean(self, history: History, metric: str, role: str) -> np.ndarray:
        """Return a metric of each round, (R,), pooled or as a mean over clients."""
        if find_metric(metric).pooled:
            return history.pooled_metric(self.scored, metric, role)
        values = history.array(self.scored, metric, role)
        return mean_over_clients(values, weight_of(history, role, self.weights))

    def value(self, history: History, metric: str, role: str) -> float:
        """Return a metric at the selected round, pooled or as a mean over clients."""
        if find_metric(metric).pooled:
            picked, each = self.one_round(history), self.mean(history, metric, role)
            return float("nan") if picked is None else float(each[picked])
        values = self.of_clients(history, metric, role)
        return float(mean_over_clients(values, weight_of(history, role, self.weights)))

    def one_round(self, history: History) -> int | None:
        """Return the selected round, or None if it differs between clients."""
        rounds = set(self.rounds(history).tolist())
        return rounds.pop() if len(rounds) == 1 else None


class Classes(Structural):
    """Data with classes: a federation, its roster at the server, or the data of one site."""

    @property
    def classes(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...


class Improvements:
    """An incremental form of `Selection.rounds`: finds clients for which a round is the best."""

    def __init__(self, selection: Selection, rounds: int) -> None:
        self.selection, self.last = selection, rounds - 1
        self.best = np.array(np.nan)

    def of(self, history: History, number: int) -> np.ndarray:
        """Return whether this round is the selected round so far, for each client, (K,) bool."""
        rule, clients = self.selection, len(history.nodes)
        if rule.select in ("last", BEST_CACHED):
            return np.full(clients, rule.select == "last" and number == self.last)
        val = history.scores[rule.scored][number][:, ROLES.index("val")]
        if pooled := find_metric(rule.metric).pooled:
            this = rule.scored, rule.metric, "val", slice(number, number + 1)
            scores = np.full(clients, history.pooled_metric(*this))
        else:
            scores = val[:, METRICS.index(rule.metric)]
        if np.isnan(scores).all():
            scores, pooled = val[:, METRICS.index("accuracy")], False
        if rule.select == "best-val" and not pooled:
            weight = weight_of(history, "val", rule.weights)
            scores = np.full(clients, mean_over_clients(scores, weight))
        elif not np.isnan(scores).all():
            scores = np.nan_to_num(scores, nan=-1.0)
        # Until a first score exists, the last round is selected.
        better = np.isnan(self.best) | (scores > self.best)
        self.best = np.where(better, scores, self.best)
        return np.asarray(better)


def validation_curve(history: History, config: RunConfig, first: int = 0) -> np.ndarray:
    """Return the chosen metric, or accuracy, on validation nodes after each round from `first`."""
    scored, metric = config.evaluate or "deployed", config.metric or "accuracy"
    if find_metric(metric).pooled:
        return history.pooled_metric(scored, metric, "val", slice(first, None))
    column, val = METRICS.index(metric), ROLES.index("val")
    tables = [table[:, val, column] for table in history.scores[scored][first:]]
    return mean_over_clients(
        np.reshape(tables, (len(tables), len(history.nodes))), history.counts[:, val]
    )


def weight_of(history: History, role: str, weights: str) -> np.ndarray:
    """Return the weight of each client in a mean over clients, (K,)."""
    if weights == "uniform":
        return np.ones(history.nodes.shape[0])
    return history.counts[:, ROLES.index(role)] if weights == "tests" else history.nodes


def select_rule(config: RunConfig, rules: Protocol) -> str:
    """Return the protocol's rule for the reported round, unless a compat switch overrides it."""
    return BEST_CACHED if "test-selection" in config.compat else rules.select


def selection_of(config: RunConfig, rules: Protocol, federation: Federation) -> Selection:
    """Return the rule that selects the reported round."""
    select, metric = select_rule(config, rules), metric_of(config, federation)
    return Selection(config.evaluate or "deployed", metric, rules.weights, select)


def metric_of(config: RunConfig, federation: Classes) -> str:
    """Return the metric that selects the round: the user's, or the metric of the data."""
    if (metric := config.metric) is None:
        return federation.metric
    if federation.classes != 2 and (metric == "auc" or find_metric(metric).pooled):
        has = f"but '{federation.name}' has {federation.classes}"
        raise ConfigError(f"{metric} is computed for two classes, {has}; choose another --metric")
    return metric


def positive_of(config: RunConfig, federation: Classes) -> int:
    """Return the number of the positive class: the user's, or the second class."""
    if config.positive is None:
        return 1
    if federation.classes != 2:
        has = f"but '{federation.name}' has {federation.classes}"
        raise ConfigError(f"--positive is for two classes, {has}; remove it")
    names = federation.class_names
    check_name("class", config.positive, names)
    return names.index(config.positive)


def bins_metric(config: RunConfig, federation: Classes, *, sparing: bool = False) -> str | None:
    """Return the metric of a two-class run whose clients count scores in bins, otherwise None.

    Clients count (`core.score_bins`) if the user chose a metric or a threshold. With `sparing`, a
    metric has this effect only if it is computed from bins (`Metric.pooled`).
    """
    metric = metric_of(config, federation)
    if config.threshold is not None and federation.classes != 2:
        has = f"but '{federation.name}' has {federation.classes}"
        raise ConfigError(f"a threshold is for two classes, {has}; remove --threshold")
    chosen = config.metric is not None and (not sparing or find_metric(metric).pooled)
    wanted = chosen or config.threshold is not None
    return metric if federation.classes == 2 and wanted else None


def threshold_of(
    config: RunConfig, rule: Selection, history: History, positive: int
) -> Threshold | None:
    """Choose the threshold by the run's rule on validation nodes after the selected round.

    Return None without a rule, without bins, if the selected round differs between clients, or if
    no threshold satisfies the rule.
    """
    picked = rule.one_round(history)
    if config.threshold is None or picked is None:
        return None
    counts = history.counts_of(rule.scored, "bins", "val", slice(picked, picked + 1))
    return None if counts is None else choose(parse_rule(config.threshold), counts[0], positive)
