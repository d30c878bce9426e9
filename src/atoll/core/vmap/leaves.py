"""Elementwise functions of whole trees: on a GPU one kernel for all leaves of all clients.

A method or an optimizer writes the function for one tensor, `lambda p, g: p - lr * g`, and
`on_leaves` applies it to the leaves of trees. A CUDA graph of small kernels takes about two
microseconds for each, so a tree of twelve leaves gains much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from atoll.core.tree import Tree, inside_transform, leaves, leaves_like, with_leaves
from atoll.core.vmap.stacks import Constant, Dims, Vmap, as_batch, call
from atoll.core.vmap.varied import Varied

_WITHOUT_GRADIENT = (_functorch.TransformType.Vmap, _functorch.TransformType.Functionalize)
Elementwise = Callable[..., Any]
"""A function of tensors, or of `Leaves`, that treats every number alike and needs no gradient."""


def on_leaves(function: Elementwise, *trees: Tree, numbers: Sequence[object] = ()) -> Tree:
    """Return the tree of `function(*leaves)` for the corresponding leaves of the trees.

    `numbers` are the numbers that the function reads. If runs differ in one of them (`Varied`), or
    if the result is differentiated, the function gets each leaf separately.
    """
    parts = [leaves(trees[0]), *(leaves_like(tree, trees[0]) for tree in trees[1:])]
    flat = [leaf for part in parts for leaf in part]
    varied = any(isinstance(number, Varied) for number in numbers)
    if not flat or varied or _is_differentiated(flat):
        return with_leaves(trees[0], [function(*row) for row in zip(*parts, strict=True)])
    return with_leaves(trees[0], call(_OnLeaves, function, len(parts), *flat))


def _is_differentiated(flat: Sequence[Tensor]) -> bool:
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in flat):
        return True
    stack = _functorch.get_interpreter_stack() or ()
    return any(one.key() not in _WITHOUT_GRADIENT for one in stack)


class _OnLeaves(Constant):
    """`on_leaves` of the leaves of all clients at once."""

    @staticmethod
    def forward(function: Elementwise, trees: int, *flat: Tensor) -> tuple[Tensor, ...]:
        count = len(flat) // trees
        parts = [flat[i * count : (i + 1) * count] for i in range(trees)]
        if flat[0].is_cuda:
            return tuple(function(*map(Leaves, parts)).tensors)
        return tuple(function(*row) for row in zip(*parts, strict=True))

    @staticmethod
    def vmap(
        info: Vmap, dims: Dims, function: Elementwise, trees: int, *flat: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        pairs = zip(flat, dims[2:], strict=True)
        whole = [as_batch(leaf, dim, info.batch_size) for leaf, dim in pairs]
        step = _OnLeaves.apply if inside_transform() else _OnLeaves.forward
        out = step(function, trees, *whole)
        return out, (0,) * len(out)


class Leaves:
    """A list of tensors with the arithmetic of one tensor, and one kernel for each operation."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    def _apply(self, operation: Callable[..., Any], other: object) -> Leaves:
        return Leaves(operation(self.tensors, getattr(other, "tensors", other)))

    def __add__(self, other: Leaves | float) -> Leaves:
        return self._apply(torch._foreach_add, other)

    def __sub__(self, other: Leaves | float) -> Leaves:
        return self._apply(torch._foreach_sub, other)

    def __mul__(self, other: Leaves | float) -> Leaves:
        return self._apply(torch._foreach_mul, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Leaves | float) -> Leaves:
        return self._apply(torch._foreach_div, other)

    def sqrt(self) -> Leaves:
        return Leaves(torch._foreach_sqrt(self.tensors))

    def sign(self) -> Leaves:
        return Leaves(torch._foreach_sign(self.tensors))

    def lerp(self, end: Leaves, weight: float) -> Leaves:
        return Leaves(torch._foreach_lerp(self.tensors, end.tensors, weight))
