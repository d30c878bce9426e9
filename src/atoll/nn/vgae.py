"""Variational graph autoencoders: the loss over all pairs of nodes, and divergences of Gaussians.

    BCE = Σ_ij [softplus(s_ij) - a_ij s_ij] / N²,   s_ij = <z_i, z_j>,   i = j included

Here a_ij is 1 for an edge and else 0. The second term is a sum over edges. The first term has no
short form, but its gradient has a closed form, ∂/∂z_i = 2 Σ_j sigmoid(s_ij) z_j. One pass over a
few rows at a time gives both, so no N x N matrix is stored. A sample of pairs may replace all
pairs. Random permutations then pair every node with `partners` nodes, so all pairs are equally
likely and the sum is unbiased. On a CPU ten partners cost as much as all pairs for 1,000 nodes, and
a seventeenth of all pairs for 20,000 nodes.

Shapes: z (N, D), real and ids (N,); Gaussians with diagonal covariance (M, D).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.graph import Sparse
from atoll.core.random import fold, normal, random_bits
from atoll.nn.ops import matmul

ROWS = 256  # rows of the N x N matrix of scores in memory at once, per client


def node_normal(key: Tensor, ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers, (N, width), that depend on node ids, not on their order."""
    half = (width + 1) // 2
    bits = [random_bits(fold(key, name), ids, half) for name in ("radius", "angle")]
    # Numbers above 0 and up to 1.
    first, second = ((part.to(dtype) * 2.0**-32 + 0.5).clamp(min=2.0**-33) for part in bits)
    radius, angle = torch.sqrt(-2.0 * torch.log(first)), 2.0 * math.pi * second
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)[:, :width]


def adjacency_loss(
    edges: Sparse, z: Tensor, real: Tensor, ids: Tensor, key: Tensor | None, partners: int
) -> Tensor:
    """Return the mean cross entropy BCE of 0/1 `edges`, given z.

    It covers all pairs if `partners` is 0 or no key is given, and otherwise a sample of pairs.
    """
    z = z * real.unsqueeze(-1)
    if partners == 0 or key is None:
        total = all_pairs(z, real)
    else:
        total = some_pairs(z, real, ids, key, partners)
    return (total - (z * matmul(edges, z)).sum()) / real.sum().clamp(min=1) ** 2


def all_pairs(z: Tensor, real: Tensor) -> Tensor:
    """Return Σ_ij softplus(<z_i, z_j>) over real nodes. z must be zero on padding."""
    fixed = z.detach()
    total, slopes = torch.zeros_like(real.sum()), []
    for rows, mask in zip(torch.split(fixed, ROWS), torch.split(real, ROWS), strict=True):
        scores = rows @ fixed.T
        total = total + mask @ (_softplus(scores) @ real)
        slopes.append(torch.sigmoid(scores) @ fixed)
    return _with_slope(total, z, 2 * torch.cat(slopes))


def some_pairs(z: Tensor, real: Tensor, ids: Tensor, key: Tensor, partners: int) -> Tensor:
    """Return an unbiased estimate of `all_pairs` from `partners` pairs per node."""
    # Random orders of the nodes, with padding last. Bits of different ids always differ, so no ties
    # can depend on the order of the rows.
    bits = random_bits(key, ids, partners + 1).to(torch.int64)
    order = torch.argsort(torch.where(real.unsqueeze(-1) > 0, bits, 1 << 40), dim=0)
    place = torch.argsort(order, dim=0)
    fixed = z.detach()
    first, mask = fixed[order[:, 0]], real[order[:, 0]]
    total, by_first, slope = torch.zeros_like(real.sum()), torch.zeros_like(z), torch.zeros_like(z)
    for number in range(1, partners + 1):
        other = fixed[order[:, number]]
        scores = (first * other).sum(-1)
        total = total + (mask * _softplus(scores)).sum()
        pull = (mask * torch.sigmoid(scores)).unsqueeze(-1)
        by_first = by_first + pull * other
        slope = slope + (pull * first)[place[:, number]]
    weight = real.sum() / partners
    return _with_slope(weight * total, z, weight * (slope + by_first[place[:, 0]]))


def _softplus(scores: Tensor) -> Tensor:
    # By default torch is linear above 20, which has an error of 2e-9.
    return functional.softplus(scores, threshold=35)


def _with_slope(value: Tensor, z: Tensor, slope: Tensor) -> Tensor:
    """Return the value, with `slope` as its gradient with respect to z. The added term is zero."""
    return value + ((z - z.detach()) * slope).sum()


def gaussian_kl(
    mean: Tensor, log_variance: Tensor, other_mean: Tensor, other_log_variance: Tensor | float
) -> Tensor:
    """Return KL(one ‖ other) of diagonal Gaussians, separately for each dimension."""
    other = torch.as_tensor(other_log_variance, dtype=mean.dtype, device=mean.device)
    square = torch.exp(log_variance - other) + (mean - other_mean) ** 2 * torch.exp(-other)
    return 0.5 * (other - log_variance + square - 1)


def log_normal(x: Tensor) -> Tensor:
    """Return the log density of N(0, 1) at x, separately for each dimension."""
    return -0.5 * (math.log(2 * math.pi) + x**2)


def _bounded(log_variance: Tensor) -> Tensor:
    """Limit values that no training reaches, so that no client makes other clients' numbers NaN."""
    return log_variance.clamp(-40.0, 40.0)


def js_of_moments(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return FedIIH's surrogate for the Jensen-Shannon divergences of M Gaussians, (M, M).

    As in its public code, a Gaussian with the mean moments of a pair replaces the mixture.
    """
    log_variance = _bounded(log_variance)
    variance = torch.exp(log_variance)
    middle = (mean.unsqueeze(1) + mean) / 2
    spread_out = torch.log((variance.unsqueeze(1) + variance) / 2)
    kl = gaussian_kl(mean.unsqueeze(1), log_variance.unsqueeze(1), middle, spread_out).sum(-1)
    return (kl + kl.T) / 2


def js_by_sampling(mean: Tensor, log_variance: Tensor, key: Tensor, samples: int) -> Tensor:
    """Return the Jensen-Shannon divergences of M Gaussians, (M, M), from 0 to ln 2.

    JS = ln 2 - (E_A softplus(log B - log A) + E_B softplus(log A - log B)) / 2. All Gaussians use
    the same samples and their mirror images. To reduce the variance, the estimate subtracts the
    linear part of the softplus around the expected log ratio. The expectation of this part is zero.
    """
    mean, log_variance = mean.double(), _bounded(log_variance.double())
    drawn = normal(key, ((samples + 1) // 2, mean.shape[-1]), mean.dtype)
    deviation = torch.exp(0.5 * log_variance)
    points = mean.unsqueeze(1) + deviation.unsqueeze(1) * torch.cat([drawn, -drawn])
    precision = torch.exp(-log_variance)
    constant = (log_variance + precision * mean**2).sum(-1)

    def log_ratio(first: Tensor, second: Tensor) -> Tensor:
        """Return log B - log A for Gaussians A (first axis) and B (last axis), (M, s, M).

        The arguments are first and second moments of points, (M, s, h).
        """
        form = second @ precision.T - 2 * first @ (precision * mean).T + constant
        own = torch.diagonal(form, dim1=0, dim2=2).T.unsqueeze(-1)
        return (own - form) / 2

    ratio = log_ratio(points, points**2)
    expected = log_ratio(mean.unsqueeze(1), (mean**2 + deviation**2).unsqueeze(1))
    linear = torch.sigmoid(expected) * (ratio - expected)
    one_way = (functional.softplus(ratio) - linear).mean(1)
    return (math.log(2) - (one_way + one_way.T) / 2).clamp(0, math.log(2))
