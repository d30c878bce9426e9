"""The only epoch loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.core.optim import Optimizer
from atoll.core.random import fold
from atoll.core.tree import Tree


def fit(
    loss: Callable[[Tree, Tensor], Tensor],
    params: Tree,
    optimizer: Optimizer,
    state: Tree,
    epochs: int,
    key: Tensor,
    adjust: Callable[[Tree, Tree], Tree] | None = None,
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
    """
    state = optimizer.init(params) if state is None else state
    for epoch in range(epochs):
        grads = torch.func.grad(loss)(params, fold(key, epoch))
        if adjust is not None:
            grads = adjust(grads, params)
        # After the first step the parameters are this loop's own and may be overwritten.
        params, state = optimizer.update(grads, params, state, owned=epoch > 0)
    return params, state
