"""Sparse products and segment operations that stay one kernel under `vmap`.

Every op is an `autograd.Function` over one kernel, the sum over bags of rows (`embedding_bag`, the
fastest sparse product that we measured on CPU: docs/adr/0005). Its `vmap` rule treats the clients'
matrices as one block-diagonal matrix: a stacked `Sparse` already numbers its entries that way, so the
rule only reshapes. A matrix may also be a dense tensor; then a product is `@`.

Shapes: matrix (R, C) with E entries; dense (C, D); per-entry tensors (E,) or (E, D).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from atoll.core.graph import Sparse


def matmul(matrix: Tensor | Sparse, dense: Tensor) -> Tensor:
    """matrix @ dense, (R, D); differentiable in `dense` and, if sparse, in `matrix.values`."""
    if isinstance(matrix, Tensor):
        return matrix @ dense
    m = matrix
    out: Tensor = _Product.apply(
        m.offsets, m.columns, m.values, m.rows, m.t_offsets, m.t_columns, m.t_values, dense
    )
    return out


def with_values(matrix: Sparse, values: Tensor) -> Sparse:
    """The same places with other values, (E,) in row order; padding stays zero."""
    values = torch.where(matrix.values != 0, values, torch.zeros_like(values))
    # The transposed copy serves only the backward pass of `dense`, so it carries no gradient.
    by_column: Tensor = _Gather.apply(
        values.detach().unsqueeze(-1), matrix.t_order, None, None
    ).squeeze(-1)
    return replace(matrix, values=values, t_values=by_column)


def at_rows(matrix: Sparse, dense: Tensor) -> Tensor:
    """`dense`, (R, D), read at each entry's row: (E, D). For an adjacency, the edge's target."""
    out: Tensor = _Gather.apply(dense, matrix.rows, matrix.offsets, None)
    return out


def at_columns(matrix: Sparse, dense: Tensor) -> Tensor:
    """`dense`, (C, D), read at each entry's column: (E, D). For an adjacency, the edge's source."""
    out: Tensor = _Gather.apply(dense, matrix.columns, matrix.t_offsets, matrix.t_order)
    return out


def row_sum(matrix: Sparse, entries: Tensor) -> Tensor:
    """Sum of per-entry numbers, (E, D), over each row: (R, D)."""
    out: Tensor = _RowSum.apply(entries, matrix.offsets, matrix.rows)
    return out


def edge_softmax(matrix: Sparse, scores: Tensor) -> Tensor:
    """Softmax of per-entry scores, (E, H), over each row; zero on padding."""
    real = (matrix.values != 0).to(scores.dtype).unsqueeze(-1)
    scores = torch.where(real > 0, scores, torch.full_like(scores, -1e30))
    # Subtracting the row's maximum changes nothing but the rounding: no gradient through it.
    highest: Tensor = _RowMax.apply(scores.detach(), matrix.offsets)
    raised = torch.exp(scores - at_rows(matrix, highest)) * real
    total = row_sum(matrix, raised)
    return raised / at_rows(matrix, total.clamp(min=1e-16))


def _bags(dense: Tensor, index: Tensor, offsets: Tensor, weight: Tensor | None) -> Tensor:
    """out[r] = sum over the entries e of bag r of weight[e] * dense[index[e]]."""
    if index.numel() == 0:
        return dense.new_zeros(offsets.shape[0], dense.shape[1])
    return functional.embedding_bag(
        index, dense.contiguous(), offsets, mode="sum", per_sample_weights=weight
    )


def _joined(size: int, args: list[Tensor | None], dims: tuple[Any, ...]) -> list[Tensor | None]:
    """Batched tensors -> their blocks end to end."""
    out: list[Tensor | None] = []
    for arg, dim in zip(args, dims, strict=True):
        if arg is None:
            out.append(None)
            continue
        if dim is None:
            raise RuntimeError("a sparse matrix must be stacked whole: all of its tensors or none")
        out.append(arg.movedim(dim, 0).flatten(0, 1))
    return out


def _wide(dense: Tensor, dim: int) -> Tensor:
    """(..B.., C, D) -> (C, B*D): many dense matrices beside one sparse one."""
    return dense.movedim(dim, 1).flatten(1)


def _unwide(out: Tensor, size: int) -> Tensor:
    """(R, B*D) -> (B, R, D)."""
    return out.unflatten(1, (size, -1)).movedim(1, 0)


class _Product(Function):
    """matrix @ dense."""

    @staticmethod
    def forward(
        offsets: Tensor, columns: Tensor, values: Tensor, rows: Tensor | None,
        t_offsets: Tensor, t_columns: Tensor, t_values: Tensor, dense: Tensor,
    ) -> Tensor:  # fmt: skip
        return _bags(dense, columns, offsets, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        offsets, columns, values, rows, t_offsets, t_columns, t_values, dense = ctx.saved_tensors
        by_value = by_dense = None
        if ctx.needs_input_grad[2]:
            by_value = _EntryDot.apply(grad, dense, rows, columns)
        if ctx.needs_input_grad[7]:
            by_dense = _Product.apply(
                t_offsets, t_columns, t_values, None, offsets, columns, values, grad
            )
        return None, None, by_value, None, None, None, None, by_dense

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        *matrix, dense = args
        *dims, dense_dim = in_dims
        size = info.batch_size
        if all(dim is None for dim in dims):
            return _unwide(_Product.apply(*matrix, _wide(dense, dense_dim)), size), 0
        joined = _joined(size, matrix, tuple(dims))
        if dense_dim is None:
            out = _SharedProduct.apply(*joined, dense)
        else:
            out = _Product.apply(*joined, dense.movedim(dense_dim, 0).flatten(0, 1))
        return out.unflatten(0, (size, -1)), 0


class _SharedProduct(Function):
    """Block-diagonal matrix @ (the same dense matrix below itself, never copied)."""

    @staticmethod
    def forward(
        offsets: Tensor, columns: Tensor, values: Tensor, rows: Tensor | None,
        t_offsets: Tensor, t_columns: Tensor, t_values: Tensor, dense: Tensor,
    ) -> Tensor:  # fmt: skip
        return _bags(dense, columns.remainder(dense.shape[0]), offsets, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        offsets, columns, values, rows, t_offsets, t_columns, t_values, dense = ctx.saved_tensors
        by_value = by_dense = None
        if ctx.needs_input_grad[2]:
            by_value = _EntryDot.apply(grad, dense, rows, columns.remainder(dense.shape[0]))
        if ctx.needs_input_grad[7]:
            blocks = _Product.apply(
                t_offsets, t_columns, t_values, None, offsets, columns, values, grad
            )
            by_dense = blocks.unflatten(0, (-1, dense.shape[0])).sum(0)
        return None, None, by_value, None, None, None, None, by_dense


class _EntryDot(Function):
    """For each entry the inner product of a[row] and b[column]: the gradient by the values."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return (a.index_select(0, rows) * b.index_select(0, columns)).sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        raise RuntimeError("second derivatives by the values of a sparse matrix are not available")

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, a: Tensor, b: Tensor, rows: Tensor, columns: Tensor
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        if in_dims[2] is None:
            a = a.expand(size, *a.shape) if in_dims[0] is None else a.movedim(in_dims[0], 0)
            b = b.expand(size, *b.shape) if in_dims[1] is None else b.movedim(in_dims[1], 0)
            return (a.index_select(1, rows) * b.index_select(1, columns)).sum(-1), 0
        flat_rows, flat_columns = _joined(size, [rows, columns], in_dims[2:])
        assert flat_columns is not None
        a = a.movedim(in_dims[0], 0).flatten(0, 1)
        if in_dims[1] is None:
            flat_columns = flat_columns.remainder(b.shape[0])
        else:
            b = b.movedim(in_dims[1], 0).flatten(0, 1)
        return _EntryDot.apply(a, b, flat_rows, flat_columns).unflatten(0, (size, -1)), 0


class _Gather(Function):
    """dense[index]; its backward pass sums over the bags that (offsets, order) describe."""

    @staticmethod
    def forward(
        dense: Tensor, index: Tensor, offsets: Tensor | None, order: Tensor | None
    ) -> Tensor:
        return dense.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        index, offsets, order = ctx.saved_tensors
        if order is None:
            return _RowSum.apply(grad, offsets, index), None, None, None
        return _BagSum.apply(grad, order, offsets, index), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, dense: Tensor, index: Tensor, offsets: Any, order: Any
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        if in_dims[1] is None:
            out = _Gather.apply(_wide(dense, in_dims[0]), index, offsets, order)
            return _unwide(out, size), 0
        if in_dims[0] is None:
            dense, dim = dense.expand(size, *dense.shape), 0
        else:
            dim = in_dims[0]
        joined = _joined(size, [index, offsets, order], in_dims[1:])
        out = _Gather.apply(dense.movedim(dim, 0).flatten(0, 1), *joined)
        return out.unflatten(0, (size, -1)), 0


class _BagSum(Function):
    """Sum of entries over bags: entry order[e] belongs to the bag that offsets gives e."""

    @staticmethod
    def forward(entries: Tensor, order: Tensor, offsets: Tensor, index: Tensor) -> Tensor:
        return _bags(entries, order, offsets, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        order, offsets, index = ctx.saved_tensors
        return _Gather.apply(grad, index, offsets, order), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, entries: Tensor, order: Tensor, offsets: Tensor, index: Tensor
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        if in_dims[1] is None:
            out = _BagSum.apply(_wide(entries, in_dims[0]), order, offsets, index)
            return _unwide(out, size), 0
        joined = _joined(size, [entries, order, offsets, index], in_dims)
        return _BagSum.apply(*joined).unflatten(0, (size, -1)), 0


class _RowSum(Function):
    """Sum of entries, which stand in row order, over each row."""

    @staticmethod
    def forward(entries: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
        order = torch.arange(entries.shape[0], dtype=offsets.dtype, device=offsets.device)
        return _bags(entries, order, offsets, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        offsets, rows = ctx.saved_tensors
        return _Gather.apply(grad, rows, offsets, None), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, entries: Tensor, offsets: Tensor, rows: Tensor
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        if in_dims[1] is None:
            return _unwide(_RowSum.apply(_wide(entries, in_dims[0]), offsets, rows), size), 0
        joined = _joined(size, [entries, offsets, rows], in_dims)
        return _RowSum.apply(*joined).unflatten(0, (size, -1)), 0


class _RowMax(Function):
    """Largest entry of each row; zero for a row without entries. Not differentiable."""

    @staticmethod
    def forward(entries: Tensor, offsets: Tensor) -> Tensor:
        if entries.shape[0] == 0:
            return entries.new_zeros(offsets.shape[0], entries.shape[1])
        order = torch.arange(entries.shape[0], dtype=offsets.dtype, device=offsets.device)
        return functional.embedding_bag(order, entries.contiguous(), offsets, mode="max")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, entries: Tensor, offsets: Tensor) -> tuple[Tensor, int]:
        size = info.batch_size
        if in_dims[1] is None:
            return _unwide(_RowMax.apply(_wide(entries, in_dims[0]), offsets), size), 0
        joined = _joined(size, [entries, offsets], in_dims)
        return _RowMax.apply(*joined).unflatten(0, (size, -1)), 0
