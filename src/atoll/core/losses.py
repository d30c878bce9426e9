"""Losses over a graph's nodes; every mean is over a mask, so padding never counts."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.graph import Graph
from atoll.core.tree import Tree, leaves


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values, (N,), where mask is one; zero if it is one nowhere."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def unit(z: Tensor) -> Tensor:
    """Rows of length one; a row of zeros stays, and its gradient finite."""
    square = z.square().sum(-1, keepdim=True)
    return z * torch.where(square > 1e-24, square, torch.ones_like(square)).rsqrt()


def cross_entropy(logits: Tensor, graph: Graph) -> Tensor:
    """Mean cross entropy over the training nodes."""
    picked = logits.gather(-1, graph.y.unsqueeze(-1)).squeeze(-1)
    # Torch's own log_softmax takes three times as long for a few classes.
    return masked_mean(torch.logsumexp(logits, dim=-1) - picked, graph.train)


def sq_distance(a: Tree, b: Tree) -> Tensor:
    """Squared Euclidean distance between two trees of one structure."""
    parts = [((x - y) ** 2).sum() for x, y in zip(leaves(a), leaves(b), strict=True)]
    return torch.stack(parts).sum()
