"""A graph convolution with learned edge weights: D^-1/2 (W + I) D^-1/2.

W contains the learned weight w_ij of every edge, and not the weights of the data. On a GPU one
function with a hand-written gradient computes the normalised entries. It replaces a dozen small
operations, which cost more there than the products themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Function

from atoll.core.graph import Sparse
from atoll.core.kernels import on_gpu
from atoll.core.vmap.stacks import Context, Dims, Gradients, Vmap, batched, call
from atoll.nn.ops import NoDerivative, matmul, row_sum, with_values

Propagation = Callable[[Tensor, Tensor], Tensor]
"""(h, bias) -> the product of a matrix of N rows with h, (N, D), plus the bias, (D,)."""
MATRIX = ("offsets", "columns", "rows", "values", "t_offsets", "t_order")
"""The tensors of a `Sparse` that the GPU kernels read, in the order of their arguments."""


def weighted_gcn(adjacency: Sparse, weight: Tensor) -> Propagation:
    """Return the product with D^-1/2 (W + I) D^-1/2, given the view `loops` and its weights, (E,).

    D_i = 1 + Σ_j w_ij. The product is differentiable in w. Weights of self-loops are not used.
    """
    if on_gpu(weight):
        tensors = (getattr(adjacency, name) for name in MATRIX)
        values, t_values, _ = call(_Normalised, weight, *tensors)
        matrix = replace(adjacency, values=values, t_values=t_values, dense=None)
        return partial(matmul, matrix)
    matrix = with_values(adjacency, torch.where(adjacency.rows != adjacency.columns, weight, 1.0))
    scale = row_sum(adjacency, matrix.values.unsqueeze(-1)).clamp(min=1e-12).rsqrt()
    # Scaling the nodes before and after the product is cheaper than scaling every entry.
    return lambda h, bias: scale * matmul(matrix, scale * h) + bias


class _Normalised(Function):
    """The normalised entries by row and by column, (E,) each, and D^-1/2, (N,), on a GPU."""

    @staticmethod
    def forward(weight: Tensor, *matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from atoll.nn.kernels import edges

        return edges.normalised(weight, *matrix)

    @staticmethod
    def setup_context(
        ctx: Context, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        values, t_values, scale = output
        ctx.mark_non_differentiable(t_values, scale)
        ctx.set_materialize_grads(False)  # zeros for these two would need two launches
        ctx.save_for_backward(values, scale, *inputs[1:])

    @staticmethod
    def backward(ctx: Context, grad: Tensor, *_: Tensor) -> Gradients:
        matrix = ctx.saved_tensors[2:]
        return call(_NormalisedBack, grad, *ctx.saved_tensors), *[None] * len(matrix)

    @staticmethod
    def vmap(
        info: Vmap, in_dims: Dims, *args: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        found = call(_Normalised, *_joined(info, in_dims, args))
        return tuple(part.reshape(info.batch_size, -1) for part in found), (0, 0, 0)


class _NormalisedBack(NoDerivative):
    """The gradient with respect to the weights, (E,), given that for the entries."""

    @staticmethod
    def forward(grad: Tensor, values: Tensor, scale: Tensor, *matrix: Tensor) -> Tensor:
        from atoll.nn.kernels import edges

        return edges.normalised_back(grad, values, scale, *matrix)

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, *args: Tensor) -> tuple[Tensor, int]:
        return call(_NormalisedBack, *_joined(info, in_dims, args)).reshape(info.batch_size, -1), 0


def _joined(info: Vmap, dims: Dims, args: tuple[Tensor, ...]) -> list[Tensor]:
    """Concatenate the clients' tensors. The indices of a stacked matrix already fit the result."""
    if None in dims[1:]:
        raise RuntimeError("a sparse matrix must be stacked whole: all of its tensors or none")
    return [part.flatten() for part in batched(info, dims, *args)]
