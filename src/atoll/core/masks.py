"""Private masks on shared weights, for FED-PUB and FedAux.

A client multiplies every weight matrix element-wise by its own mask. The masks stay private.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.tree import Tree, leaves, record, tree_map


@record
class Private:
    """The private state: a mask for every weight matrix, and the optimizer's moments."""

    masks: list[Tensor]
    moments: Tree


def first_masks(model: Tree) -> list[Tensor]:
    """Return masks of ones, one for each parameter with at least two axes."""
    return [torch.ones_like(leaf) for leaf in leaves(model) if leaf.dim() > 1]


def masked(model: Tree, masks: list[Tensor], threshold: float = 0.0) -> Tree:
    """Multiply the model by the masks. Mask entries with |μ| below the threshold count as zero."""
    rest = iter(masks)

    def times_mask(leaf: Tensor) -> Tensor:
        if leaf.dim() < 2:
            return leaf
        mask = next(rest)
        return leaf * (mask if threshold == 0 else mask * (mask.abs() >= threshold))

    return tree_map(times_mask, model)
