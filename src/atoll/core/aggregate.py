"""The only aggregations: `mix` multiplies stacked models by a matrix; `average` is one row."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.tree import tree_map

T = TypeVar("T")


def average(stacked: T, weight: Tensor | None = None) -> T:
    """Weighted mean over clients of stacked trees (K, ...); uniform without weights."""
    if weight is None:
        return tree_map(lambda leaf: leaf.mean(0), stacked)
    share = weight / weight.sum()
    return tree_map(lambda leaf: _weighted(share.to(leaf.dtype), leaf), stacked)


def mix(stacked: T, matrix: Tensor) -> T:
    """New model i = sum_j matrix[i, j] * model j, for stacked trees (K, ...) and matrix (M, K)."""
    return tree_map(lambda leaf: _weighted(matrix.to(leaf.dtype), leaf), stacked)


def _weighted(weight: Tensor, leaf: Tensor) -> Tensor:
    if not leaf.is_floating_point():
        # Weights turned into whole numbers would all be zero.
        raise TypeError(f"only floating-point tensors can be averaged, not {leaf.dtype}")
    flat = leaf.reshape(leaf.shape[0], leaf.shape[1:].numel())
    return (weight @ flat).reshape((*weight.shape[:-1], *leaf.shape[1:]))


def cosines(rows: Tensor) -> Tensor:
    """Cosines of all pairs of rows, (K, K); a zero row is like itself and nobody else."""
    unit = functional.normalize(rows, dim=-1)
    same = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    return torch.where(same, 1.0, unit @ unit.T)


def put(stacked: T, positions: Tensor, rows: T) -> T:
    """Stacked trees (N, ...) with the rows at `positions` replaced by `rows` (K, ...)."""
    return tree_map(lambda old, new: old.index_copy(0, positions, new), stacked, rows)


def spread(tree: T, size: int) -> T:
    """The same tree `size` times, stacked: a common start for personalised models."""
    return tree_map(lambda leaf: leaf.expand(size, *leaf.shape).clone(), tree)
