"""Elementwise GPU operations with few launches: hashes, dropout masks and Adam.

Most are kernels of torch's jiterator, which compiles C++ at run time. The arguments and results of
such a kernel have one type, so some tensors are reinterpreted as bits. Hashes equal those of the
CPU code in `core.random`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from atoll.core.vmap.varied import Varied

_MIX64 = """
template <typename T> T mix64(T value) {
  unsigned long long z = (unsigned long long)value;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (T)(z ^ (z >> 31));
}
"""

_MIX32 = """
template <typename T> unsigned mix32(T value) {
  unsigned z = (unsigned)value;
  z = (z ^ (z >> 16)) * 0x7FEB352Du;
  z = (z ^ (z >> 15)) * 0x846CA68Bu;
  return z ^ (z >> 16);
}
"""


def mixed(key: Tensor, salt: int | Tensor) -> Tensor:
    """Compute `random.salted` on a GPU: an elementwise hash of key and salt, all int64."""
    code = """template <typename T> T mixed(T key, T salt) {
      return mix64((T)((unsigned long long)(key ^ salt) * 0x94D049BB133111EBull));
    }"""
    return _salted(code, salt, key)


def folded(key: Tensor, salt: int | Tensor, part: Tensor) -> Tensor:
    """Compute `random.fold` for one tensor `part` on a GPU: an elementwise hash, all int64."""
    code = """template <typename T> T folded(T key, T part, T salt) {
      return mix64((T)((unsigned long long)(key ^ salt) * 0x94D049BB133111EBull
                       + (unsigned long long)part * 0xBF58476D1CE4E5B9ull
                       + 0x9E3779B97F4A7C15ull));
    }"""
    return _salted(code, salt, key, part)


def _salted(code: str, salt: int | Tensor, *args: Tensor) -> Tensor:
    """Run a kernel whose last argument is a salt. A number is an argument of the launch."""
    if isinstance(salt, Tensor):
        return _run(_MIX64 + code, *args, salt)
    found: Tensor = torch.cuda.jiterator._create_jit_fn(_MIX64 + code, salt=0)(*args, salt=salt)
    return found


def grid_bits(key: Tensor, rows: Tensor, width: int) -> Tensor:
    """Return hashes of keys (...,), rows (..., N) and `width` columns: (..., N, width) int32."""
    code = """template <typename T> T grid_bits(T low, T high, T row, T column) {
      return (T)mix32(mix32(row ^ low) + mix32((unsigned)column + (unsigned)high));
    }"""
    return _run(_MIX32 + code, *_grid(key, rows, width))


def keep_mask(
    key: Tensor, rows: Tensor, width: int, dropped: int | Tensor, scale: float | Tensor
) -> Tensor:
    """Return a mask, (..., N, width). A share `dropped` / 2^16 is zero, the rest is `scale`."""
    code = """template <typename T> T keep_mask(T low, T high, T row, T columnMORE) {
      unsigned bits = mix32(mix32(row ^ low) + mix32((unsigned)(column >> 1) + (unsigned)high));
      short half = (short)(column & 1 ? bits >> 16 : bits & 0xFFFFu);
      return half >= LEAST ? SCALE : 0;
    }"""
    if isinstance(dropped, Tensor) and isinstance(scale, Tensor):
        names = {"MORE": ", T least, T scale", "LEAST": "least", "SCALE": "scale"}
        # Arguments have one type, so pass the scale as its bits.
        least, bits = (dropped - 2**15).to(torch.int32), scale.float().view(torch.int32)
        more = [least[..., None, None], bits[..., None, None]]
    else:
        written = f"__float_as_int((float)({scale!r}))"
        names, more = {"MORE": "", "LEAST": str(dropped - 2**15), "SCALE": written}, []
    found = _run(_MIX32 + code, *_grid(key, rows, width), *more, **names)
    return found.view(torch.float32)


def adam(
    settings: Any, numbers: Tensor | None, steps: Tensor, lists: list[list[Tensor]]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Make one step of Adam, like `torch._fused_adam_`, and overwrite nothing.

    Torch's kernel processes blocks of 65,536 numbers, which are too few blocks for a small model.
    If settings vary between runs, `numbers` contains their fields in its last axis. `steps` include
    this step, with an axis for clients if the leaves have one. `lists` are parameters, gradients
    and both moments. The result contains new parameters and both moments of each leaf.
    """
    plain = [getattr(settings, field.name) for field in fields(settings)]
    dtype = lists[0][0].dtype
    if numbers is None:
        step, each = _adam_kernel(*plain[1:]), [*_adam_rates(settings, steps.to(dtype))]
    else:
        # Double precision only for powers of numbers near one.
        lr, decay, beta1, beta2, eps = numbers.unbind(-1)
        count = steps.to(torch.float64)
        each = [lr / (1 - beta1**count), (1 - beta2**count).sqrt(), decay]
        if any(isinstance(number, Varied) for number in plain[2:]):
            step = _adam_step
            each += [beta1, 1 - beta1, beta2, 1 - beta2, eps]
        else:  # a kernel takes at most eight arguments, so these are constants of its code
            step = _adam_kernel(None, *plain[2:])
        each = [number.to(dtype) for number in each]

    def one(*leaf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (*steps.shape, *[1] * (leaf[0].dim() - steps.dim()))
        found: tuple[Tensor, Tensor, Tensor] = step(*leaf, *(part.reshape(shape) for part in each))
        return found

    return [one(*leaf) for leaf in zip(*lists, strict=True)]


def _adam_kernel(decay: float | None, beta1: float, beta2: float, eps: float) -> Callable[..., Any]:
    """Compile a step of Adam with these constants. If `decay` is None, it is the last argument."""
    code = """template <typename T>
    void adam(T p, T g, T m, T v, T rate, T bias, MORE T& p_out, T& m_out, T& v_out) {
      g += p * (T)DECAY;
      m_out = (T)BETA1 * m + (T)(1 - BETA1) * g;
      v_out = (T)BETA2 * v + (T)(1 - BETA2) * g * g;
      p_out = p - rate * m_out / (::sqrt(v_out) / bias + (T)EPS);
    }"""
    numbers = {"BETA1": beta1, "BETA2": beta2, "EPS": eps}
    names = {name: f"({float(number)!r})" for name, number in numbers.items()}
    names |= {"MORE": "T decay,", "DECAY": "decay"}
    if decay is not None:
        names |= {"MORE": "", "DECAY": f"({float(decay)!r})"}
    return _compiled(code, outputs=3, **names)


def _adam_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, *numbers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Make a step of Adam with plain operations, for runs that differ in betas or eps."""
    rate, bias, decay, beta1, rest1, beta2, rest2, eps = numbers
    g = g + p * decay
    m, v = beta1 * m + rest1 * g, beta2 * v + rest2 * g * g
    return p - rate * m / (v.sqrt() / bias + eps), m, v


def _adam_rates(settings: object, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the learning rate over the first bias correction, and the root of the second."""
    # Double precision only for powers of numbers near one.
    code = """template <typename T> void adam_rates(T steps, T& rate, T& bias) {
      rate = (T)(LR / (1 - ::pow((double)BETA1, (double)steps)));
      bias = (T)::sqrt(1 - ::pow((double)BETA2, (double)steps));
    }"""
    numbers = {name: float(getattr(settings, name)) for name in ("lr", "beta1", "beta2")}
    names = {name.upper(): f"({number!r})" for name, number in numbers.items()}
    found: tuple[Tensor, Tensor] = _compiled(code, outputs=2, **names)(steps)
    return found


def _grid(key: Tensor, rows: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return low halves of keys, high halves, rows and columns, all int32 and broadcastable."""
    halves = key.unsqueeze(-1).contiguous().view(torch.int32)[..., None, None, :]
    columns = torch.arange(width, dtype=torch.int32, device=key.device)
    return halves[..., 0], halves[..., 1], rows.to(torch.int32).unsqueeze(-1), columns


def _run(code: str, *args: Tensor, **names: str) -> Tensor:
    found: Tensor = _compiled(code, 1, **names)(*args)
    return found


def _compiled(code: str, outputs: int = 1, **names: str) -> Callable[..., Any]:
    """Replace each name in the code by its text, and compile it. Torch caches kernels by code."""
    for name, text in names.items():
        code = code.replace(name, text)
    make = torch.cuda.jiterator
    if outputs == 1:
        return make._create_jit_fn(code)
    return make._create_multi_output_jit_fn(code, num_outputs=outputs)
