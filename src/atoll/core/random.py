"""Keyed randomness: noise is a hash of (seed, round, client, purpose, index), never a stream.

The same key gives the same random bits on every engine, in any order, on CPU and GPU. A key is a
scalar int64 tensor, so that a CUDA graph can replay it and `vmap` can carry one per client. Node
ids, not row numbers, index per-node noise, so padding and renumbering do not change it. Keys use
64-bit splitmix; elements use a 32-bit avalanche hash, which vectorises.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from atoll.core.kernels import on_gpu
from atoll.core.tree import inside_transform
from atoll.core.vmap import kernels, stacks
from atoll.core.vmap.stacks import Constant, Context, Dims, Gradients, Stacked, Vmap, call
from atoll.core.vmap.varied import Varied

T = TypeVar("T")
Number = int | Tensor
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)
_MIX32_A = 0x7FEB352D
_MIX32_B = 0x846CA68B


def make_key(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the root key of a seed."""
    return fold(torch.zeros((), dtype=torch.int64, device=device), seed)


def fold(key: Tensor, *parts: int | str | Tensor) -> Tensor:
    """Derive a key, as in `fold(key, "dropout", layer)`. A tensor of numbers gives many keys."""
    fixed: list[int | str] = []
    for part in parts:
        if isinstance(part, Tensor):
            number, mixed, fixed = part.to(torch.int64), salt(*fixed), []
            if key.is_cuda:
                key = _hashed(key, mixed, number)
            else:
                key = _mix64((key ^ mixed) * _MIX_B + number * _MIX_A + _GOLDEN)
        else:
            fixed.append(part)
    return key if parts and isinstance(parts[-1], Tensor) else salted(key, salt(*fixed))


def salt(*parts: int | str) -> int:
    """Mix plain parts into one number, so that a key costs one tensor hash, not one per part."""
    mixed = 0
    for part in parts:
        # Strings map above every number that is used as a part, so they never equal an index.
        number = zlib.crc32(part.encode()) + (1 << 33) if isinstance(part, str) else part
        mixed = _mix64_int(mixed * _MIX_B + number * _MIX_A + _GOLDEN)
    return mixed


def salted(key: Tensor, salt: Number) -> Tensor:
    """Return `fold(key, *parts)`, given the salt of plain parts."""
    if key.is_cuda:
        return _hashed(key, salt)
    batch = stacks.current_batch()
    if batch is None or not batch.holds(key):
        return _mix64((key ^ salt) * _MIX_B)
    keys, axis = batch.lower(key)
    with batch.paused():  # a dozen small operations, on the keys of all clients at once
        keys = _mix64((keys ^ salt) * _MIX_B)
    return batch.lift(keys, axis)


def _hashed(key: Tensor, salt: Number, *part: Tensor) -> Tensor:
    """Compute `salted`, or `fold` with one tensor part, on a GPU."""
    hashed: Tensor = call(_Hashed, key, salt, *part)
    return hashed


def _salted_once(key: Tensor, salt: int | None) -> Number:
    """Return `salted` as a Python number for a single CPU key, which is twenty times faster."""
    if key.dim() or key.device.type != "cpu":
        return key if salt is None else salted(key, salt)
    number = int(key)
    return number if salt is None else _mix64_int((number ^ salt) * _MIX_B)


def random_bits(key: Tensor, rows: Tensor, width: int) -> Tensor:
    """Return uniform int32 bits, (N, width). Row ids, (N,), and columns index the noise."""
    if not inside_transform():
        return _Bits.forward(key, rows, width)
    bits: Tensor = call(_Bits, key, rows, width)
    return bits


def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uniform numbers in (0, 1). An element's position indexes its noise."""
    width = shape[-1] if shape else 1
    rows = torch.arange(math.prod(shape[:-1]) if shape else 1, device=key.device, dtype=torch.int32)
    bits = random_bits(key, rows, width)
    # The half step excludes zero. float32 rounds the largest value up to one, hence the clamp.
    steps = (((bits >> 8) + 2**23).to(dtype) + 0.5).mul(2.0**-24)
    return steps.clamp(max=1 - torch.finfo(dtype).eps / 2).reshape(shape)


def normal(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers of any shape (Box-Muller)."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(fold(key, "radius"), shape, dtype)))
    return radius * torch.cos(2.0 * math.pi * uniform(fold(key, "angle"), shape, dtype))


def dropout(
    h: Tensor,
    key: Tensor | None,
    rows: Tensor,
    rate: float | Varied,
    *purpose: int | str,
    after: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Zero entries of h, (N, D), with probability `rate` and rescale. Without a key, drop nothing.

    `after` is an activation function that is applied before dropout. The noise depends on
    `fold(key, *purpose)` and on the ids `rows`, (N,), of the nodes.
    """
    # `dropped` / 2^16 is the rate. It is a tensor if runs have different rates.
    if isinstance(rate, Varied):
        dropped: Number = torch.round(rate.tensor * 2**16)
    else:
        dropped = round(rate * 2**16)
    if key is None or (isinstance(dropped, int) and dropped == 0):
        return h if after is None else after(h)
    own = salt(*purpose) if purpose else None
    kernel = on_gpu(h) and after in (None, torch.relu)
    in_place = after is torch.relu and not h.is_cuda
    if (kernel or in_place) and isinstance(dropped, int):
        found: Tensor = call(_Dropped, h, key, rows, own, dropped, after is not None)
        return found
    h = h if after is None else after(h)
    given = (key, rows, dropped, own, h.shape[-1], h.dtype)
    mask: Tensor = call(_Keep, *given) if inside_transform() else _Keep.forward(*given)
    return h * mask


def dropout_mask(
    h: Tensor, key: Tensor | None, rows: Tensor, rate: float, *purpose: int | str
) -> tuple[Tensor | None, float]:
    """Return the mask by which `dropout` multiplies h on a CPU outside of `vmap`, and its scale.

    A mask of None stands for ones.
    """
    dropped = round(rate * 2**16)
    if key is None or dropped == 0:
        return None, 1.0
    own = salt(*purpose) if purpose else None
    mask = _Keep.forward(key, rows, dropped, own, h.shape[-1], h.dtype)
    return mask, 1.0 / (1.0 - dropped / 2**16)


def _mix64_int(value: int) -> int:
    """Compute `_mix64` of a Python number."""
    z = value % (1 << 64)
    z = (z ^ (z >> 30)) * (_MIX_A % (1 << 64)) % (1 << 64)
    z = (z ^ (z >> 27)) * (_MIX_B % (1 << 64)) % (1 << 64)
    return ((z ^ (z >> 31)) + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix64(z: Tensor) -> Tensor:
    """Hash 64-bit numbers. The argument is overwritten."""
    if not (z.is_meta or inside_transform()):
        # NumPy takes a quarter of torch's time for the few keys of a round's clients.
        bits = z.numpy().view("uint64")
        bits ^= bits >> 30
        bits *= _MIX_A % (1 << 64)
        bits ^= bits >> 27
        bits *= _MIX_B % (1 << 64)
        bits ^= bits >> 31
        return z
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_A
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_B
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _mix32(z: Tensor) -> Tensor:
    """Hash 32-bit numbers in place, which costs half as much as new memory."""
    if z.is_meta:  # only shapes matter
        return z
    # NumPy shifts without a sign, which takes two thirds of the time of torch's shifts and masks.
    bits = z.numpy().view("uint32")
    bits ^= bits >> 16
    bits *= _MIX32_A
    bits ^= bits >> 15
    bits *= _MIX32_B
    bits ^= bits >> 16
    return z


def _grid_bits(key: Number, rows: Tensor, width: int) -> Tensor:
    """Return bits (..., N, width) for keys (...,) and rows (..., N). Batch axes broadcast."""
    if isinstance(key, Tensor) and key.is_cuda:
        return kernels.grid_bits(key, rows, width)
    if isinstance(key, int):
        halves: Sequence[Number] = (key + (1 << 31)) % (1 << 32) - (1 << 31), key >> 32
    else:
        halves = [half.to(torch.int32).unsqueeze(-1) for half in (key << 32 >> 32, key >> 32)]
    low, high = halves
    columns = torch.arange(width, dtype=torch.int32, device=rows.device)
    row_hash = _mix32(rows.to(torch.int32) ^ low).unsqueeze(-1)
    column_hash = _mix32(columns + high).unsqueeze(-2)
    return _mix32(row_hash + column_hash)


def _batch_first(dims: Dims, *args: T) -> list[T | Tensor]:
    """Move the batch axis of every batched argument to the front. Others get an axis of one."""
    out: list[T | Tensor] = []
    for arg, dim in zip(args, dims, strict=False):
        if isinstance(arg, Tensor):
            out.append(arg.unsqueeze(0) if dim is None else arg.movedim(dim, 0))
        else:
            out.append(arg)
    return out


class _Hashed(Constant):
    """`kernels.mixed`, or `kernels.folded` with a part. Arguments broadcast under `vmap`."""

    @staticmethod
    def forward(key: Tensor, salt: Number, *part: Tensor) -> Tensor:
        return kernels.folded(key, salt, *part) if part else kernels.mixed(key, salt)

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, *args: Number) -> tuple[Tensor, int]:
        # Batch axes first, then as many axes of one as broadcasting needs.
        first = _batch_first(in_dims, *args)
        axes = [
            -1 if isinstance(arg, int) else arg.dim() - (dim is not None)
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        wide = [
            arg if isinstance(arg, int) else _with_axes(arg, max(axes) - count)
            for arg, count in zip(first, axes, strict=True)
        ]
        return call(_Hashed, *wide), 0


def _with_axes(leaf: Tensor, count: int) -> Tensor:
    """Insert `count` axes of one behind the first axis."""
    return leaf.reshape(leaf.shape[0], *[1] * count, *leaf.shape[1:])


class _Bits(Constant):
    """`_grid_bits` as one operation, so that `vmap` handles one call instead of thirty."""

    @staticmethod
    def forward(key: Tensor, rows: Tensor, width: int) -> Tensor:
        return _grid_bits(key, rows, width)

    @staticmethod
    def vmap(info: Vmap, dims: Dims, key: Tensor, rows: Tensor, width: int) -> tuple[Tensor, int]:
        key, rows = _batch_first(dims[:2], key, rows)
        return random_bits(key, rows, width), 0


class _Keep(Constant):
    """A rescaled dropout mask as one operation, so that `vmap` handles one call, not thirty."""

    @staticmethod
    def forward(
        key: Tensor, rows: Tensor, dropped: Number, salt: int | None, width: int, dtype: torch.dtype
    ) -> Tensor:
        scale = 1.0 / (1.0 - dropped / 2**16)
        if key.is_cuda:
            own = key if salt is None else salted(key, salt)
            mask = kernels.keep_mask(own, rows, width, dropped, scale)
            return mask if dtype == torch.float32 else _scaled(mask != 0, scale, dtype)
        # One hash decides about two entries, with 16 bits each: uniform in [-2^15, 2^15).
        bits = _grid_bits(_salted_once(key, salt), rows, -(-width // 2))
        halves = bits.view(torch.int16)[..., :width]
        if isinstance(dropped, Tensor):
            least = (dropped - 2**15).to(torch.int32)[..., None, None]
            return _scaled(halves >= least, scale, dtype)
        below = dropped - 2**15 - 1
        # Only integers: on a CPU, comparisons and booleans cost five times more.
        return _scaled(halves.clamp_(below, below + 1).sub_(below), scale, dtype)

    @staticmethod
    def vmap(info: Vmap, in_dims: Dims, *args: object) -> tuple[Tensor, int]:
        return call(_Keep, *_batch_first(in_dims[:3], *args[:3]), *args[3:]), 0


class _Dropped(Stacked):
    """Dropout as one operation, after a ReLU if `relu` is set. On a CPU `relu` is always set."""

    @staticmethod
    def forward(
        h: Tensor, key: Tensor, rows: Tensor, salt: int | None, dropped: int, relu: bool
    ) -> Tensor:
        if not on_gpu(h):
            mask = _Keep.forward(key, rows, dropped, salt, h.shape[-1], h.dtype)
            return torch.relu(h).mul_(mask)
        from atoll.core.kernels import noise

        front = max(h.shape[:-2], key.shape, rows.shape[:-1], key=len)
        flat = h.expand(*front, *h.shape[-2:]).reshape(-1, *h.shape[-2:]).contiguous()
        keys = key.expand(front).reshape(-1).contiguous()
        ids = rows.to(torch.int32).expand(*front, rows.shape[-1]).reshape(-1, rows.shape[-1])
        found = noise.dropped(flat, keys, ids.contiguous(), salt, dropped, relu)
        return found.reshape(*front, *h.shape[-2:])

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, key, rows, *rest = inputs
        ctx.save_for_backward(key, rows, output if rest[-1] else None)
        ctx.rest = rest

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        key, rows, output = ctx.saved_tensors
        salt, dropped, relu = ctx.rest
        nothing = (None,) * 5
        if relu:
            return call(_PassedBack, grad, output, dropped), *nothing
        return call(_Dropped, grad, key, rows, salt, dropped, False), *nothing


class _PassedBack(Stacked):
    """The gradient of ReLU and dropout, which is linear in its first argument."""

    @staticmethod
    def forward(grad: Tensor, output: Tensor, dropped: int) -> Tensor:
        if not on_gpu(grad):
            slope: Tensor = torch.ops.aten.threshold_backward(grad, output, 0)
            return slope.mul_(1.0 / (1.0 - dropped / 2**16))
        from atoll.core.kernels import noise

        return noise.passed_back(grad.contiguous(), output.contiguous(), dropped)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.rest = inputs[2:]

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        return call(_PassedBack, grad, *ctx.saved_tensors, *ctx.rest), None, None


def _scaled(kept: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a mask, (..., N, D), by one scale, or by scales (...,)."""
    if isinstance(scale, Tensor):
        scale = scale.to(dtype)[..., None, None]
    return kept.to(dtype).mul_(scale)
