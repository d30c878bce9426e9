"""The only epoch loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.core.optim import Optimizer
from atoll.core.random import fold
from atoll.core.tree import Tree, inside_transform, leaves, tree_map


def fit(
    loss: Callable[[Tree, Tensor], Tensor],
    params: Tree,
    optimizer: Optimizer,
    state: Tree,
    epochs: int,
    key: Tensor,
    adjust: Callable[[Tree, Tree], Tree] | None = None,
    owned: bool = False,
) -> tuple[Tree, Tree]:
    """Take `epochs` full-batch steps; returns the parameters and the optimizer's state.

    Args:
        loss: (params, key) -> scalar; the key differs in every epoch.
        params: Where to start.
        optimizer: Its update is taken once per epoch.
        state: The optimizer's state; None starts a fresh one.
        epochs: Number of steps.
        key: The root of the epochs' keys.
        adjust: (grads, params) -> grads, for methods that bend the gradient (a proximal pull, a
            control variate) without differentiating through it.
        owned: Whether parameters and state may be overwritten: nobody else will read them.
    """
    state = optimizer.init(params) if state is None else state
    for epoch in range(epochs):
        grads = gradient(loss, params, fold(key, epoch))
        if adjust is not None:
            grads = adjust(grads, params)
        # After the first step the parameters are this loop's own and may be overwritten.
        params, state = optimizer.update(grads, params, state, owned=owned or epoch > 0)
    return params, state


def gradient(loss: Callable[[Tree, Tensor], Tensor], params: Tree, key: Tensor) -> Tree:
    """The loss's gradient by the parameters, a tree like them."""
    if inside_transform():
        return torch.func.grad(loss)(params, key)
    # Outside of `vmap` plain autograd gives the same numbers without the transforms' overhead,
    # which is as much as the work itself for a small graph.
    with torch.enable_grad():
        tracked = tree_map(lambda leaf: leaf.detach().requires_grad_(), params)
        value = loss(tracked, key)
    flat = leaves(tracked)
    found = torch.autograd.grad(value, flat, allow_unused=True, materialize_grads=True)
    by_leaf = {id(leaf): grad for leaf, grad in zip(flat, found, strict=True)}
    return tree_map(lambda leaf: by_leaf[id(leaf)], tracked)
