"""From confusion counts to numbers in a table: per client, then means over clients.

Arrays have the axes (..., clients); NaN marks a client that has no such number (an empty test
set) and is left out of every mean, never counted as right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LABELS = {
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "weighted_f1": "weighted F1",
    "auc": "AUC",
    "loss": "loss",
}
"""Every metric by its name in files and options, with its label on pages."""
METRICS = tuple(LABELS)
COMPARED = tuple(name for name in METRICS if name != "loss")
"""Metrics that a comparison can use: higher is better."""
WEIGHTINGS = ("tests", "nodes", "uniform")
"""Means over clients: by test (validation, ...) nodes, by all nodes, or every client alike."""


def from_confusion(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """Accuracy and F1 scores, (...,), of confusion counts (..., C, C), true by predicted."""
    hits = np.diagonal(confusion, axis1=-2, axis2=-1).astype(float)
    support = confusion.sum(-1).astype(float)
    guessed = confusion.sum(-2).astype(float)
    total = support.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # A class counts in the macro mean if it occurs among truths or guesses, as in scikit-learn.
        occurs = (support + guessed) > 0
        f1 = np.where(occurs, 2 * hits / (support + guessed), 0.0)
        some = np.where(total > 0, 1.0, np.nan)
        return {
            "accuracy": hits.sum(-1) / total * some,
            "macro_f1": f1.sum(-1) / occurs.sum(-1) * some,
            "weighted_f1": (f1 * support).sum(-1) / total * some,
        }


def mean_over_clients(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Weighted mean over the last axis, leaving out NaN; NaN if nothing is left."""
    known = ~np.isnan(values)
    share = np.where(known, np.broadcast_to(weight, values.shape), 0.0)
    with np.errstate(invalid="ignore"):
        return np.asarray((np.where(known, values, 0.0) * share).sum(-1) / share.sum(-1))


def spread(values: Sequence[float] | np.ndarray) -> float | None:
    """The standard deviation of a sample; None for fewer than two values, which have no spread."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def best_round(validation: np.ndarray) -> int:
    """The round with the best mean validation score, the earliest of equals."""
    if np.isnan(validation).all():
        return int(validation.shape[0] - 1)
    return int(np.nanargmax(validation))
