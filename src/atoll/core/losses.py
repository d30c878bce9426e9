"""Losses over a graph's nodes; every mean is over a mask, so padding never counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.core.tree import Tree, leaves

if TYPE_CHECKING:
    from atoll.core.graph import Graph


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values, (N,), where mask is one; zero if it is one nowhere."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def unit(z: Tensor) -> Tensor:
    """Rows of length one; a row of zeros stays, and its gradient finite."""
    square = z.square().sum(-1, keepdim=True)
    return z * torch.where(square > 1e-24, square, torch.ones_like(square)).rsqrt()


def cross_entropy(logits: Tensor, graph: Graph) -> Tensor:
    """Mean cross entropy over the training nodes."""
    below, log_total = below_top(logits)
    picked = below.gather(-1, graph.y.unsqueeze(-1)).squeeze(-1)
    return masked_mean(log_total - picked, graph.train)


def below_top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """How far logits, (N, C), are below their row's largest; log of the sum of its exp, (N,)."""
    # Their difference is `log_softmax`, for which torch takes three times as long for few classes.
    # Not by `logsumexp` of the logits themselves: large logits round a small loss away.
    below = logits - logits.detach().amax(-1, keepdim=True)
    return below, below.exp().sum(-1).log()


def class_means(z: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mean row of each class over the mask, (C, h), zero for a class without rows, and counts."""
    member = (y.unsqueeze(-1) == torch.arange(classes, device=y.device)) * mask.unsqueeze(-1)
    count = member.sum(0)
    return member.T @ z / count.clamp(min=1).unsqueeze(-1), count


def sq_distance(a: Tree, b: Tree) -> Tensor:
    """Squared Euclidean distance between two trees of one structure."""
    parts = [((x - y) ** 2).sum() for x, y in zip(leaves(a), leaves(b), strict=True)]
    return torch.stack(parts).sum()
