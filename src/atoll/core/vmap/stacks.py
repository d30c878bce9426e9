"""What `vmap` hides: under it a tensor stands for many clients; here they are seen as one stack.

Needed by code that works on all clients at once at less cost than `vmap` of a transform would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import Function

from atoll.core.tree import Tree, inside_transform, tree_map


@dataclass(frozen=True)
class Batch:
    """The `vmap` under way, if it is the only transform.

    Attributes:
        level: Its number among the transforms.
        batch_size: How many clients; the name that torch's `vmap` rules know.
    """

    level: int
    batch_size: int

    def holds(self, leaf: Tensor) -> bool:
        """Whether a tensor stands for one of each client, or is one for all."""
        return bool(_functorch.is_batchedtensor(leaf))

    def lower(self, leaf: Tensor) -> tuple[Tensor, int]:
        """What stands behind a tensor, and the axis of its clients; one for all is repeated."""
        leaf = _functorch.unwrap_if_dead(leaf)
        if _functorch.is_batchedtensor(leaf):
            return _functorch.get_unwrapped(leaf), _functorch.maybe_get_bdim(leaf)
        with self.paused():
            return leaf.expand(self.batch_size, *leaf.shape), 0

    def lift(self, stacked: Tensor, axis: int) -> Tensor:
        """The opposite of `lower`."""
        return _functorch._add_batch_dim(stacked, axis, self.level)

    def copied(self, tree: Tree) -> Tree:
        """A copy of a tree, every client's own, one after another in memory."""

        def copy(leaf: Tensor) -> Tensor:
            stacked, axis = self.lower(leaf)
            with self.paused():
                stacked = stacked.movedim(axis, 0).clone(memory_format=torch.contiguous_format)
            return self.lift(stacked, 0)

        return tree_map(copy, tree)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Code that works on stacks, not on what stands for them."""
        layer = _functorch.pop_dynamic_layer_stack()
        try:
            yield
        finally:
            _functorch.push_dynamic_layer_stack(layer)


def current_batch() -> Batch | None:
    """The `vmap` under way; None if there is none, or some other transform besides."""
    layers = _functorch.get_interpreter_stack()
    if layers is None or len(layers) != 1 or layers[0].key() != _functorch.TransformType.Vmap:
        return None
    return Batch(layers[0].level(), _functorch.CVmapInterpreterPtr(layers[0]).batchSize())


def known(numbers: Tensor) -> list[list[float]] | None:
    """Every client's numbers, (n,), so that shapes may depend on them.

    None where they must not: on a GPU, which would have to be waited for and might be recording,
    and under transforms that hide them.
    """
    batch = current_batch()
    if numbers.is_cuda or (batch is None and inside_transform()):
        return None
    if batch is None:
        return [numbers.tolist()]
    stacked, axis = batch.lower(numbers)
    with batch.paused():
        found: list[list[float]] = stacked.movedim(axis, 0).tolist()
    return found


def call(function: type[Function], *args: Any) -> Any:
    """`function.apply(*args)` for a function with a `vmap` rule, at less cost where it can be.

    Under one `vmap` the rule is called on the stacks themselves. Torch would do the same after a
    long way through its transforms, which costs more than a small operation (0.2 ms). Without any
    transform the signature, which `apply` looks at first, is of no use; and without a gradient to
    track the kernel is all there is to call.
    """
    batch = current_batch()
    if batch is None and inside_transform():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    if batch is None:
        tracked = super(Function, function).apply if torch.is_grad_enabled() else function.forward  # type: ignore[misc]
        return tracked(*args)
    # What a transform that has ended left around a tensor hides the clients.
    args = tuple(_functorch.unwrap_if_dead(a) if isinstance(a, Tensor) else a for a in args)
    stacked = [isinstance(arg, Tensor) and _functorch.is_batchedtensor(arg) for arg in args]
    axes = tuple(
        _functorch.maybe_get_bdim(arg) if is_many else None
        for arg, is_many in zip(args, stacked, strict=True)
    )
    lowered = [
        _functorch.get_unwrapped(arg) if is_many else arg
        for arg, is_many in zip(args, stacked, strict=True)
    ]
    with batch.paused():
        if not any(stacked):
            return call(function, *args)
        out, axis = function.vmap(batch, axes, *lowered)  # type: ignore[no-untyped-call]
    if isinstance(out, Tensor):
        return batch.lift(out, axis)
    return tuple(batch.lift(leaf, where) for leaf, where in zip(out, axis, strict=True))
