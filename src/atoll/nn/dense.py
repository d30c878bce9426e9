"""Dense products on a CPU, with oneDNN where it is faster than MKL, which `@` calls.

On processors of other vendors MKL does not use the full vector width. On one core of an AMD EPYC,
(3840, 64) by (64, 64) takes 0.28 ms with `@` and 0.13 ms with oneDNN. A call costs 0.01 ms more, so
small products use `@`, and so do dtypes other than float32. A kernel for a new shape takes 0.3 ms
to build and is cached, so shapes that change in every step must be `evened`.

Shapes: a (N, K), b (K, M), bias (M,).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from atoll.core.vmap.stacks import Context, Dims, Gradients, Vmap, as_batch, call

LARGE = 1 << 21  # number of multiplications from which oneDNN is faster
EVEN = 128  # `evened` pads the number of rows to a multiple of this
LEAST_EVENED = 512


def times(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices, or of stacks of them."""
    return dense_layer(a, b, None) if _is_large(a, b) else a @ b


def dense_layer(a: Tensor, b: Tensor, bias: Tensor | None, relu: bool = False) -> Tensor:
    """Return the product a b plus a bias, after a ReLU if `relu` is set."""
    if _is_large(a, b):
        found: Tensor = call(_Layer, a, b, bias, relu)
        return found
    out = a @ b
    out = out if bias is None else out + bias
    return torch.relu_(out) if relu else out


def evened(h: Tensor) -> Tensor:
    """Pad h, (N, D), with rows of zeros, so that many row counts share one shape."""
    more = 0 if h.is_cuda else rows_to_even(len(h), h.dtype)
    return torch.cat([h, h.new_zeros(more, h.shape[1])]) if more else h


def rows_to_even(rows: int, dtype: torch.dtype) -> int:
    """Return the number of rows that `evened` adds on a CPU."""
    return -rows % EVEN if rows >= LEAST_EVENED and dtype == torch.float32 else 0


def raw_product(a: Tensor, b: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Return `dense_layer` without a derivative."""
    if _is_large(a, b):
        return _Layer.forward(a, b, bias, relu)
    out = a @ b if bias is None else torch.addmm(bias, a, b)
    return torch.relu_(out) if relu else out


def _is_large(a: Tensor, b: Tensor) -> bool:
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] * b.numel() < LARGE:
        return False
    kind = torch.float32
    return a.device.type == "cpu" and a.dtype == kind and b.dtype == kind and _onednn() is not None


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """Return oneDNN's linear layer, x Wᵀ + b, or None if torch was built without it."""
    found = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return found.default if found is not None and torch._C._has_mkldnn else None


class _Layer(Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        linear = _onednn()
        assert linear is not None
        if bias is None and not relu and b.numel() < a.numel() and not a.is_contiguous():
            # The left side is copied to be contiguous, so put the smaller matrix there.
            return linear(b.mT, a, None, "none", [], "").mT
        return linear(a, b.mT, bias, "relu" if relu else "none", [], "")

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, relu = inputs
        ctx.save_for_backward(*tensors, output if relu else None)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        a, b, _, output = ctx.saved_tensors
        if output is not None:
            grad = torch.ops.aten.threshold_backward(grad, output, 0)
        by_a, by_b, by_bias, _ = ctx.needs_input_grad
        return (
            times(grad, b.mT) if by_a else None,
            times(a.mT, grad) if by_b else None,
            grad.sum(0) if by_bias else None,
            None,
        )

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
        a, b, bias, relu = args
        a_dim, b_dim, bias_dim, _ = in_dims
        size = info.batch_size
        if b_dim is None and bias_dim is None:
            tall = as_batch(a, a_dim, size).flatten(0, 1)
            out = dense_layer(tall, b, bias, relu)
            return out.reshape(size, -1, out.shape[1]), 0
        if a_dim is None:  # one matrix times the concatenated matrices of all clients
            wide = b.movedim(b_dim, 0).mT.flatten(0, 1).mT
            out = dense_layer(a, wide, None).reshape(len(a), size, -1).movedim(1, 0)
        else:
            pairs = zip(as_batch(a, a_dim, size), as_batch(b, b_dim, size), strict=True)
            out = torch.stack([dense_layer(one, other, None) for one, other in pairs])
        out = out if bias is None else out + as_batch(bias, bias_dim, size).unsqueeze(1)
        return torch.relu_(out) if relu else out, 0
