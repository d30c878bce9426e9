"""Label propagation without parameters, and how far a graph's labels can be trusted to spread.

    Y <- Â Y / 2 + Y0 / 2 + Y0 on the seeds,   Y0 = one-hot on the seeds, 1/C elsewhere

Shapes: labels one-hot (N, C), seeds and masks (N,) zeros and ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.graph import Graph, Matrix
from atoll.core.losses import masked_mean
from atoll.core.random import random_bits
from atoll.nn.ops import matmul


def homophily(graph: Graph, classes: int, key: Tensor) -> Tensor:
    """How well half of the training labels, drawn by the key, predict the others (view `gcn`)."""
    bits = random_bits(key, graph.ids, 1).squeeze(-1).long()
    place = torch.where(graph.train > 0, bits, 1 << 40).argsort(stable=True).argsort()
    seeds = graph.train * (place < graph.train.sum() // 2).to(graph.train.dtype)
    labels = functional.one_hot(graph.y, classes).to(graph.real.dtype)
    scores = propagate_labels(graph.views["gcn"], labels, seeds)
    return accuracy(scores, labels, graph.train - seeds)


def propagate_labels(adjacency: Matrix, labels: Tensor, seeds: Tensor, steps: int = 10) -> Tensor:
    """Scores, (N, C), from the labels of the seeds."""
    known = seeds.unsqueeze(-1)
    start = labels * known + (1 - known) / labels.shape[-1]
    y = start
    for _ in range(steps):
        y = (matmul(adjacency, y) + start) / 2 + known * start
    return y


def accuracy(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Share of nodes whose class scores highest, a tie being a fair draw; one if there are none."""
    best = (scores >= scores.amax(-1, keepdim=True) - 1e-6).to(scores.dtype)
    right = (best * labels).sum(-1) / best.sum(-1)
    return torch.where(mask.sum() > 0, masked_mean(right, mask), 1.0)
