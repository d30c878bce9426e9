"""What `vmap` hides: under it a tensor stands for many clients; here they are seen as one stack.

Needed by code that works on all clients at once at less cost than `vmap` of a transform would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch._C import _functorch


@dataclass(frozen=True)
class Batch:
    """The `vmap` under way, if it is the only transform.

    Attributes:
        level: Its number among the transforms.
        size: How many clients.
    """

    level: int
    size: int

    def lower(self, leaf: Tensor) -> tuple[Tensor, int]:
        """What stands behind a tensor, and the axis of its clients; one for all is repeated."""
        if _functorch.is_batchedtensor(leaf):
            return _functorch.get_unwrapped(leaf), _functorch.maybe_get_bdim(leaf)
        with self.paused():
            return leaf.expand(self.size, *leaf.shape), 0

    def lift(self, stacked: Tensor, axis: int) -> Tensor:
        """The opposite of `lower`."""
        return _functorch._add_batch_dim(stacked, axis, self.level)

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
