"""Fixed bins for the score of one class, so that the counts of many clients can be summed.

The score is the log-odds z of the class. Bins are equal steps of z / (4 + |z|): they are narrow
where most scores are, and cover all numbers. Around a probability of 1 % a bin spans 4 % of the
odds. Curves and thresholds of rare classes come from these counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 1024
SCALE = 4.0


def log_odds(logits: Tensor, positive: int) -> Tensor:
    """Return the log-odds of one class against all others, (N,), from logits (N, C)."""
    numbers = torch.arange(logits.shape[-1], device=logits.device)
    others = logits.masked_fill(numbers == positive, -torch.inf)
    return logits[:, positive] - others.logsumexp(-1)


def bin_of(z: Tensor) -> Tensor:
    """Return the bin of each log-odds value z, (N,) int64."""
    share = (1 + z / (SCALE + z.abs())) / 2
    return (share * BINS).clamp(0, BINS - 1).long()


def binned(z: Tensor, truth: Tensor, masks: Tensor) -> Tensor:
    """Count items by mask, (M, N), label (0 or 1) and bin of z. The result is (M, 2, BINS)."""
    # Sort and search, because `bincount` makes a GPU wait.
    place = bin_of(z) + BINS * truth.long()
    edges = torch.arange(2 * BINS + 1, device=z.device)
    rows = []
    for mask in masks:
        inside = torch.where(mask > 0, place, torch.full_like(place, 2 * BINS)).sort().values
        # Under `vmap` each stack of rows needs its own edges.
        below = torch.searchsorted(inside, edges + 0 * inside[:1])
        rows.append(below.diff().reshape(2, BINS).to(z.dtype))
    return torch.stack(rows)


def lower_edges() -> Tensor:
    """Return the probabilities between which the bins lie, (BINS + 1,) float64, from 0 to 1."""
    return _probability(torch.linspace(-1, 1, BINS + 1, dtype=torch.float64))


def middles() -> Tensor:
    """Return the probability in the middle of each bin, (BINS,) float64."""
    edges = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64)
    return _probability((edges[1:] + edges[:-1]) / 2)


def _probability(share: Tensor) -> Tensor:
    return (SCALE * share / (1 - share.abs())).sigmoid()
