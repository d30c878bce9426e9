"""From predictions to numbers in a table: counts of each client, its metrics, means over clients.

Scoring is a client step: a client predicts on its own graph and replies with counts, its mean loss
and its AUC (`Scores`). Arrays of metrics have the axes (..., clients). NaN marks a client without
such a number (an empty test set), which is excluded from every mean, never counted as right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph
from atoll.core.method import Method, client_step
from atoll.core.score_bins import middles
from atoll.core.stages import when_scored
from atoll.core.task import Scores, macro_auc
from atoll.core.tree import Tree, record, tree_map

Formula = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A metric, (...,), from counts by truth and bin, (..., 2, B), and B bins' probabilities, (B,)."""
SENT = {
    "confusion": "counts by true and predicted class",
    "loss": "its own mean loss",
    "auc": "its own AUC",
    "bins": "positives and negatives by bin",
}
"""The fields of `Scores` in words, which each client sends for each part and round."""
_COUNTS, _BINS = SENT["confusion"], SENT["bins"]
ONE_IN_A_BIN = "a bin with one node shows its score and label"
_SHOWS = f"the server counts scores by class and bin; {ONE_IN_A_BIN}"


@dataclass(frozen=True)
class Metric:
    """A quality measure of predictions, and the values that a site sends for it."""

    label: str  # on pages
    sends: str  # by each client, for each part (training, validation, test) and round
    of_bins: Formula | None = None  # None: a number of each client, and a mean over clients
    higher: bool = True  # whether higher is better

    @property
    def pooled(self) -> bool:
        """Whether it is one number of all clients' nodes (or graphs) together."""
        return self.of_bins is not None

    @property
    def of_class(self) -> bool:
        """Whether it depends on the choice of the positive class (an error does not)."""
        return self.pooled and self.higher

    @property
    def over(self) -> str:
        """How one number is computed from the clients' numbers."""
        return "pooled over clients" if self.pooled else "mean over clients"


def average_precision(counts: np.ndarray, _: np.ndarray) -> np.ndarray:
    """Return the mean precision over the positives, each at its own score."""
    true, alerts = _from_the_top(counts[..., 1, :]), _from_the_top(counts.sum(-2))
    hits = (counts[..., 1, :] * true / np.maximum(alerts, 1)).sum(-1)
    return _share(hits, true[..., 0])


def _from_the_top(counts: np.ndarray) -> np.ndarray:
    """Return the count of each bin and all higher bins."""
    return counts[..., ::-1].cumsum(-1)[..., ::-1]


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(whole > 0, part / whole, np.nan))


def _at_top(what: str, share: float) -> Formula:
    """Return the formula of precision or recall of the top `share`. A bin may count in part."""

    def formula(counts: np.ndarray, _: np.ndarray) -> np.ndarray:
        every = counts.sum(-2)
        chosen = np.ceil(share * every.sum(-1) - 1e-9)
        above = _from_the_top(every) - every
        taken = np.clip(chosen[..., None] - above, 0, every)
        hits = (taken * counts[..., 1, :] / np.maximum(every, 1)).sum(-1)
        return _share(hits, counts[..., 1, :].sum(-1) if what == "recall" else chosen)

    return formula


def _at_half(what: str) -> Formula:
    """Return the formula of precision, recall or F1 at a probability of at least 0.5."""

    def formula(counts: np.ndarray, probability: np.ndarray) -> np.ndarray:
        false, true = np.moveaxis((counts * (probability >= 0.5)).sum(-1), -1, 0)
        positives, alerts = counts[..., 1, :].sum(-1), true + false
        if what == "precision":  # 0 without alerts
            return _share(true / np.maximum(alerts, 1), (counts.sum((-1, -2)) > 0).astype(float))
        return _share(true, positives if what == "recall" else (alerts + positives) / 2)

    return formula


def _brier(counts: np.ndarray, probability: np.ndarray) -> np.ndarray:
    """Return the mean squared difference between probability and truth (Brier score)."""
    squares = np.stack([probability**2, (1 - probability) ** 2])
    return _share((counts * squares).sum((-1, -2)), counts.sum((-1, -2)))


def _ece(counts: np.ndarray, probability: np.ndarray) -> np.ndarray:
    """Return the expected calibration error, with 15 equal intervals of the probability."""
    interval = np.minimum(probability * 15, 14).astype(int)
    member = (interval[:, None] == np.arange(15)).astype(float)
    apart = np.abs((counts[..., 1, :] - counts.sum(-2) * probability) @ member)
    return _share(apart.sum(-1), counts.sum((-1, -2)))


REGISTRY = {
    "accuracy": Metric("accuracy", _COUNTS),
    "macro_f1": Metric("macro F1", _COUNTS),
    "weighted_f1": Metric("weighted F1", _COUNTS),
    "auc": Metric("AUC", SENT["auc"]),
    "loss": Metric("loss", SENT["loss"], higher=False),
    "average_precision": Metric("average precision", _BINS, average_precision),
    "recall@1%": Metric("recall@1%", _BINS, _at_top("recall", 0.01)),
    "precision@1%": Metric("precision@1%", _BINS, _at_top("precision", 0.01)),
    "precision": Metric("precision", _BINS, _at_half("precision")),
    "recall": Metric("recall", _BINS, _at_half("recall")),
    "f1": Metric("F1", _BINS, _at_half("f1")),
    "brier": Metric("Brier score", _BINS, _brier, higher=False),
    "ece": Metric("calibration error", _BINS, _ece, higher=False),
}
"""Every metric by its name in files and options. K of recall@K% and precision@K% may differ."""
METRICS = tuple(name for name, metric in REGISTRY.items() if not metric.pooled)
POOLED = tuple(name for name, metric in REGISTRY.items() if metric.pooled)
COMPARED = tuple(name for name, metric in REGISTRY.items() if metric.higher)
"""Metrics that select a round, and that studies optimise and test. Higher is better."""
_AT_TOP = re.compile(r"(recall|precision)@(\d+(?:\.\d+)?)%", re.ASCII)


def find_metric(name: str) -> Metric:
    """Return the metric of this name, or raise a one-sentence error for any other name."""
    if name in REGISTRY:
        return REGISTRY[name]
    if (at := _AT_TOP.fullmatch(name)) and 0 < (share := float(at[2]) / 100) <= 1:
        return replace(REGISTRY[f"{at[1]}@1%"], label=name, of_bins=_at_top(at[1], share))
    known = ", ".join(REGISTRY)
    more = "K of recall@K% and precision@K% may be any number up to 100"
    raise ConfigError(f"unknown metric '{name}'; choose one of: {known} ({more})")


def label_of(name: str) -> str:
    """Return a metric's label on pages."""
    return find_metric(name).label


def score(metric: str, labels: np.ndarray, probabilities: np.ndarray, positive: int = 1) -> float:
    """Return a metric of labels, (N,), and class probabilities, (N, C), or NaN if undefined.

    Metrics of a positive class are exact here: each distinct probability is one bin.
    """
    found, classes = find_metric(metric), probabilities.shape[1]
    if found.of_bins is not None:
        if classes != 2:
            raise ConfigError(f"metric '{metric}' needs two classes, but there are {classes}")
        values, place = np.unique(probabilities[:, positive], return_inverse=True)
        counts = np.zeros((2, len(values)))
        np.add.at(counts, ((labels == positive).astype(int), place), 1)
        return float(found.of_bins(counts, values))
    with np.errstate(divide="ignore"):
        log_p = np.log(probabilities)
    if metric == "loss":
        return float(-log_p[np.arange(len(labels)), labels].mean())
    if metric == "auc":
        truth = torch.from_numpy((labels[:, None] == np.arange(classes)).astype(float))
        auc = float(macro_auc(torch.from_numpy(log_p), truth, torch.ones(len(labels))))
        return auc if auc >= 0 else float("nan")
    confusion = np.zeros((classes, classes))
    np.add.at(confusion, (labels, probabilities.argmax(1)), 1)
    return float(from_confusion(confusion)[metric])


WEIGHTINGS = ("tests", "nodes", "uniform")
"""Weights in means over clients: test (validation, ...) nodes, all nodes, or equal weights."""


def from_confusion(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """Return accuracy and F1 scores, (...,), of confusion counts (..., C, C), true by predicted."""
    hits = np.diagonal(confusion, axis1=-2, axis2=-1).astype(float)
    support = confusion.sum(-1).astype(float)
    guessed = confusion.sum(-2).astype(float)
    total = support.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # A class counts in the macro mean if it occurs in truth or prediction, as in scikit-learn.
        occurs = (support + guessed) > 0
        f1 = np.where(occurs, 2 * hits / (support + guessed), 0.0)
        some = np.where(total > 0, 1.0, np.nan)
        return {
            "accuracy": hits.sum(-1) / total * some,
            "macro_f1": f1.sum(-1) / occurs.sum(-1) * some,
            "weighted_f1": (f1 * support).sum(-1) / total * some,
        }


def guessing(metric: str, tested: np.ndarray, positive: int = 1) -> float | None:
    """Return the score of guessing, given the number of nodes of each class, or None if unknown.

    It is the accuracy of predicting the most frequent class, an AUC of 0.5, or a pooled metric
    other than recall if all nodes are alerts.
    """
    formula = find_metric(metric).of_bins
    if metric == "accuracy":
        return float(tested.max() / tested.sum())
    if formula is None or metric == "recall":  # an alert for every node has a recall of one
        return 0.5 if metric == "auc" else None
    return float(formula(tested[[1 - positive, positive]][:, None].astype(float), np.ones(1)))


def per_class(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """Return precision, recall and F1 of each class, (..., C), or NaN if undefined."""
    hits = np.diagonal(confusion, axis1=-2, axis2=-1).astype(float)
    support, guessed = confusion.sum(-1).astype(float), confusion.sum(-2).astype(float)
    wholes = {"precision": guessed, "recall": support, "f1": (support + guessed) / 2}
    return {name: _share(hits, whole) for name, whole in wholes.items()}


def mean_over_clients(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the weighted mean over the last axis without NaN, or NaN if no value remains."""
    known = ~np.isnan(values)
    share = np.where(known, np.broadcast_to(weight, values.shape), 0.0)
    with np.errstate(invalid="ignore"):
        return np.asarray((np.where(known, values, 0.0) * share).sum(-1) / share.sum(-1))


def spread(values: Sequence[float] | np.ndarray) -> float | None:
    """Return the sample standard deviation, or None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def best_round(validation: np.ndarray) -> int:
    """Return the round with the best mean validation score, the earliest of equals.

    Without any score, return the last round.
    """
    if np.isnan(validation).all():
        return int(validation.shape[0] - 1)
    return int(np.nanargmax(validation))


@dataclass(frozen=True)
class Evaluator:
    """Score a method's predictions."""

    method: Method
    with_auc: bool = False
    with_bins: bool = False  # for metrics of a positive class
    with_dropout: bool = False  # only where a compat switch asks for it
    with_train: bool = True  # whether training nodes, or graphs, are scored

    def derived_from(self, state: Tree) -> Tree:
        return self.method.derived_from(state)

    def derive(self, graph: Graph, part: Tree) -> Tree:
        return self.method.derive(graph, part)

    @client_step(keeps_state=True, discloses={"bins": _SHOWS})
    def score(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Scores:
        """Predict and count. In a growing graph, score each role in its own stage."""
        found = [self._score(one, message, state, key) for one in when_scored(graph)]
        if len(found) == 1:
            return found[0]
        return tree_map(lambda *rows: torch.stack([r[i] for i, r in enumerate(rows)]), *found)

    def _score(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Scores:
        if not self.with_train:  # skip the training part as far as possible
            graph = graph if graph.held_out is None else graph.held_out
            graph = replace(graph, train=torch.zeros_like(graph.train))
        noise = key if self.with_dropout else None
        outputs = self.method.predict(graph, message, state, noise)
        wanted = {"with_auc": self.with_auc, "with_bins": self.with_bins}
        return graph.task.score(outputs, graph, **wanted)


@record
class Outcome:
    """The scores of one round, on the device."""

    positions: Tensor  # of the clients that took part
    scored: Tensor  # positions of all reachable clients, which scored the deployed model
    deployed: Scores
    local: Scores | None = None  # None if no client trained
    finite: Tensor | None = None  # whether each number that the round's tape watched is finite


def of_bins(metric: str, counts: np.ndarray) -> np.ndarray:
    """Return a pooled metric, (...,), of counts by truth and bin, (..., 2, BINS)."""
    formula = find_metric(metric).of_bins
    assert formula is not None, metric
    return formula(counts.astype(float), middles().numpy())


def toward(scores: Scores, positive: int) -> Scores:
    """Return the scores with bins of the positive class. Class 0 mirrors class 1."""
    if scores.bins is None or positive == 1:
        return scores
    return replace(scores, bins=scores.bins.flip(-1, -2))


def score_numbers(scores: Scores, pooled: Sequence[str] = ()) -> np.ndarray:
    """Convert stacked scores to numbers, (..., 3, 5), or NaN if a number is undefined.

    The axes end with three roles and five `METRICS`. The metrics in `pooled` follow these, here as
    numbers of each client.
    """
    confusion, auc = scores.confusion.numpy(), scores.auc.numpy()
    numbers = from_confusion(confusion)
    numbers["auc"] = np.where(auc < 0, np.nan, auc)
    empty = confusion.sum((-1, -2)) == 0
    numbers["loss"] = np.where(empty, np.nan, scores.loss.numpy())
    assert scores.bins is not None or not pooled
    for metric in pooled:
        numbers[metric] = of_bins(metric, scores.bins.numpy())  # type: ignore[union-attr]
    return np.stack([numbers[metric] for metric in (*METRICS, *pooled)], axis=-1)
