"""The only epoch loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature

import torch
from torch import Tensor

from atoll.core.batching import Whole
from atoll.core.errors import ConfigError
from atoll.core.graph import Graph
from atoll.core.minibatch import minibatches
from atoll.core.optim import Optimizer
from atoll.core.random import fold
from atoll.core.tree import Tree, inside_transform, leaves, with_leaves
from atoll.core.vmap.stacks import Batch, Batches, current_batch, current_batches

Loss = Callable[[Tree, Graph, Tensor], Tensor]
"""(params, graph, key) -> scalar, where the graph is the client's or a mini-batch of it."""
PlainLoss = Callable[[Tree, Tensor], Tensor]  # (params, key) -> scalar
Steps = Iterable[tuple[PlainLoss, Tensor]]  # of each step, with its key
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
    """Train on a client's graph for some epochs; returns parameters and the optimizer's state.

    An epoch is one step, or one for each mini-batch where the graph is cut into these. The loss
    must read the graph that it gets, which may be a mini-batch; its key differs in every step.
    `adjust` bends the gradient (a proximal pull, a control variate) and is not differentiated.
    `needs_whole` says why the loss cannot take a mini-batch, beginning with the method's name.
    Only files of older versions leave the graph out; they get an error.
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
    """`fit` without a graph, on the server; `owned` parameters and state may be overwritten."""
    plain = ((loss, fold(key, number)) for number in range(steps))
    return _descend(plain, params, optimizer, state, None, owned)


def num_steps(graph: Graph, epochs: int) -> Tensor:
    """How many steps `fit` takes on a graph, for methods that divide by them."""
    one = graph.size("uniform")
    if isinstance(graph.batching, Whole):
        return one * epochs
    return one * epochs * torch.ceil(graph.train.sum() / graph.batching.size).clamp(min=1)


def _descend(
    steps: Steps, params: Tree, optimizer: Optimizer, state: Tree, bend: Adjust | None, owned: bool
) -> tuple[Tree, Tree]:
    """One update for each loss and its key."""
    batch = current_batch()
    if batch is not None and not owned and not leaves(params)[0].is_cuda:
        # One copy for every client before the first step. Otherwise the first step copies them, and
        # products with a model that all clients share copy it again. On a GPU no step overwrites.
        params, state, owned = batch.copied(params), batch.copied(state), True
    state = optimizer.init(params) if state is None else state
    for loss, noise in steps:
        grads = gradient(loss, params, noise)
        if bend is not None:
            grads = bend(grads, params)
        params, state = optimizer.update(grads, params, state, owned=owned)
        owned = True  # from now on only this loop has the parameters: overwrite them
    return params, state


def gradient(loss: PlainLoss, params: Tree, key: Tensor) -> Tree:
    """The loss's gradient by the parameters, a tree like them."""
    batch = current_batch() or current_batches()  # the first costs less
    if batch is not None:
        return _gradient_of_batch(batch, loss, params, key)
    if inside_transform():
        return torch.func.grad(loss)(params, key)
    # Outside of `vmap` plain autograd gives the same numbers without the transforms' overhead,
    # which is as much as the work itself for a small graph.
    with torch.enable_grad():
        tracked = [leaf.detach().requires_grad_() for leaf in leaves(params)]
        value = loss(with_leaves(params, tracked), key)
    found = torch.autograd.grad(value, tracked, allow_unused=True, materialize_grads=True)
    return with_leaves(params, found)


def _gradient_of_batch(batch: Batch | Batches, loss: PlainLoss, params: Tree, key: Tensor) -> Tree:
    """Every client's gradient, in every run, by plain autograd on the stacks behind `vmap`."""
    # No client's loss depends on another client's parameters, so the gradient of all losses
    # contains each client's. `torch.func.grad` would wrap every operation in one more interpreter,
    # and import a compiler, for seconds.
    with torch.enable_grad():
        lowered = [batch.lower(leaf) for leaf in leaves(params)]
        with batch.paused():
            flat = [stacked.detach().requires_grad_() for stacked, _ in lowered]
        axes = [axis for _, axis in lowered]
        tracked = [batch.lift(stacked, axis) for stacked, axis in zip(flat, axes, strict=True)]
        value, _ = batch.lower(loss(with_leaves(params, tracked), key))
        with batch.paused():
            # A sum, not the ones of its gradient: these make torch import SymPy, half a second.
            total = value.sum()
            found = torch.autograd.grad(total, flat, allow_unused=True, materialize_grads=True)
    lifted = [batch.lift(grad.detach(), axis) for grad, axis in zip(found, axes, strict=True)]
    return with_leaves(params, lifted)
