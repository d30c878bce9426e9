"""Scoring as a client step: a client predicts on its own graph and replies with counts alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.graph import Graph
from atoll.core.losses import below_top
from atoll.core.method import Method, client_step
from atoll.core.tree import Tree, record

ROLES = ("train", "val", "test")


@record
class Scores:
    """What one client's predictions add up to, for training, validation and test nodes.

    Attributes:
        confusion: Counts, (3, C, C): true class by predicted class.
        loss: Mean cross entropy, (3,).
        auc: Area under the ROC curve, (3,); -1 where it is not defined or not asked for.
    """

    confusion: Tensor
    loss: Tensor
    auc: Tensor


@dataclass(frozen=True)
class Evaluator:
    """Scores a method's predictions, without dropout unless a compat switch asks for it.

    With `with_train=False` training nodes, or graphs, are not scored.
    """

    method: Method
    with_auc: bool = False
    with_dropout: bool = False
    with_train: bool = True

    def derived_from(self, state: Tree) -> Tree:
        """As the method says."""
        return self.method.derived_from(state)

    def derive(self, graph: Graph, part: Tree) -> Tree:
        """As the method does."""
        return self.method.derive(graph, part)

    @client_step(keeps_state=True)
    def score(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Scores:
        """Predict and count."""
        noise = key if self.with_dropout else None
        if not self.with_train:
            graph = _held_out(graph)
        logits = graph.at_roots(self.method.predict(graph, message, state, noise))
        classes = logits.shape[-1]
        masks = torch.stack([graph.at_roots(m) for m in (graph.train, graph.val, graph.test)])
        numbers = torch.arange(classes, device=logits.device)
        truth = (graph.at_roots(graph.y).unsqueeze(-1) == numbers).to(logits.dtype)
        guess = (logits.argmax(-1, keepdim=True) == numbers).to(logits.dtype)
        # One product for all roles: a CPU takes far longer for three of a few columns.
        by_role = (masks.T.unsqueeze(-1) * truth.unsqueeze(1)).flatten(1)
        confusion = (guess.T @ by_role).reshape(classes, len(ROLES), classes).permute(1, 2, 0)
        below, log_total = below_top(logits)
        losses = log_total - (below * truth).sum(-1)
        loss = (masks * losses).sum(-1) / masks.sum(-1).clamp(min=1)
        if self.with_auc:
            log_p = functional.log_softmax(logits, dim=-1)
            auc = torch.stack([_macro_auc(log_p, truth, mask) for mask in masks])
        else:
            auc = torch.full_like(loss, -1.0)
        return Scores(confusion, loss, auc)


def _held_out(graph: Graph) -> Graph:
    """The graph without its training part, as far as that can be left out."""
    graph = graph if graph.held_out is None else graph.held_out
    return replace(graph, train=torch.zeros_like(graph.train))


def _macro_auc(log_p: Tensor, truth: Tensor, mask: Tensor) -> Tensor:
    """One class against the rest, averaged over the classes that have both; -1 if none has."""
    # With two classes both views are the same number, so the mean is the usual binary AUC.
    each = torch.stack([_auc(log_p[:, c], truth[:, c], mask) for c in range(log_p.shape[1])])
    defined = (each >= 0).to(each.dtype)
    mean = (each * defined).sum() / defined.sum().clamp(min=1)
    return torch.where(defined.sum() > 0, mean, -torch.ones_like(mean))


def _auc(score: Tensor, positive: Tensor, mask: Tensor) -> Tensor:
    """Share of (positive, negative) pairs in the right order; ties count half. O(N log N)."""
    # Nodes outside the mask are sorted behind everybody, so that nobody's rank counts them.
    score = torch.where(mask > 0, score, torch.full_like(score, torch.inf))
    ordered = score.sort().values
    below = torch.searchsorted(ordered, score)
    up_to = torch.searchsorted(ordered, score, right=True)
    rank = (below + up_to + 1).to(score.dtype) / 2
    chosen = positive * mask
    yes, no = chosen.sum(), ((1 - positive) * mask).sum()
    wins = (rank * chosen).sum() - yes * (yes + 1) / 2
    return torch.where(yes * no > 0, wins / (yes * no).clamp(min=1), -torch.ones_like(wins))


@record
class Outcome:
    """What one round found, on the device.

    Attributes:
        positions: Which clients took part.
        scored: Who scored the deployed model: all clients that are there.
        deployed: Their scores.
        local: Scores of the local models of those who took part; None if no client trained.
        finite: For a round with a tape: which of the numbers that it watched are finite.
    """

    positions: Tensor
    scored: Tensor
    deployed: Scores
    local: Scores | None = None
    finite: Tensor | None = None
