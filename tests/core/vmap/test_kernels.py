"""The arguments of GPU kernels. tests/gpu compares their results with a CPU's results."""

from __future__ import annotations

import torch

from atoll.core.vmap.kernels import _grid


def test_keys_are_halved_and_broadcast_with_rows_and_columns() -> None:
    keys = torch.tensor([(7 << 32) + 5, -1])
    rows = torch.arange(6).reshape(2, 3)
    low, high, row, column = _grid(keys, rows, 4)
    assert low.flatten().tolist() == [5, -1]
    assert high.flatten().tolist() == [7, -1]
    assert (low ^ high ^ row ^ column).shape == (2, 3, 4)
    assert {part.dtype for part in (low, high, row, column)} == {torch.int32}
