"""Whether the values of a site's reply are plausible: a site that lies must not spoil a run.

Names and shapes are checked elsewhere (`codec.check_like`). A number passes here if it can come
from the data that the site declared and from training like that of the other sites:

- Counts (`COUNTS`) are not negative, and their sum is at most the site's number of nodes or graphs.
- The number of training steps is at least 1, and at most one for each epoch, node or graph.
- Confusion counts and counts by score bin are not negative, and each part has at most as many as
  the site declared.
- No number is above `LARGEST` times the site's number of nodes or graphs.
- An update (trained minus received model) is at most `limit` times as long as the median of all
  updates of the step, or at most as long as the received model plus one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import WireError
from atoll.core.task import ROLES, Scores
from atoll.core.tree import Tree, leaves, named_leaves, norm, structure, tree_map

COUNTS = ("weight", "size", "mass", "nodes", "right", "total")
"""Fields of replies that count nodes or graphs of a client, or are ones."""
LARGEST = 1e6
UPDATE_LIMIT = 100.0


class Declared(NamedTuple):
    """The sizes that a site declared when it joined; zeros if they stay at the site."""

    counts: Sequence[int]  # training, validation and test nodes or graphs
    nodes: int


def check_values(reply: Tree, site: Declared, epochs: int) -> None:
    """Refuse a reply whose values cannot come from the site's data."""
    if isinstance(reply, Scores):
        _check_scores(reply, site)
    largest = LARGEST * max(1, site.nodes)
    for name, leaf in named_leaves(reply):
        if not leaf.numel():
            continue
        field = name.split(".")[0]
        if field in COUNTS:
            # Where sizes stay at the site, every client counts one, and every class at most one.
            _refuse(name, leaf, 0, max(site.nodes, leaf.numel()), total=True)
        elif field == "steps":
            _refuse(name, leaf, 1, epochs * max(1, site.nodes))
        elif leaf.is_floating_point():
            _refuse(name, leaf, -largest, largest)


def _refuse(name: str, leaf: Tensor, least: float, most: float, *, total: bool = False) -> None:
    low, high = leaf.double().min(), leaf.double().sum() if total else leaf.double().max()
    if low < least or high > most:
        found = f"{low:g}" if low < least else f"{high:g}"
        plausible = f"a plausible value is from {least:g} to {most:g}"
        raise WireError(f"a reply was refused: '{name}' is {found}; {plausible}")


def _check_scores(scores: Scores, site: Declared) -> None:
    for part, counts, own in zip(ROLES, scores.confusion, site.counts, strict=True):
        _refuse(f"confusion ({part})", counts, 0, own, total=True)
    if scores.bins is not None:
        for part, counts, own in zip(ROLES, scores.bins, site.counts, strict=True):
            _refuse(f"bins ({part})", counts, 0, own, total=True)
    known = scores.auc[scores.auc != -1]
    if known.numel():
        _refuse("auc", known, 0, 1)


def update_norm(reply: Tree, received: Tree) -> tuple[float, float] | None:
    """Norms of an update and of the received model; None for a reply without a model."""
    model = getattr(reply, "model", None)
    if model is None or not leaves(model):
        return None
    start = getattr(received, "model", received)
    if _form(start) != _form(model):
        return float(norm(model)), 0.0
    return float(norm(tree_map(torch.sub, model, start))), float(norm(start))


def _form(tree: Tree) -> tuple[object, list[torch.Size]]:
    return structure(tree), [leaf.shape for leaf in leaves(tree)]


def too_long(norms: Mapping[str, tuple[float, float]], limit: float) -> dict[str, str]:
    """The sites whose updates are too long, each with a sentence."""
    found = {}
    for site, (length, start) in norms.items():
        others = [other for name, (other, _) in norms.items() if name != site]
        if others and length > max(limit * median(others), start + 1):
            usual = f"the median of the other sites' is {median(others):.3g}"
            found[site] = f"its update was refused: its norm is {length:.3g}, but {usual}"
    return found
