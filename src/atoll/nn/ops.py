"""Sparse products and segment operations that stay one kernel under `vmap`.

Most operations are an `autograd.Function` over one kernel (`bags`), the sum over bags of rows. On a
CPU that is `embedding_bag`, the fastest sparse product that we measured (docs/adr/0005). On a GPU
it is `kernels/sparse.py` for few columns, and otherwise a product of torch. The `vmap` rule treats
the clients' matrices as one block-diagonal matrix. A stacked `Sparse` already numbers its entries
that way, so the rule only reshapes. Dense factors and per-entry tensors have second derivatives.
The values of a matrix have none, and a request raises an error.

Shapes: matrix (R, C) with E entries; dense (C, D); per-entry tensors (E,) or (E, D).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from atoll.core.graph import Distinct, Matrix, Sparse
from atoll.core.kernels import on_gpu
from atoll.core.vmap.stacks import Constant, Context, Dims, Gradients, Vmap, as_batch, call
from atoll.nn.dense import times

NO_SECOND_DERIVATIVE = "second derivatives by the values of a sparse matrix are not available"

NARROW = 16
"""Columns below which a CPU multiplies a dense matrix from the left, along its rows.

10 x (288, 64) by (64, 7) take 0.27 ms, and 0.07 ms as the transpose of (7, 64) by (64, 288).
"""


def matmul(matrix: Matrix, dense: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product, (R, D), plus a bias, (D,).

    If a `Sparse` has a `dense` form, its values get no gradient. `with_values` clears this form.
    """
    on_its_own = isinstance(matrix, Sparse) and on_gpu(dense) and dense.shape[-1] <= NARROW_ON_GPU
    if bias is not None and not on_its_own:
        return matmul(matrix, dense) + bias
    if isinstance(matrix, Tensor):
        if matrix.dim() == 2 and dense.shape[-1] < NARROW and not dense.is_cuda:
            return _call(_Narrow, matrix, dense)
        return times(matrix, dense)
    if isinstance(matrix, Distinct):
        return matmul(matrix.which, times(matrix.rows, dense))
    if matrix.dense is not None and not on_its_own:
        return matrix.dense @ dense
    m = matrix
    transposed = (m.t_offsets, m.t_columns, m.t_values)
    return _call(_Product, m.offsets, m.columns, m.values, m.rows, *transposed, dense, bias)


def both_ways(matrix: Sparse) -> tuple[Tensor, ...]:
    """Return offsets, columns and values of a matrix, then of its transpose, for `bags`."""
    m = matrix
    return m.offsets, m.columns, m.values, m.t_offsets, m.t_columns, m.t_values


def tall_matmul(h: Tensor, weight: Tensor) -> Tensor:
    """Return the product of a dense matrix with many rows, (N, D), and one with few, (D, H)."""
    return _call(_Tall, h, weight) if h.is_cuda else times(h, weight)


def by_row(function: Callable[[Tensor | Sparse], Tensor], matrix: Matrix) -> Tensor:
    """Apply a function to each row of a matrix, and to each different row of a `Distinct` once."""
    if isinstance(matrix, Distinct):
        return matmul(matrix.which, function(matrix.rows))
    return function(matrix)


def with_values(matrix: Sparse, values: Tensor) -> Sparse:
    """Replace the values, (E,) in row order. Entries of value zero (padding) stay zero."""
    values = torch.where(matrix.values != 0, values, torch.zeros_like(values))
    by_column = _call(_Gather, values.unsqueeze(-1), matrix.t_order, None, None)
    return replace(matrix, values=values, t_values=by_column.squeeze(-1), dense=None)


def at_rows(matrix: Sparse, dense: Tensor) -> Tensor:
    """Read `dense`, (R, D), at each entry's row: (E, D). For an adjacency, at the edge's target."""
    return _call(_Gather, dense, matrix.rows, matrix.offsets, None)


def at_columns(matrix: Sparse, dense: Tensor) -> Tensor:
    """Read `dense`, (C, D), at each entry's column: (E, D). For an adjacency, at the source."""
    return _call(_Gather, dense, matrix.columns, matrix.t_offsets, matrix.t_order)


def row_sum(matrix: Sparse, entries: Tensor) -> Tensor:
    """Sum per-entry numbers, (E, D), over each row: (R, D)."""
    return _call(_BagSum, entries, matrix.offsets, matrix.rows, None)


def row_max(matrix: Sparse, entries: Tensor) -> Tensor:
    """Return the largest of the entries, (E, D), of each row, (R, D). Empty rows give zero.

    Equal largest entries share the gradient, as in `torch.amax`.
    """
    real = (matrix.values != 0).to(entries.dtype).unsqueeze(-1)
    seen = torch.where(real > 0, entries.detach(), torch.full_like(entries, -1e30))
    highest = row_top(matrix, seen)
    wins = (seen == at_rows(matrix, highest)).to(entries.dtype) * real
    share = wins / at_rows(matrix, row_sum(matrix, wins)).clamp(min=1)
    return row_sum(matrix, entries * share)


def row_top(matrix: Sparse, entries: Tensor) -> Tensor:
    """Return `row_max` without a gradient. Padding counts, so give it the least value."""
    return _call(_RowMax, entries, matrix.offsets)


def edge_softmax(matrix: Sparse, scores: Tensor) -> Tensor:
    """Return the softmax of per-entry scores, (E, H), over each row. Padding is zero."""
    real = (matrix.values != 0).to(scores.dtype).unsqueeze(-1)
    scores = torch.where(real > 0, scores, torch.full_like(scores, -1e30))
    # Subtracting the row's maximum changes only the rounding, so it needs no gradient.
    highest = row_top(matrix, scores.detach())
    raised = torch.exp(scores - at_rows(matrix, highest)) * real
    return raised / at_rows(matrix, row_sum(matrix, raised).clamp(min=1e-16))


def _call(function: type[Function], *args: Tensor | None) -> Tensor:
    out: Tensor = call(function, *args)
    return out


def bags(
    dense: Tensor,
    index: Tensor,
    offsets: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    shared: bool = False,
) -> Tensor:
    """Return out[r] = Σ_e weight[e] * dense[index[e]] over the entries e of bag r.

    Without weights, weight[e] is one. A bias is added: (D,), or one row for each of several equal
    blocks. With `shared`, all blocks read the same dense matrix.
    """
    if on_gpu(dense) and dense.shape[1] <= NARROW_ON_GPU and index.numel():
        from atoll.nn.kernels import sparse as sparse_kernels

        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.reshape(-1, bias.shape[-1]).contiguous()
        return sparse_kernels.bags(dense.contiguous(), index, offsets, weight, bias, shared)
    if bias is not None:
        found = bags(dense, index, offsets, weight, shared=shared)
        return _unblocks(found, bias.shape[:-1].numel()).add_(bias.unsqueeze(-2)).view_as(found)
    if index.numel() == 0:
        return dense.new_zeros(offsets.shape[0], dense.shape[1])
    index = index.remainder(len(dense)) if shared else index
    if dense.is_cuda and index.numel() * dense.shape[1] > CSR_ABOVE:
        return _csr_bags(dense, index, offsets, weight)
    # Not `functional`, whose checks cost as much as a small product. 0 means the sum. Without
    # `detach`, torch also lists each entry's bag for its own backward pass (0.004 ms of 0.03).
    dense = dense.detach().contiguous()
    return torch.embedding_bag(dense, index, offsets, False, 0, False, weight)[0]


NARROW_ON_GPU = 64
"""Columns up to which `kernels/sparse.py` sums bags.

PubMed, ten clients, five runs at once on an H200: with 3 columns 0.07 ms, `embedding_bag` 0.73;
with 64 columns 0.10, cuSPARSE 0.09; with 256 cuSPARSE 0.18, and this kernel 0.65.
"""

CSR_ABOVE = 1 << 22
"""Number of multiplications above which a GPU uses torch's CSR product for other bags.

On PubMed with FedIIH (88,000 edges x 1,024) `embedding_bag` reaches a thirteenth of an H200's
bandwidth, because each thread walks its whole bag. Its launch is cheaper for small products.
"""


def _csr_bags(dense: Tensor, index: Tensor, offsets: Tensor, weight: Tensor | None) -> Tensor:
    """Compute `bags` as the product with a compressed-row (CSR) matrix."""
    ends = torch.cat([offsets, offsets.new_full((1,), index.numel())])
    values = dense.new_ones(index.numel()) if weight is None else weight.contiguous()
    _quiet()
    shape = (offsets.shape[0], dense.shape[0])
    matrix = torch.sparse_csr_tensor(ends, index, values, shape, check_invariants=False)
    return matrix @ dense.contiguous()


@cache
def _quiet() -> None:
    """Trigger and suppress torch's warning, once per process, that CSR matrices are a beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(1, 1).to_sparse_csr()


def _joined(args: Sequence[Tensor | None], dims: Dims) -> list[Tensor | None]:
    """Flatten each tensor of a stacked sparse matrix from (B, n, ...) to (B * n, ...)."""
    out: list[Tensor | None] = []
    for arg, dim in zip(args, dims, strict=True):
        if arg is not None and dim is None:
            raise RuntimeError("a sparse matrix must be stacked whole: all of its tensors or none")
        first = arg.movedim(dim, 0) if arg is not None and dim else arg
        out.append(None if first is None else first.flatten(0, 1))
    return out


def _blocks(dense: Tensor, dim: int | None, size: int) -> Tensor:
    """Stack many dense matrices vertically. A shared matrix is repeated."""
    return as_batch(dense, dim, size).flatten(0, 1)


def _unblocks(out: Tensor, size: int) -> Tensor:
    """Reshape (B*R, D) to (B, R, D)."""
    return out.reshape(size, out.shape[0] // size, *out.shape[1:])


def _wide(dense: Tensor, dim: int) -> Tensor:
    """Reshape (..B.., C, D) to (C, B*D): many dense matrices for one sparse matrix."""
    return dense.movedim(dim, 1).flatten(1)


def _unwide(out: Tensor, size: int) -> Tensor:
    """Reshape (R, B*D) to (B, R, D)."""
    return out.reshape(out.shape[0], size, out.shape[1] // size).movedim(1, 0)


class _KeepsInputs(Function):
    """An operation whose backward pass reads its inputs."""

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class NoDerivative(Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[object, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        raise RuntimeError(NO_SECOND_DERIVATIVE)


class _OnSegments(Function):
    """An operation on (dense, *index tensors) whose backward pass reads the index tensors."""

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @classmethod
    def vmap(cls, info: Vmap, in_dims: Dims, *args: Tensor) -> tuple[Tensor, int]:
        dense, *index = args
        size, (dense_dim, *dims) = info.batch_size, in_dims
        if dims[0] is None and dense_dim is not None:
            return _unwide(_call(cls, _wide(dense, dense_dim), *index), size), 0
        out = _call(cls, _blocks(dense, dense_dim, size), *_joined(index, tuple(dims)))
        return _unblocks(out, size), 0


class _Narrow(_KeepsInputs):
    """matrix @ dense for a `dense` with few columns (`NARROW`), as the transpose of denseᵀ matrixᵀ.

    The output is contiguous.
    """

    @staticmethod
    def forward(matrix: Tensor, dense: Tensor) -> Tensor:
        return (dense.mT @ matrix.mT).mT.contiguous()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        matrix, dense = ctx.saved_tensors
        by_matrix = grad @ dense.mT if ctx.needs_input_grad[0] else None
        by_dense = (grad.mT @ matrix).mT if ctx.needs_input_grad[1] else None
        return by_matrix, by_dense

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, *args: Tensor) -> tuple[Tensor, int]:
        pairs = zip(args, in_dims, strict=True)
        return _call(_Narrow, *(as_batch(arg, dim, info.batch_size) for arg, dim in pairs)), 0


class _Product(_KeepsInputs):
    """The sparse product. Arguments are the matrix's tensors as in `matmul`, then dense and bias.

    If the dense matrix has fewer rows than `t_offsets`, all blocks of a block-diagonal matrix
    share it, and it is not copied. A bias has one row per block, (B, D), or one for all, (D,).
    """

    @staticmethod
    def forward(*args: Tensor) -> Tensor:
        offsets, columns, values, _, t_offsets, *_, dense, bias = args
        return bags(dense, columns, offsets, values, bias, len(dense) < len(t_offsets))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        offsets, columns, values, rows, t_offsets, *transposed, dense, bias = ctx.saved_tensors
        by_value = by_dense = by_bias = None
        if ctx.needs_input_grad[2]:
            # Only a product with a transpose has no rows, and only a backward pass computes one.
            if rows is None:
                raise RuntimeError(NO_SECOND_DERIVATIVE)
            by_value = _call(_EntryDot, grad, dense, rows, _in_block(columns, t_offsets, dense))
        if ctx.needs_input_grad[7]:
            matrix = (t_offsets, *transposed, None, offsets, columns, values)
            by_dense = _call(_Product, *matrix, grad, None)
            if len(dense) < len(t_offsets):
                by_dense = _unblocks(by_dense, len(by_dense) // len(dense)).sum(0)
        if ctx.needs_input_grad[8]:
            blocks = bias.shape[:-1].numel()
            by_bias = _call(_ColumnSums, _unblocks(grad, blocks)).reshape(bias.shape)
        return None, None, by_value, None, None, None, None, by_dense, by_bias

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, *args: Tensor) -> tuple[Tensor, int]:
        *matrix, dense, bias = args
        *dims, dense_dim, bias_dim = in_dims
        size = info.batch_size
        biases = None if bias is None else as_batch(bias, bias_dim, size)
        if all(dim is None for dim in dims):
            wide = _wide(as_batch(dense, dense_dim, size), 0)
            found = _unwide(_call(_Product, *matrix, wide, None), size)
            return found if biases is None else found + biases.unsqueeze(-2), 0
        if dense_dim is not None:
            # Seeds around clients: each seed has one dense matrix, which its clients share.
            dense = dense.movedim(dense_dim, 0)
            copies = args[4].numel() // max(1, size * dense.shape[1])  # by t_offsets
            dense = dense.unsqueeze(1).expand(-1, copies, -1, -1).flatten(0, 2)
        flat = None if biases is None else biases.reshape(-1, biases.shape[-1])
        return _unblocks(_call(_Product, *_joined(matrix, tuple(dims)), dense, flat), size), 0


def _in_block(columns: Tensor, t_offsets: Tensor, dense: Tensor) -> Tensor:
    """Return the rows of dense that the entries read. All blocks may share them (`_Product`)."""
    height = dense.shape[0]
    return columns.remainder(height) if height < t_offsets.shape[0] else columns


class _ColumnSums(Function):
    """Sum x, (..., N, D), over its rows. Shape (..., D)."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        if not on_gpu(x) or x.shape[-2] > TALL_ON_GPU:
            return x.sum(-2)
        from atoll.nn.kernels import sparse as sparse_kernels

        flat = x.reshape(-1, *x.shape[-2:]).contiguous()
        return sparse_kernels.column_sums(flat).reshape(*x.shape[:-2], x.shape[-1])

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        return (grad.unsqueeze(-2).expand_as(*ctx.saved_tensors),)

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, x: Tensor) -> tuple[Tensor, int]:
        return _call(_ColumnSums, as_batch(x, in_dims[0], info.batch_size)), 0


TALL_ON_GPU = 4096
"""Rows up to which one program of `kernels/sparse.py` sums a column. Torch uses several."""

_PIECE = 1 << 22  # largest per-entry product (in numbers) in memory


class _EntryDot(NoDerivative):
    """Inner products of a[row] and b[column] for each entry: the gradient of the values."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        if on_gpu(a) and rows.numel():
            from atoll.nn.kernels import sparse as sparse_kernels

            return sparse_kernels.entry_dots(a.contiguous(), b.contiguous(), rows, columns)
        # In pieces, because the products of all entries may need more memory than the graph.
        piece = max(1, _PIECE // max(1, a.shape[1]))
        parts = zip(torch.split(rows, piece), torch.split(columns, piece), strict=True)
        return torch.cat([(a.index_select(0, r) * b.index_select(0, c)).sum(-1) for r, c in parts])

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, *args: Tensor) -> tuple[Tensor, int]:
        size, sides, index = info.batch_size, list(args[:2]), args[2:]
        if in_dims[2] is None:
            a, b = (as_batch(side, dim, size) for side, dim in zip(sides, in_dims, strict=False))
            return (a.index_select(1, index[0]) * b.index_select(1, index[1])).sum(-1), 0
        joined = [part for part in _joined(index, in_dims[2:]) if part is not None]
        for which, dim in enumerate(in_dims[:2]):
            if dim is None:
                joined[which] = joined[which].remainder(sides[which].shape[0])
            else:
                sides[which] = _blocks(sides[which], dim, size)
        return _unblocks(_call(_EntryDot, *sides, *joined), size), 0


class _Gather(_OnSegments):
    """dense[index]. Its backward pass sums over the bags that (offsets, order) describe."""

    @staticmethod
    def forward(dense: Tensor, index: Tensor, *offsets_and_order: Tensor | None) -> Tensor:
        return dense.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        _OnSegments.setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None) -> Gradients:
        index, offsets, order = ctx.saved_tensors
        # The values of a transpose (`with_values`) have no offsets and never get a gradient.
        by_dense = None if grad is None else _call(_BagSum, grad, offsets, index, order)
        return by_dense, None, None, None


class _BagSum(_OnSegments):
    """Sum entries over bags. Entry e is in bag index[e].

    `order` lists the entries bag by bag. Without it, they are stored in this order.
    """

    @staticmethod
    def forward(entries: Tensor, offsets: Tensor, index: Tensor, order: Tensor | None) -> Tensor:
        return bags(entries, _in_order(entries, offsets) if order is None else order, offsets, None)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        offsets, index, order = ctx.saved_tensors
        return _call(_Gather, grad, index, offsets, order), None, None, None


def _in_order(entries: Tensor, offsets: Tensor) -> Tensor:
    return torch.arange(entries.shape[0], dtype=offsets.dtype, device=offsets.device)


class _RowMax(Constant, _OnSegments):
    """Largest entry of each row, or zero for a row without entries."""

    @staticmethod
    def forward(entries: Tensor, offsets: Tensor) -> Tensor:
        if entries.shape[0] == 0:
            return entries.new_zeros(offsets.shape[0], entries.shape[1])
        order = _in_order(entries, offsets)
        return functional.embedding_bag(order, entries.contiguous(), offsets, mode="max")


class _Tall(_KeepsInputs):
    """A product whose gradient with respect to `weight` is summed in parts, to use the whole GPU.

    The gradient sums over all rows. 10 x (64, 4300) by (4300, 64) take 0.1 ms in one part,
    because the results are only 40 tiles for 132 processors.
    """

    @staticmethod
    def forward(h: Tensor, weight: Tensor) -> Tensor:
        return h @ weight

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        h, weight = ctx.saved_tensors
        by_h = grad @ weight.mT if ctx.needs_input_grad[0] else None
        return by_h, _rows_product(h, grad) if ctx.needs_input_grad[1] else None

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, *args: Tensor) -> tuple[Tensor, int]:
        pairs = zip(args, in_dims, strict=True)
        return _call(_Tall, *(as_batch(arg, dim, info.batch_size) for arg, dim in pairs)), 0


PART = 512  # smallest number of rows in a part of a product over all rows


def _rows_product(a: Tensor, b: Tensor) -> Tensor:
    """Return aᵀ b for (..., N, D) and (..., N, H), summed in parts."""
    rows = a.shape[-2]
    parts = min(16, rows // PART)
    if parts < 2:
        return a.mT @ b
    even = rows - rows % parts
    shape = (*a.shape[:-2], parts, even // parts)
    left, right = (side[..., :even, :].reshape(*shape, side.shape[-1]) for side in (a, b))
    total = (left.mT @ right).sum(-3)
    return total if even == rows else total + a[..., even:, :].mT @ b[..., even:, :]
