"""The only epoch loop of Atoll, and the gradient that all methods use.

A method's client step calls `fit` with its loss, and a server that trains calls `minimise`. Under
`vmap`, one call trains all clients of a group, with one backward pass for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from inspect import signature

import torch
from torch import Tensor

from atoll.core.batching import Whole
from atoll.core.errors import ConfigError
from atoll.core.graph import Graph
from atoll.core.minibatch import minibatches, with_new_views
from atoll.core.optim import Optimizer
from atoll.core.random import fold
from atoll.core.tree import Tree, inside_transform, leaves, with_leaves
from atoll.core.vmap.stacks import Batch, Batches, current_batch, current_batches

Loss = Callable[[Tree, Graph, Tensor], Tensor]
"""(params, graph, key) -> scalar. The graph is the client's graph or a mini-batch of it."""
PlainLoss = Callable[[Tree, Tensor], Tensor]  # (params, key) -> scalar
Steps = Iterable[tuple[PlainLoss, Tensor]]  # the loss of each step, with its key
Adjust = Callable[[Tree, Tree], Tree]  # (grads, params) -> grads


def fit(
    loss: Loss,
    params: Tree,
    optimizer: Optimizer,
    state: Tree,
    epochs: int,
    key: Tensor,
    graph: Graph | None = None,
    adjust: Adjust | None = None,
    *,
    needs_whole: str = "",
) -> tuple[Tree, Tree]:
    """Train on a client's graph. Return the trained parameters and the optimizer's state.

    An epoch is one step, or one step per mini-batch if the graph's `batching` cuts it. The loss
    must read the graph that it receives, which may be a mini-batch. Its key is new in every step.
    `adjust` changes the gradient (a proximal term, a control variate) after differentiation.
    `needs_whole` says why the loss cannot use a mini-batch; it begins with the method's name.
    The graph is required. Calls of older versions without it get an error.
    """
    try:
        signature(loss).bind(None, None, None)
    except TypeError:
        graph = None
    if graph is None:
        raise ConfigError(
            "fit now takes the client's graph and a loss of it: write "
            "fit(loss, model, optimizer, state, epochs, key, graph) with loss(params, graph, key)"
        )
    if needs_whole and graph.batching.cuts:
        raise ConfigError(
            f"{needs_whole}, so it cannot train on mini-batches; give batch_size 0 (all at once)"
        )
    # Once for all epochs.
    graph = replace(graph, training=None if needs_whole else with_new_views(graph))
    steps = (
        (partial(_on, loss, batch), noise)
        for epoch in range(epochs)
        for batch, noise in minibatches(graph, fold(key, epoch))
    )
    return _descend(steps, params, optimizer, state, adjust, owned=False)


def _on(loss: Loss, graph: Graph, params: Tree, key: Tensor) -> Tensor:
    return loss(params, graph, key)


def minimise(
    loss: PlainLoss,
    params: Tree,
    optimizer: Optimizer,
    state: Tree,
    steps: int,
    key: Tensor,
    owned: bool = False,
) -> tuple[Tree, Tree]:
    """Train without a graph, on the server. `owned` allows overwriting parameters and state."""
    plain = ((loss, fold(key, number)) for number in range(steps))
    return _descend(plain, params, optimizer, state, None, owned)


def num_steps(graph: Graph, epochs: int) -> Tensor:
    """Return the number of steps that `fit` takes, for methods that divide by it."""
    one = graph.size("uniform")
    if isinstance(graph.batching, Whole):
        return one * epochs
    return one * epochs * torch.ceil(graph.train.sum() / graph.batching.size).clamp(min=1)


def _descend(
    steps: Steps, params: Tree, optimizer: Optimizer, state: Tree, bend: Adjust | None, owned: bool
) -> tuple[Tree, Tree]:
    """Make one optimizer step for each pair of a loss and a key. Return parameters and state."""
    batch, before = current_batch(), params
    if batch is not None and not owned and not leaves(params)[0].is_cuda:
        # Copy once per client before the first step. Otherwise the first step copies, and products
        # with a model that all clients share copy it again. On a GPU no step overwrites its input.
        params, state, owned = batch.copied(params), batch.copied(state), True
    state = optimizer.init(params) if state is None else state
    for loss, noise in steps:
        grads = gradient(loss, params, noise)
        if bend is not None:
            grads = bend(grads, before)
        params, state = optimizer.update(grads, params, state, owned=owned)
        owned = True  # from now on only this loop refers to the parameters, so it overwrites them
        before = params
    return params, state


def gradient(loss: PlainLoss, params: Tree, key: Tensor) -> Tree:
    """Return the gradient of the loss with respect to the parameters, as a tree like them."""
    batch = current_batch() or current_batches()  # the first one is faster
    if batch is not None:
        return _gradient_of_batch(batch, loss, params, key)
    if inside_transform():
        return torch.func.grad(loss)(params, key)
    # Outside of `vmap`, plain autograd gives the same numbers. The overhead of the transforms would
    # be as large as the work itself for a small graph.
    with torch.enable_grad():
        tracked = [leaf.detach().requires_grad_() for leaf in leaves(params)]
        value = loss(with_leaves(params, tracked), key)
    found = torch.autograd.grad(value, tracked, allow_unused=True, materialize_grads=True)
    return with_leaves(params, found)


def _gradient_of_batch(batch: Batch | Batches, loss: PlainLoss, params: Tree, key: Tensor) -> Tree:
    """Compute the gradient of every client in every run, with plain autograd on the stacks."""
    # No client's loss depends on another client's parameters, so the gradient of the summed losses
    # contains each client's gradient. `torch.func.grad` would wrap every operation once more, and
    # import a compiler, which takes seconds.
    with torch.enable_grad():
        lowered = [batch.lower(leaf) for leaf in leaves(params)]
        with batch.paused():
            flat = [stacked.detach().requires_grad_() for stacked, _ in lowered]
        axes = [axis for _, axis in lowered]
        tracked = [batch.lift(stacked, axis) for stacked, axis in zip(flat, axes, strict=True)]
        value, _ = batch.lower(loss(with_leaves(params, tracked), key))
        with batch.paused():
            # A sum, because a gradient of ones makes torch import SymPy, which takes half a second.
            total = value.sum()
            found = torch.autograd.grad(total, flat, allow_unused=True, materialize_grads=True)
    lifted = [batch.lift(grad.detach(), axis) for grad, axis in zip(found, axes, strict=True)]
    return with_leaves(params, lifted)
