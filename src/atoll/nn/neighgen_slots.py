"""FedSage+: work only at the slots of made neighbours that are used, on a CPU.

Clients in one program get as many places as the one that needs most. Products know how many rows
each client really has, and leave the others zero: on Cora clients with 8 and with 105 made
neighbours share a program.

Shapes: N nodes with p slots each, R places in n nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from atoll.core.random import dropout
from atoll.core.tree import record, static
from atoll.core.vmap.stacks import Context, Dims, Gradients, Vmap, call, current_batch, known
from atoll.nn.ops import as_batch

Counts = tuple[tuple[int, ...], ...]
Sizes = tuple[int, ...]


@record
class Places:
    """All slots that are used, and few others.

    Nodes with the most used slots come first. The places are slot 0 of the first `sizes[0]` nodes,
    then slot 1 of the first `sizes[1]`, and so on.

    Attributes:
        nodes: Those that have a place, (n,).
        sizes: Descending: n, and less; together R. None for slots that nobody uses.
        counts: How many of these places each client of the program uses, the first ones.
        shape: N and p.
    """

    nodes: Tensor
    sizes: Sizes = static(())
    counts: Counts = static(())
    shape: tuple[int, int] = static((0, 0))

    def at(self, rows: Tensor) -> Tensor:
        """What belongs to the node of each place: (N, ...) -> (R, ...)."""
        own = rows[self.nodes]
        return torch.cat([own[:size] for size in self.sizes])

    def at_slots(self, rows: Tensor) -> Tensor:
        """What belongs to each place: (N, p, ...) -> (R, 1, ...)."""
        return self._chosen(rows[self.nodes])

    def summed(self, rows: Tensor) -> Tensor:
        """The sum over the places of each of its nodes: (R, 1, C) -> (n, C)."""
        first, *rest = torch.split(rows.squeeze(1), list(self.sizes))
        for more in rest:
            first = first + functional.pad(more, (0, 0, 0, len(first) - len(more)))
        return first

    def onto(self, rows: Tensor) -> Tensor:
        """Its nodes' rows among zeros for all others: (n, ...) -> (N, ...)."""
        index = self.nodes.reshape(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
        return rows.new_zeros(self.shape[0], *rows.shape[1:]).scatter(0, index, rows)

    def spread(self, rows: Tensor) -> Tensor:
        """(R, 1, C) -> (N, p, C), zero where no place is."""
        number = torch.arange(1, len(rows) + 1, device=rows.device)
        slots = torch.split(number, list(self.sizes))
        here = [functional.pad(slot, (0, len(self.nodes) - len(slot))) for slot in slots]
        which = functional.pad(torch.stack(here, 1), (0, self.shape[1] - len(here)))
        return functional.pad(rows.squeeze(1), (0, 0, 1, 0))[self.onto(which)]

    def dropped(
        self, rows: Tensor, key: Tensor | None, ids: Tensor, rate: float, *purpose: int | str
    ) -> Tensor:
        """Dropout of (R, 1, C), as `dropout` of (N, p C) would leave each place."""
        if key is None:
            return rows
        slots = len(self.sizes)
        ones = rows.new_ones(len(self.nodes), slots * rows.shape[-1])
        mask = dropout(ones, key, ids[self.nodes], rate, *purpose)
        return rows * self._chosen(mask.reshape(len(self.nodes), slots, -1))

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """(R, 1, C) by (C, O): (R, 1, O), zero at places that are not used."""
        return _at_each(_Product, (rows.squeeze(1), weight), self.counts, self.sizes).unsqueeze(1)

    def node_product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """(n, C) by (C, O): (n, O), zero at nodes that use no slot."""
        counts = tuple(count[:1] for count in self.counts)
        return _at_each(_Product, (rows, weight), counts, self.sizes[:1])

    def tanh_layer(self, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """What a layer of p D outputs gives each place, (n, C) -> (R, 1, D), zero if not used."""
        width = weight.shape[-1] // self.shape[1]
        given = (rows, weight, bias)
        return _at_each(_TanhLayer, given, self.counts, self.sizes, width).unsqueeze(1)

    def _chosen(self, own: Tensor) -> Tensor:
        return torch.cat([own[:size, k : k + 1] for k, size in enumerate(self.sizes)])


def used_places(used: Tensor) -> Places | None:
    """Where slots are used, (N, p) of one and zero, the first ones of each node.

    None where shapes must not depend on numbers (`core.vmap.stacks.known`): then all slots are
    made.
    """
    found = known(used.sum(0))
    if found is None:
        return None
    sizes = [int(max(counts)) for counts in zip(*found, strict=True)]
    # One place if nobody uses any: tensors without elements have troubles of their own.
    sizes = [size for size in sizes if size] or [1]
    counts = tuple(tuple(int(count) for count in client[: len(sizes)]) for client in found)
    nodes = torch.argsort(used.sum(1), descending=True, stable=True)[: sizes[0]]
    return Places(nodes, tuple(sizes), counts, (used.shape[0], used.shape[1]))


def _at_each(
    function: type[Function], given: tuple[Tensor, ...], *fixed: Counts | Sizes | int
) -> Tensor:
    """A function of stacks, for one client or for all behind `vmap`."""
    if current_batch() is not None:
        found: Tensor = call(function, *given, *fixed)
        return found
    stacked: Tensor = call(function, *(part.unsqueeze(0) for part in given), *fixed)
    return stacked.squeeze(0)


def _pieces(counts: Counts, sizes: Sizes) -> Iterator[tuple[int, int, slice]]:
    """For each client and slot the rows that are used, if any."""
    for client, own in enumerate(counts):
        first = 0
        for slot, (count, size) in enumerate(zip(own, sizes, strict=True)):
            if count:
                yield client, slot, slice(first, first + count)
            first += size


class _PlacesContext(Context, Protocol):
    counts: Counts
    sizes: Sizes
    width: int


class _OnStacks(Function):
    """Functions of stacks, (K, ...), which a `vmap` only has to find."""

    @classmethod
    def vmap(
        cls, info: Vmap, in_dims: Dims, *args: Tensor | Counts | Sizes | int
    ) -> tuple[Tensor, int]:
        stacks = [
            as_batch(arg, dim, info.batch_size) if isinstance(arg, Tensor) else arg
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        return call(cls, *stacks), 0


class _Product(_OnStacks):
    """Rows (K, R, C) by weights (K, C, O), where rows are used; zero elsewhere."""

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, counts: Counts, sizes: Sizes) -> Tensor:
        out = rows.new_zeros(*rows.shape[:2], weight.shape[-1])
        for i, _, piece in _pieces(counts, sizes):
            torch.mm(rows[i, piece], weight[i], out=out[i, piece])
        return out

    @staticmethod
    def setup_context(
        ctx: _PlacesContext, inputs: tuple[Tensor, Tensor, Counts, Sizes], output: Tensor
    ) -> None:
        rows, weight, ctx.counts, ctx.sizes = inputs
        ctx.save_for_backward(rows, weight)

    @staticmethod
    def backward(ctx: _PlacesContext, grad: Tensor) -> Gradients:
        rows, weight = ctx.saved_tensors
        by_rows = by_weight = None
        if ctx.needs_input_grad[0]:
            by_rows = _Product.forward(grad, weight.mT, ctx.counts, ctx.sizes)
        if ctx.needs_input_grad[1]:
            by_weight = weight.new_zeros(weight.shape)
            for i, _, piece in _pieces(ctx.counts, ctx.sizes):
                by_weight[i].addmm_(rows[i, piece].T, grad[i, piece])
        return by_rows, by_weight, None, None


class _TanhLayer(_OnStacks):
    """tanh(h W + b) with D columns for each slot, at places: (K, n, C) -> (K, R, D)."""

    @staticmethod
    def forward(
        rows: Tensor, weight: Tensor, bias: Tensor, counts: Counts, sizes: Sizes, width: int
    ) -> Tensor:
        out = rows.new_zeros(rows.shape[0], sum(sizes), width)
        for i, slot, piece in _pieces(counts, sizes):
            columns = slice(slot * width, (slot + 1) * width)
            h, made = rows[i, : piece.stop - piece.start], out[i, piece]
            torch.addmm(bias[i, columns], h, weight[i, :, columns], out=made).tanh_()
        return out

    @staticmethod
    def setup_context(
        ctx: _PlacesContext,
        inputs: tuple[Tensor, Tensor, Tensor, Counts, Sizes, int],
        output: Tensor,
    ) -> None:
        rows, weight, bias, ctx.counts, ctx.sizes, ctx.width = inputs
        ctx.save_for_backward(rows, weight, bias, output)

    @staticmethod
    def backward(ctx: _PlacesContext, grad: Tensor) -> Gradients:
        rows, weight, bias, out = ctx.saved_tensors
        by_rows, by_weight, by_bias = (part.new_zeros(part.shape) for part in (rows, weight, bias))
        for i, slot, piece in _pieces(ctx.counts, ctx.sizes):
            columns = slice(slot * ctx.width, (slot + 1) * ctx.width)
            count = piece.stop - piece.start
            slope = torch.ops.aten.tanh_backward(grad[i, piece], out[i, piece])
            torch.mm(rows[i, :count].T, slope, out=by_weight[i, :, columns])
            torch.sum(slope, 0, out=by_bias[i, columns])
            by_rows[i, :count].addmm_(slope, weight[i, :, columns].T)
        return by_rows, by_weight, by_bias, None, None, None
