"""Plausibility checks of a site's reply, so that a lying site cannot spoil a run.

`codec.check_like` checks names and shapes. A number passes here if it can come from the data that
the site declared, and from training that resembles the other sites':

- Counts (`COUNTS`) are not negative. Their sum is at most the site's number of nodes or graphs, or
  the number of counts if this is larger.
- A weight in a mean (`WEIGHTS`) is at least 1, because every site has training nodes. A mean
  without weights would be undefined.
- The number of training steps is at least 1, and at most epochs times nodes (or graphs).
- Confusion counts and counts by score bin are not negative. Each part (training, validation, test)
  counts at most the nodes or graphs that the site declared. A part without any has no AUC.
- All other floats, except scores, are at most `largest` in absolute value. This is `LARGEST`, or
  `PER_NODE` times the median of declared nodes if that is more. If the largest number of the
  received message is above 1, it multiplies `largest`: an honest reply to a model that another site
  spoilt is as large.
- A loss is cut to `LARGEST` (`tamed`), because in a deep network it grows faster than the weights.
- The norm of an update (trained minus received model) is at most `limit` times the median norm of
  the other sites' updates, or the received model's norm plus 1. SCAFFOLD's `control` has a norm of
  at most `limit` times the median, or the received control's norm plus max(1, u / `reach_of`).
  There, u is the received model's norm plus 1. A share in a mixture (`SHARES`) is, per declared
  node, at most `limit` times the median, or 1. Any other float field has a norm of at most `limit`
  times the median, or `PER_NODE` times the median of declared nodes.
  If only one site takes part in a step, it is compared with the last replies of at least three
  other sites to that step, with the square of `limit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import WireError
from atoll.core.task import ROLES, Scores
from atoll.core.tree import Tree, leaves, named_leaves, norm, structure, tree_map

COUNTS = ("weight", "size", "mass", "nodes", "right", "total")
"""Fields of replies that count nodes or graphs of a client, or that are 1 instead of a count."""
WEIGHTS = ("weight", "size")
"""Fields by whose sum a mean over clients divides."""
SHARES = ("confidence", "phi")
"""Fields that weight a client's model or class in a mixture: sums over its nodes."""
LARGEST, PER_NODE = 1e6, 1e4  # largest plausible number, and largest sum per node
UPDATE_LIMIT = 100.0  # largest norm of an update, in medians of the other sites' norms
FEWEST = 3  # other sites whose earlier replies are needed to judge the only site of a step


class OutOfRange(WireError):
    """A number outside the range. If most sites send one, the model that they received was bad."""


class Declared(NamedTuple):
    """The sizes that a site declared when it joined, or zeros if they stay at the site."""

    counts: Sequence[int]  # training, validation and test nodes or graphs
    nodes: int


def usual_size(sites: Iterable[Declared]) -> float:
    """Return the largest usual sum over a site's nodes, by the median of the declared sizes."""
    return PER_NODE * max(1, median(site.nodes for site in sites))


def check_values(reply: Tree, site: Declared, epochs: int, largest: float = LARGEST) -> None:
    """Refuse a reply whose values cannot come from the site's data, or that exceed `largest`."""
    if isinstance(reply, Scores):
        _check_scores(reply, site)
    for name, leaf in named_leaves(reply):
        if not leaf.numel():
            continue
        field = name.split(".")[0]
        if field in COUNTS:
            # If sizes stay at the site, every client counts one, and every class at most one.
            most = max(site.nodes, leaf.numel())
            _refuse(name, leaf, int(field in WEIGHTS), most, total=True)
        elif field == "steps":
            _refuse(name, leaf, 1, epochs * max(1, site.nodes))
        elif leaf.is_floating_point() and not isinstance(reply, Scores):
            _refuse(name, leaf, -largest, largest, error=OutOfRange)


def tamed(reply: Tree) -> Tree:
    """Return the reply. The loss of scores is cut to ±`LARGEST`, so that it excludes no site."""
    if not isinstance(reply, Scores):
        return reply
    return replace(reply, loss=reply.loss.clamp(-LARGEST, LARGEST))


def _refuse(
    name: str,
    leaf: Tensor,
    least: float,
    most: float,
    *,
    total: bool = False,
    error: type[WireError] = WireError,
) -> None:
    low, high = leaf.double().min(), leaf.double().sum() if total else leaf.double().max()
    if low < least or high > most:
        found = f"{low:g}" if low < least else f"{high:g}"
        plausible = f"a plausible value is from {least:g} to {most:g}"
        raise error(f"a reply was refused: '{name}' is {found}; {plausible}")


def _check_scores(scores: Scores, site: Declared) -> None:
    for part, counts, own in zip(ROLES, scores.confusion, site.counts, strict=True):
        _refuse(f"confusion ({part})", counts, 0, own, total=True)
    if scores.bins is not None:
        for part, counts, own in zip(ROLES, scores.bins, site.counts, strict=True):
            _refuse(f"bins ({part})", counts, 0, own, total=True)
    for part, auc, own in zip(ROLES, scores.auc, site.counts, strict=True):
        if auc != -1:  # -1: the part has no nodes
            _refuse(f"auc ({part})", auc, 0 if own else -1, 1 if own else -1)


def widest(received: Tree) -> float:
    """Return the largest absolute value in a message, at least 1."""
    floats = [leaf for leaf in leaves(received) if leaf.is_floating_point() and leaf.numel()]
    return max([1.0, *(float(leaf.abs().max()) for leaf in floats)])


def lengths(
    reply: Tree, received: Tree, usual: float, reach: float = 1.0, nodes: int = 1
) -> dict[str, tuple[float, float]]:
    """Return a pair for each float field except counts: its norm, and an always plausible norm.

    The norm of `model` is the norm of its update, and a share (`SHARES`) is divided by `nodes`.
    `usual` is the plausible norm of most fields, and `reach` is described in `reach_of`. Scores
    have no norm, because they harm no other site.
    """
    if isinstance(reply, Scores) or not is_dataclass(reply):
        return {}
    found = {}
    for part in fields(reply):
        value = getattr(reply, part.name)
        floats = [leaf for leaf in leaves(value) if leaf.is_floating_point()]
        if not floats or part.name in (*COUNTS, "steps"):
            continue
        found[part.name] = (float(norm(floats)), usual)
        if part.name in SHARES:
            found[part.name] = (float(norm(floats)) / max(nodes, 1), 1.0)
        if part.name == "control":  # SCAFFOLD's: clients add it to their gradients
            start = getattr(received, "control", None)
            before = float(norm(start)) if leaves(start) else 0.0
            update = float(norm(getattr(received, "model", ()))) + 1
            found["control"] = (float(norm(floats)), before + max(1.0, update / reach))
        if part.name == "model":
            start = getattr(received, "model", received)
            same = _form(start) == _form(value)
            moved = tree_map(torch.sub, value, start) if same else value
            found["model"] = (float(norm(moved)), float(norm(start)) + 1 if same else 1.0)
    return found


def reach_of(owner: object, replies: Iterable[Tree]) -> float:
    """Return how far a gradient of norm 1 moves a model: learning rate times median of steps."""
    steps = [float(reply.steps.max()) for reply in replies if hasattr(reply, "steps")]
    rate: float = getattr(getattr(owner, "optimizer", None), "lr", 1.0)
    return rate * max(1.0, median(steps) if steps else 1.0)


def _form(tree: Tree) -> tuple[object, list[torch.Size]]:
    return structure(tree), [leaf.shape for leaf in leaves(tree)]


def too_long(
    norms: Mapping[str, tuple[float, float]], limit: float, before: Mapping[str, float]
) -> dict[str, str]:
    """Return the sites whose norm of one field is too large, each with a reason.

    `norms` contains each site's pair of `lengths`, and `before` the norms of earlier rounds.
    """
    found = {}
    for site, (length, free) in norms.items():
        others = [other for name, (other, _) in norms.items() if name != site]
        most = limit
        if not others:  # earlier rounds had other models, and one or two sites must not decide
            others = [other for name, other in before.items() if name != site]
            others, most = (others, limit * limit) if len(others) >= FEWEST else ([], limit)
        if others and length > max(most * median(others), free):
            usual = f"the median of the other sites' is {median(others):.3g}"
            found[site] = f"its update was refused: its norm is {length:.3g}, but {usual}"
    return found
