"""The only epoch loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from atoll.core.graph import Graph
from atoll.core.minibatch import minibatches
from atoll.core.optim import Optimizer
from atoll.core.random import fold
from atoll.core.tree import Tree, flatten, inside_transform, unflatten
from atoll.core.vmap.stacks import Batch, current_batch

Loss = Callable[[Tree, Tensor], Tensor]
"""(params, key) -> scalar."""


def fit(
    loss: Callable[..., Tensor],
    params: Tree,
    optimizer: Optimizer,
    state: Tree,
    epochs: int,
    key: Tensor,
    adjust: Callable[[Tree, Tree], Tree] | None = None,
    graph: Graph | None = None,
    owned: bool = False,
) -> tuple[Tree, Tree]:
    """Train for some epochs; returns the parameters and the optimizer's state.

    An epoch is one full-batch step, unless a graph with a batch size is given: then one step for
    each mini-batch of its training graphs.

    Args:
        loss: (params, key) -> scalar, or (params, graph, key) -> scalar if a graph is given; the
            key differs in every step.
        params: Where to start.
        optimizer: Its update is taken once per step.
        state: The optimizer's state; None starts a fresh one.
        epochs: Number of passes over the training nodes, or graphs.
        key: The root of the steps' keys.
        adjust: (grads, params) -> grads, for methods that bend the gradient (a proximal pull, a
            control variate) without differentiating through it.
        graph: The client's graph, for methods that can train on mini-batches of it.
        owned: Whether parameters and state may be overwritten: nobody else will read them.
    """
    batch = current_batch()
    if batch is not None and not owned and not key.is_cuda:
        # Every client gets a copy before the first step, which would make one for itself otherwise,
        # and products with a model that all clients share another. On a GPU no step overwrites.
        params, state, owned = batch.copied(params), batch.copied(state), True
    state = optimizer.init(params) if state is None else state
    for epoch in range(epochs):
        for step_loss, noise in _steps(loss, graph, fold(key, epoch)):
            grads = gradient(step_loss, params, noise)
            if adjust is not None:
                grads = adjust(grads, params)
            params, state = optimizer.update(grads, params, state, owned=owned)
            owned = True  # from now on the parameters are this loop's own: overwrite them
    return params, state


def num_steps(graph: Graph, epochs: int) -> Tensor:
    """How many steps `fit` takes on a graph, for methods that divide by them."""
    one = graph.size("uniform")
    if not graph.batch_size:
        return one * epochs
    return one * epochs * torch.ceil(graph.train.sum() / graph.batch_size).clamp(min=1)


def _steps(
    loss: Callable[..., Tensor], graph: Graph | None, key: Tensor
) -> Iterator[tuple[Loss, Tensor]]:
    """What to minimise in each step of an epoch, and the step's key."""
    if graph is None:
        yield loss, key
        return
    batches = minibatches(graph, key) if graph.batch_size else [(graph, key)]
    for batch, noise in batches:
        yield _on(loss, batch), noise


def _on(loss: Callable[..., Tensor], graph: Graph) -> Loss:
    return lambda params, key: loss(params, graph, key)


def gradient(loss: Loss, params: Tree, key: Tensor) -> Tree:
    """The loss's gradient by the parameters, a tree like them."""
    batch = current_batch()
    if batch is not None:
        return _gradient_of_batch(batch, loss, params, key)
    if inside_transform():
        return torch.func.grad(loss)(params, key)
    # Outside of `vmap` plain autograd gives the same numbers without the transforms' overhead,
    # which is as much as the work itself for a small graph.
    with torch.enable_grad():
        flat, spec = flatten(params)
        tracked = [leaf.detach().requires_grad_() for leaf in flat]
        value = loss(unflatten(tracked, spec), key)
    found = torch.autograd.grad(value, tracked, allow_unused=True, materialize_grads=True)
    return unflatten(found, spec)


def _gradient_of_batch(batch: Batch, loss: Loss, params: Tree, key: Tensor) -> Tree:
    """Every client's gradient, by plain autograd on the stacks behind `vmap`.

    Nobody's loss depends on another's parameters, so that the gradient of the losses' sum by all
    parameters holds each client's own. `torch.func.grad` gives the same, but costs the interpreter
    a second layer around every operation and back.
    """
    with torch.enable_grad():
        given, spec = flatten(params)
        lowered = [batch.lower(leaf) for leaf in given]
        with batch.paused():
            flat = [stacked.detach().requires_grad_() for stacked, _ in lowered]
        axes = [axis for _, axis in lowered]
        tracked = [batch.lift(stacked, axis) for stacked, axis in zip(flat, axes, strict=True)]
        value, _ = batch.lower(loss(unflatten(tracked, spec), key))
        with batch.paused():
            found = torch.autograd.grad(
                value.sum(), flat, allow_unused=True, materialize_grads=True
            )
    lifted = [batch.lift(grad.detach(), axis) for grad, axis in zip(found, axes, strict=True)]
    return unflatten(lifted, spec)
