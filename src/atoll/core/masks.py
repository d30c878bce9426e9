"""A client's own masks on shared weights: it computes with every weight matrix times its mask."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.tree import Tree, leaves, record, tree_map


@record
class Private:
    """What stays: a mask for every weight matrix, and the optimizer's moments."""

    masks: list[Tensor]
    moments: Tree


def first_masks(model: Tree) -> list[Tensor]:
    """Masks of ones; everything but vectors has one."""
    return [torch.ones_like(leaf) for leaf in leaves(model) if leaf.dim() > 1]


def masked(model: Tree, masks: list[Tensor], threshold: float = 0.0) -> Tree:
    """The model that a client computes with; masks below the threshold count as zero."""
    rest = iter(masks)

    def times_mask(leaf: Tensor) -> Tensor:
        if leaf.dim() < 2:
            return leaf
        mask = next(rest)
        return leaf * (mask if threshold == 0 else mask * (mask.abs() >= threshold))

    return tree_map(times_mask, model)
