"""Access to the stacked tensors of all clients inside `vmap`, which shows only one client's tensor.

Functorch's interpreter costs more than a small operation itself. Code that works on all clients at
once unwraps the stack behind a tensor (`Batch.lower`), computes without the interpreter
(`Batch.paused`) and wraps the result again (`Batch.lift`). `torch._C._functorch` is private to
torch, so few files call it, and tests compare every shortcut with plain `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch import vmap
from torch.autograd import Function

from atoll.core.tree import Tree, inside_transform, leaves, tree_map, with_leaves

Dims = tuple[int | None, ...]
"""For each argument of a `vmap` rule: the axis of the clients, or None if all share it."""
Gradients = tuple[Tensor | None, ...]


class Context(Protocol):
    """The data that torch passes from the forward to the backward pass of a `Function`."""

    saved_tensors: tuple[Tensor, ...]
    rest: Sequence[Any]  # arguments that are not tensors
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class Vmap(Protocol):
    """The information that torch passes to a `vmap` rule."""

    batch_size: int


def batched(info: Vmap, dims: Dims, *args: Any) -> list[Any]:
    """Return the arguments of a `vmap` rule, with the clients as the first axis of each tensor."""
    pairs = zip(args, dims, strict=True)
    return [as_batch(a, dim, info.batch_size) if isinstance(a, Tensor) else a for a, dim in pairs]


def as_batch(leaf: Tensor, dim: int | None, size: int) -> Tensor:
    """Return (size, ...) with the clients first. A shared tensor is repeated without a copy."""
    return leaf.expand(size, *leaf.shape) if dim is None else leaf.movedim(dim, 0)


class Stacked(Function):
    """Base of functions that also accept stacks of all clients' tensors, without a loop."""

    @classmethod
    def vmap(cls, info: Vmap, dims: Dims, *args: Any) -> Any:
        found = call(cls, *batched(info, dims, *args))
        return found, (0,) * len(found) if isinstance(found, tuple) else 0


class Constant(Function):
    """Base of functions without a gradient."""

    @staticmethod
    def setup_context(ctx: Context, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))

    @staticmethod
    def backward(ctx: Context, *grads: object) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


@dataclass(frozen=True)
class Batch:
    """The current `vmap`, if it is the only transform: its level and the number of clients."""

    level: int
    batch_size: int  # torch's `vmap` rules read this name

    def holds(self, leaf: Tensor) -> bool:
        """Whether a tensor is a stack over the clients (otherwise all clients share it)."""
        return bool(_functorch.is_batchedtensor(leaf))

    def lower(self, leaf: Tensor) -> tuple[Tensor, int]:
        """Return the stack behind a tensor and its client axis. Repeat a shared tensor."""
        # A transform that has ended leaves its wrapper around a tensor and hides the stack.
        leaf = _functorch.unwrap_if_dead(leaf)
        if _functorch.is_batchedtensor(leaf) and _functorch.maybe_get_level(leaf) == self.level:
            return _functorch.get_unwrapped(leaf), _functorch.maybe_get_bdim(leaf)
        with self.paused():
            return leaf.expand(self.batch_size, *leaf.shape), 0

    def lift(self, stacked: Tensor, axis: int) -> Tensor:
        """Invert `lower`."""
        return _functorch._add_batch_dim(stacked, axis, self.level)

    def copied(self, tree: Tree) -> Tree:
        """Copy a tree for every client. The copies are contiguous."""

        def copy(leaf: Tensor) -> Tensor:
            stacked, axis = self.lower(leaf)
            with self.paused():
                stacked = stacked.movedim(axis, 0).clone(memory_format=torch.contiguous_format)
            return self.lift(stacked, 0)

        return tree_map(copy, tree)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disable `vmap` for code that works on stacks, because `vmap` would stack them again."""
        layer = _functorch.pop_dynamic_layer_stack()
        try:
            yield
        finally:
            _functorch.push_dynamic_layer_stack(layer)


@dataclass(frozen=True)
class Batches:
    """All current `vmap`s, the outermost first, if there is no other transform. See `Batch`."""

    layers: Sequence[Batch]

    def lower(self, leaf: Tensor) -> tuple[Tensor, Any]:
        """Return the stack behind a tensor and the axis of each `vmap`. Repeat a shared tensor."""
        axes = []
        with ExitStack() as paused:
            for batch in reversed(self.layers):
                leaf, axis = batch.lower(leaf)
                axes.append(axis)
                paused.enter_context(batch.paused())
        return leaf, axes

    def lift(self, stacked: Tensor, axes: Any) -> Tensor:
        """Invert `lower`."""
        for batch, axis in zip(self.layers, reversed(axes), strict=True):
            stacked = batch.lift(stacked, axis)
        return stacked

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disable every `vmap` for code that works on stacks."""
        with ExitStack() as paused:
            for batch in self.layers:
                paused.enter_context(batch.paused())
            yield


def current_batches() -> Batches | None:
    """Return the current `vmap`s, or None outside of `vmap` or inside another transform."""
    layers = _functorch.get_interpreter_stack() or []
    if not layers or any(x.key() != _functorch.TransformType.Vmap for x in layers):
        return None
    sizes = (_functorch.CVmapInterpreterPtr(layer).batchSize() for layer in layers)
    return Batches([Batch(layer.level(), size) for layer, size in zip(layers, sizes, strict=True)])


def current_batch() -> Batch | None:
    """Return the current `vmap`, or None if it is not the only transform."""
    layers = _functorch.get_interpreter_stack()
    if layers is None or len(layers) != 1 or layers[0].key() != _functorch.TransformType.Vmap:
        return None
    return Batch(layers[0].level(), _functorch.CVmapInterpreterPtr(layers[0]).batchSize())


def known(numbers: Tensor) -> list[list[float]] | None:
    """Return each client's numbers, (n,), as a list. None on a GPU or under other transforms."""
    batch = current_batch()  # Python would wait for a GPU, and other transforms hide the numbers
    if numbers.is_cuda or (batch is None and inside_transform()):
        return None
    if batch is None:
        return [numbers.tolist()]
    stacked, axis = batch.lower(numbers)
    with batch.paused():
        found: list[list[float]] = stacked.movedim(axis, 0).tolist()
    return found


def call(function: type[Function], *args: Any) -> Any:
    """Return `function.apply(*args)` for a function with a `vmap` rule, faster where possible."""
    # Under one `vmap`, call the rule on the stacks, because torch takes 0.2 ms for the same call.
    # Without a transform, skip the signature, which `apply` reads first. Without a gradient, call
    # only the kernel.
    batch = current_batch()
    if batch is None and inside_transform():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    if batch is None:
        tracked = super(Function, function).apply if torch.is_grad_enabled() else function.forward  # type: ignore[misc]
        return tracked(*args)
    axes: list[int | None] = []
    lowered = []
    for arg in args:
        axis, one = None, arg
        if isinstance(arg, Tensor):
            one = _functorch.unwrap_if_dead(arg)  # as in `lower`
            if _functorch.is_batchedtensor(one):
                axis, one = _functorch.maybe_get_bdim(one), _functorch.get_unwrapped(one)
        axes.append(axis)
        lowered.append(one)
    with batch.paused():
        if axes.count(None) == len(axes):
            return call(function, *lowered)
        out, axis = function.vmap(batch, tuple(axes), *lowered)  # type: ignore[no-untyped-call]
    if isinstance(out, Tensor):
        return batch.lift(out, axis)
    return tuple(batch.lift(leaf, where) for leaf, where in zip(out, axis, strict=True))


def vmap_trees(function: Callable[..., Any], *trees: Tree) -> Any:
    """Apply `vmap` to a function from trees to a tree. Trees may contain None."""
    given = leaves(trees)
    sizes = {leaf.shape[0] for leaf in given}
    if len(sizes) != 1:
        raise ValueError(f"trees can be mapped together if their first axes are equal, not {sizes}")
    (size,) = sizes
    # `torch.func.vmap` does the same, but flattens and checks every tree, which takes 0.5 ms.
    vmap.lazy_load_decompositions()  # type: ignore[attr-defined]
    with vmap.vmap_increment_nesting(size, "error") as level:
        lifted = [_functorch._add_batch_dim(leaf, 0, level) for leaf in given]
        found = function(*with_leaves(trees, lifted))
        return tree_map(lambda leaf: _functorch._remove_batch_dim(leaf, level, size, 0), found)
