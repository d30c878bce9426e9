"""Triton kernels for losses, noise, optimizers and scores. The CPU uses plain torch operations.

Kernels work on contiguous float32 tensors on CUDA. Every GPU build of torch installs Triton.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether Triton kernels can process x: float32 on CUDA, with Triton installed."""
    return x.is_cuda and x.dtype == torch.float32 and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
