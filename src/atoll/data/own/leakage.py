"""Detection of columns that leak the label: a small tree on one column predicts it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from atoll.core.errors import AtollError
from atoll.data.own import columns as convert
from atoll.data.own.columns import Column
from atoll.data.own.rules import Rule

TELLING = 0.95  # least AUC of one column that seems to leak the label
CERTAIN, CAUGHT = 0.99, 0.25  # or: least probability, least share of a class's rows that reach it
LEAST = 10  # fewest labelled rows of a class for a test
SAMPLE = 20_000  # most labelled rows that a column is tested on


def telling(column: Column, rule: Rule, y: np.ndarray) -> str:
    """Return how a small tree on this column predicts the label, or "" if it predicts too little.

    The predictions are cross-validated.
    """
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.tree import DecisionTreeClassifier

    rows = np.flatnonzero(y >= 0)
    if rows.size > SAMPLE:
        rows = np.random.default_rng(0).choice(rows, SAMPLE, replace=False)
    sizes = np.bincount(y[rows])
    rows = rows[sizes[y[rows]] >= LEAST]
    if np.unique(y[rows]).size < 2:
        return ""
    try:
        codes = _codes(column, rule)[rows]
    except AtollError:  # values that do not fit are already reported as a problem
        return ""
    tree = DecisionTreeClassifier(max_leaf_nodes=16, min_samples_leaf=3, random_state=0)
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    chances = cross_val_predict(tree, codes[:, None], y[rows], cv=folds, method="predict_proba")
    two = chances[:, 1] if chances.shape[1] == 2 else chances
    score = float(roc_auc_score(y[rows], two, multi_class="ovr"))
    if score >= TELLING:
        return f"predicts the label by itself (AUC {score:.3f})"
    for place, number in enumerate(np.unique(y[rows])):
        right, sure = y[rows] == number, chances[:, place] >= CERTAIN
        caught = float((right & sure).sum() / right.sum())
        if right.mean() <= 0.5 and caught >= CAUGHT and right[sure].mean() >= CERTAIN:
            return f"by itself is certain of {100 * caught:.0f} % of one class"
    return ""


def _codes(column: Column, rule: Rule) -> np.ndarray:
    """Convert the column to numbers for a tree. A missing value is below all others."""
    column = convert.cleaned(column, rule)
    if rule.kind == "category":
        texts = column.values.cast(pa.large_string())
        return convert.lookup(texts, convert.sorted_values(texts)).astype(np.float64)
    if rule.kind == "date":
        found = convert.seconds(column, rule)
    elif rule.kind == "boolean":
        found = convert.truths(column)
    else:
        found = convert.numbers(column, "the column is a number", gaps=True)
    lowest = float(np.nanmin(found)) if not np.isnan(found).all() else 0.0
    return np.asarray(np.where(np.isnan(found), lowest - 1, found))
