"""FedSage+: compute only the used slots of generated neighbours, on a CPU.

A place is a slot that is computed. All clients of one program get equally many places, enough for
each of them. Products know the number of used rows of each client and keep the others zero. On
Cora, clients with 8 and with 105 generated neighbours share a program.

Shapes: N nodes with p slots each, R places in n nodes, D features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from atoll.core.random import dropout
from atoll.core.tree import record, static
from atoll.core.vmap.stacks import Context, Gradients, Stacked, call, current_batch, known
from atoll.nn.dense import raw_product

Counts = tuple[tuple[int, ...], ...]
Sizes = tuple[int, ...]


@record
class Places:
    """The computed slots: all used ones, and few others.

    Nodes with the most used slots come first. The places are slot 0 of the first `sizes[0]` nodes,
    then slot 1 of the first `sizes[1]` nodes, and so on.
    """

    nodes: Tensor  # the nodes that have a place, (n,)
    sizes: Sizes = static(())  # descending, the first is n; the sum is R; no zeros
    counts: Counts = static(())  # used places of each client and slot; they come first
    shape: tuple[int, int] = static((0, 0))  # N and p
    lasting: bool = static(False)  # whether many steps use these places, so shapes recur

    def at(self, rows: Tensor) -> Tensor:
        """Return the row of each place's node: (N, ...) -> (R, ...)."""
        own = rows[self.nodes]
        return torch.cat([own[:size] for size in self.sizes])

    def at_slots(self, rows: Tensor) -> Tensor:
        """Return the entry of each place: (N, p, ...) -> (R, 1, ...)."""
        return self._chosen(rows[self.nodes])

    def summed(self, rows: Tensor) -> Tensor:
        """Sum over the places of each node: (R, 1, C) -> (n, C)."""
        first, *rest = torch.split(rows.squeeze(1), list(self.sizes))
        for more in rest:
            first = first + functional.pad(more, (0, 0, 0, len(first) - len(more)))
        return first

    def onto(self, rows: Tensor) -> Tensor:
        """Scatter rows of nodes with places, zero elsewhere: (n, ...) -> (N, ...)."""
        index = self.nodes.reshape(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
        return rows.new_zeros(self.shape[0], *rows.shape[1:]).scatter(0, index, rows)

    def spread(self, rows: Tensor) -> Tensor:
        """Scatter (R, 1, C) to (N, p, C), with zeros where no place is."""
        number = torch.arange(1, len(rows) + 1, device=rows.device)
        slots = torch.split(number, list(self.sizes))
        here = [functional.pad(slot, (0, len(self.nodes) - len(slot))) for slot in slots]
        which = functional.pad(torch.stack(here, 1), (0, self.shape[1] - len(here)))
        return functional.pad(rows.squeeze(1), (0, 0, 1, 0))[self.onto(which)]

    def dropped(
        self, rows: Tensor, key: Tensor | None, ids: Tensor, rate: float, *purpose: int | str
    ) -> Tensor:
        """Apply dropout to (R, 1, C), equal to `dropout` of (N, p C) at each place."""
        if key is None:
            return rows
        slots = len(self.sizes)
        ones = rows.new_ones(len(self.nodes), slots * rows.shape[-1])
        mask = dropout(ones, key, ids[self.nodes], rate, *purpose)
        return rows * self._chosen(mask.reshape(len(self.nodes), slots, -1))

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply (R, 1, C) by (C, O). The result, (R, 1, O), is zero at unused places."""
        return _at_each(_Product, self._layout, rows.squeeze(1), weight).unsqueeze(1)

    def node_product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply (n, C) by (C, O). The result, (n, O), is zero at nodes that use no slot."""
        first = _Layout(tuple(count[:1] for count in self.counts), self.sizes[:1], 1, self.lasting)
        return _at_each(_Product, first, rows, weight)

    def tanh_layer(self, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return tanh(h W + b) at each place: (n, C) -> (R, 1, D). Unused places are zero.

        The layer has p D outputs, and a place needs the D outputs of its slot.
        """
        return _at_each(_TanhLayer, self._layout, rows, weight, bias).unsqueeze(1)

    @property
    def _layout(self) -> _Layout:
        return _Layout(self.counts, self.sizes, self.shape[1], self.lasting)

    def _chosen(self, own: Tensor) -> Tensor:
        return torch.cat([own[:size, k : k + 1] for k, size in enumerate(self.sizes)])


def used_places(used: Tensor) -> Places | None:
    """Return the places of the used slots, (N, p), or None if shapes must not depend on values."""
    found = known(used.sum(0))
    if found is None:
        return None
    sizes = [int(max(counts)) for counts in zip(*found, strict=True)]
    # Keep one place if no node uses any, because empty tensors cause other problems.
    sizes = [size for size in sizes if size] or [1]
    counts = tuple(tuple(int(count) for count in client[: len(sizes)]) for client in found)
    nodes = torch.argsort(used.sum(1), descending=True, stable=True)[: sizes[0]]
    return Places(nodes, tuple(sizes), counts, (used.shape[0], used.shape[1]), False)


class _Layout(NamedTuple):
    """The fields of `Places` that determine the used rows of a stack."""

    counts: Counts
    sizes: Sizes
    slots: int
    lasting: bool

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of two matrices. Only lasting shapes justify cached kernels."""
        return raw_product(a, b) if self.lasting else a @ b

    def pieces(self) -> Iterator[tuple[int, int, slice]]:
        """Yield (client, slot, used rows) for each client and slot with used rows."""
        for client, own in enumerate(self.counts):
            first = 0
            for slot, (count, size) in enumerate(zip(own, self.sizes, strict=True)):
                if count:
                    yield client, slot, slice(first, first + count)
                first += size


def _at_each(function: type[Function], layout: _Layout, *given: Tensor) -> Tensor:
    """Call a function of stacks over K clients, for one client or for all clients under `vmap`."""
    if current_batch() is not None:
        found: Tensor = call(function, layout, *given)
        return found
    stacked: Tensor = call(function, layout, *(part.unsqueeze(0) for part in given))
    return stacked.squeeze(0)


class _LayoutContext(Context, Protocol):
    layout: _Layout


Inputs = tuple[_Layout, *tuple[Tensor, ...]]


class _Product(Stacked):
    """Rows (K, R, C) times weights (K, C, O), for K clients. Unused rows are zero."""

    @staticmethod
    def forward(layout: _Layout, rows: Tensor, weight: Tensor) -> Tensor:
        out = rows.new_zeros(*rows.shape[:2], weight.shape[-1])
        for i, _, piece in layout.pieces():
            out[i, piece] = layout.times(rows[i, piece], weight[i])
        return out

    @staticmethod
    def setup_context(ctx: _LayoutContext, inputs: Inputs, output: Tensor) -> None:
        ctx.layout, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: _LayoutContext, grad: Tensor) -> Gradients:
        rows, weight = ctx.saved_tensors
        by_rows = by_weight = None
        if ctx.needs_input_grad[1]:
            by_rows = _Product.forward(ctx.layout, grad, weight.mT)
        if ctx.needs_input_grad[2]:
            by_weight = weight.new_zeros(weight.shape)
            for i, _, piece in ctx.layout.pieces():
                by_weight[i] += ctx.layout.times(rows[i, piece].T, grad[i, piece])
        return None, by_rows, by_weight


class _TanhLayer(Stacked):
    """tanh(h W + b) with D columns for each slot, at places: (K, n, C) -> (K, R, D)."""

    @staticmethod
    def forward(layout: _Layout, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        width = weight.shape[-1] // layout.slots
        out = rows.new_zeros(rows.shape[0], sum(layout.sizes), width)
        for i, slot, piece in layout.pieces():
            columns = slice(slot * width, (slot + 1) * width)
            h, made = rows[i, : piece.stop - piece.start], out[i, piece]
            torch.addmm(bias[i, columns], h, weight[i, :, columns], out=made).tanh_()
        return out

    @staticmethod
    def setup_context(ctx: _LayoutContext, inputs: Inputs, output: Tensor) -> None:
        ctx.layout, *tensors = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: _LayoutContext, grad: Tensor) -> Gradients:
        rows, weight, bias, out = ctx.saved_tensors
        width = out.shape[-1]
        by_rows, by_weight, by_bias = (part.new_zeros(part.shape) for part in (rows, weight, bias))
        for i, slot, piece in ctx.layout.pieces():
            columns = slice(slot * width, (slot + 1) * width)
            count = piece.stop - piece.start
            slope = torch.ops.aten.tanh_backward(grad[i, piece], out[i, piece])
            torch.mm(rows[i, :count].T, slope, out=by_weight[i, :, columns])
            torch.sum(slope, 0, out=by_bias[i, columns])
            by_rows[i, :count].addmm_(slope, weight[i, :, columns].T)
        return None, by_rows, by_weight, by_bias
