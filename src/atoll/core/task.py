"""Prediction tasks: each defines the targets, the loss and the scores. Every graph has a task.

An item is a node or a small graph, and the task predicts one target for each. A new task needs
one class here and one entry in `TASKS`. The class names the supported splits and metrics, which
`data.split` and `experiment.metrics` implement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.errors import check_name
from atoll.core.kernels import on_gpu
from atoll.core.losses import below_top, cross_entropy
from atoll.core.score_bins import binned, log_odds
from atoll.core.tree import inside_transform, record
from atoll.core.vmap.stacks import Constant, Stacked, call

if TYPE_CHECKING:
    from atoll.core.graph import Graph

ROLES = ("train", "val", "test")


@record
class Scores:
    """Scores of one client's predictions, for each of `ROLES` and C classes."""

    confusion: Tensor  # counts, (3, C, C): true class by predicted class
    loss: Tensor  # mean, (3,)
    auc: Tensor  # area under the ROC curve, (3,); -1 if undefined or not requested
    # Counts by label (0 or 1) and bin of the log-odds of class 1, (3, 2, BINS), if requested.
    bins: Tensor | None = None


@dataclass(frozen=True)
class Task(ABC):
    """The prediction task of a federation. `str(task)` is its name."""

    name: ClassVar[str]  # in commands and saved files; tables use the plural
    splits: ClassVar[tuple[str, ...]]  # supported ones, the default first (`data.split.SPLITS`)
    metrics: ClassVar[tuple[str, ...]]  # the default first (`experiment.metrics.METRICS`)
    many_graphs: ClassVar[bool] = False  # whether a client predicts for many graphs (`Graph.roots`)

    def __str__(self) -> str:
        return self.name

    @property
    def plural(self) -> str:
        """The counted items: "nodes" or "graphs"."""
        return f"{self.name}s"

    @abstractmethod
    def targets(self, graph: Graph) -> Tensor:
        """Return the targets, one row per item (`Graph.at_roots`)."""

    @abstractmethod
    def loss(self, outputs: Tensor, graph: Graph) -> Tensor:
        """Return the mean loss of a network's outputs, (N, C), over the training items."""

    @abstractmethod
    def score(
        self, outputs: Tensor, graph: Graph, *, with_auc: bool = False, with_bins: bool = False
    ) -> Scores:
        """Summarise a client's predictions by role. The scores have no rows of single items."""


class Classification(Task):
    """Base of tasks that predict one class per item. Outputs are logits."""

    splits: ClassVar[tuple[str, ...]] = (
        *("stratified", "openfgl", "fedtad", "gcfl", "random", "global", "given"),
    )
    metrics = ("accuracy", "macro_f1", "weighted_f1", "auc", "loss")

    def targets(self, graph: Graph) -> Tensor:
        return graph.at_roots(graph.y)

    def loss(self, outputs: Tensor, graph: Graph) -> Tensor:
        return cross_entropy(outputs, graph)

    def score(
        self, outputs: Tensor, graph: Graph, *, with_auc: bool = False, with_bins: bool = False
    ) -> Scores:
        logits = graph.at_roots(outputs)
        by_role = [graph.at_roots(mask) for mask in (graph.train, graph.val, graph.test)]
        if on_gpu(logits) and not (with_auc or with_bins):
            counts, loss = call(_Counted, logits, self.targets(graph), *by_role)
            return Scores(counts, loss, torch.full_like(loss, -1.0))
        masks, classes = torch.stack(by_role), logits.shape[-1]
        numbers = torch.arange(classes, device=logits.device)
        truth = (self.targets(graph).unsqueeze(-1) == numbers).to(logits.dtype)
        guess = (logits.argmax(-1, keepdim=True) == numbers).to(logits.dtype)
        # One product for all roles, because a CPU takes far longer for three narrow products.
        true_by_role = (masks.T.unsqueeze(-1) * truth.unsqueeze(1)).flatten(1)
        confusion = (guess.T @ true_by_role).reshape(classes, len(ROLES), classes).permute(1, 2, 0)
        below, log_total = below_top(logits)
        losses = log_total - (below * truth).sum(-1)
        loss = (masks * losses).sum(-1) / masks.sum(-1).clamp(min=1)
        auc = torch.full_like(loss, -1.0)
        if with_auc:
            log_p = functional.log_softmax(logits, dim=-1)
            auc = torch.stack([macro_auc(log_p, truth, mask) for mask in masks])
        bins = binned(log_odds(logits, 1), truth[:, 1], masks) if with_bins else None
        return Scores(confusion, loss, auc, bins)


class _Counted(Constant, Stacked):
    """One kernel for confusion matrices (..., 3, C, C) and losses (..., 3) of logits (..., N, C).

    The three rows are the training, validation and test masks.
    """

    @staticmethod
    def forward(logits: Tensor, y: Tensor, *masks: Tensor) -> tuple[Tensor, Tensor]:
        from atoll.core.kernels import classes

        front = logits.shape[:-2]
        labels, *rows = (part.reshape(-1, y.shape[-1]).contiguous() for part in (y, *masks))
        flat = logits.reshape(-1, *logits.shape[-2:]).contiguous()
        counts, loss = classes.scores(flat, labels, tuple(rows))
        return counts.reshape(*front, *counts.shape[1:]), loss.reshape(*front, *loss.shape[1:])


class NodeClassification(Classification):
    """Predict the class of every node of one graph."""

    name = "node"
    splits = (*Classification.splits, "inductive", "time", "unseen")


class GraphClassification(Classification):
    """Predict the class of every small graph. The label is stored at the graph's root."""

    name = "graph"
    many_graphs = True


NODES, GRAPHS = NodeClassification(), GraphClassification()
TASKS: dict[str, Task] = {task.name: task for task in (NODES, GRAPHS)}
"""Every task by its name."""
CLASSIFICATIONS = tuple(name for name, task in TASKS.items() if isinstance(task, Classification))
"""Names of the classification tasks, for methods that need classes."""


def task_named(name: str) -> Task:
    """Return the task of this name, or raise a ConfigError that lists the known names."""
    check_name("task", name, TASKS)
    return TASKS[name]


def macro_auc(log_p: Tensor, truth: Tensor, mask: Tensor) -> Tensor:
    """Average the one-vs-rest AUC over classes with positives and negatives, or return -1."""
    if mask.device.type == "cpu" and not inside_transform() and not mask.any():
        return log_p.new_full((), -1.0)  # held-out graphs have no training item
    # With two classes both one-vs-rest values are equal, so the mean is the binary AUC.
    each = torch.stack([_auc(log_p[:, c], truth[:, c], mask) for c in range(log_p.shape[1])])
    defined = (each >= 0).to(each.dtype)
    mean = (each * defined).sum() / defined.sum().clamp(min=1)
    return torch.where(defined.sum() > 0, mean, -torch.ones_like(mean))


def _auc(score: Tensor, positive: Tensor, mask: Tensor) -> Tensor:
    """Return the share of (positive, negative) pairs in order (ties: half), or -1 without pairs."""
    # Items outside the mask are sorted to the end, so they change no rank.
    score = torch.where(mask > 0, score, torch.full_like(score, torch.inf))
    ordered = score.sort().values
    below = torch.searchsorted(ordered, score)
    up_to = torch.searchsorted(ordered, score, right=True)
    rank = (below + up_to + 1).to(score.dtype) / 2
    chosen = positive * mask
    yes, no = chosen.sum(), ((1 - positive) * mask).sum()
    wins = (rank * chosen).sum() - yes * (yes + 1) / 2
    return torch.where(yes * no > 0, wins / (yes * no).clamp(min=1), -torch.ones_like(wins))
