"""Initialisation of parameters from a key, with the ranges of the standard PyG and torch layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atoll.core.random import fold, uniform
from atoll.core.tree import Tree
from atoll.nn.ops import matmul


def _symmetric(key: Tensor, shape: tuple[int, ...], bound: float) -> Tensor:
    return (uniform(key, shape, torch.get_default_dtype()) * 2 - 1) * bound


def glorot(key: Tensor, n_in: int, n_out: int) -> Tensor:
    """Return (n_in, n_out), uniform in ±sqrt(6 / (n_in + n_out)), as in PyG's convolutions."""
    return _symmetric(key, (n_in, n_out), math.sqrt(6.0 / (n_in + n_out)))


def kaiming(key: Tensor, n_in: int, n_out: int) -> Tensor:
    """Return (n_in, n_out), uniform in ±1/sqrt(n_in), as in `torch.nn.Linear`."""
    return _symmetric(key, (n_in, n_out), 1.0 / math.sqrt(n_in))


def kaiming_bias(key: Tensor, n_in: int, n_out: int) -> Tensor:
    """Return (n_out,), uniform in ±1/sqrt(n_in), as in `torch.nn.Linear`."""
    return _symmetric(key, (n_out,), 1.0 / math.sqrt(n_in))


def linear(key: Tensor, n_in: int, n_out: int, *layer: int | str) -> dict[str, Tensor]:
    """Return weight and bias as in `torch.nn.Linear`. `layer` distinguishes layers of one key."""
    weight = kaiming(fold(key, *layer, "weight"), n_in, n_out)
    return {"weight": weight, "bias": kaiming_bias(fold(key, *layer, "bias"), n_in, n_out)}


def zeros(key: Tensor, size: int) -> Tensor:
    """Return (size,) zeros on the key's device."""
    return torch.zeros(size, dtype=torch.get_default_dtype(), device=key.device)


def apply_linear(layer: Tree, h: Tensor) -> Tensor:
    """Return h W + b."""
    out: Tensor = matmul(h, layer["weight"]) + layer["bias"]
    return out
