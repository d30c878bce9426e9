"""Sparse products on a GPU equal the operations that they replace."""

from __future__ import annotations

from tests.nn.kernels import interpreted, needs_triton

CODE = """
import torch
from torch.nn import functional
from atoll.nn.kernels import sparse as sparse_kernels

draw = torch.Generator().manual_seed(0)
# The last is more columns than a program takes; the second has a bag longer than it looks ahead.
for rows, nodes, entries, columns in ((7, 9, 30, 5), (3, 40, 1500, 3), (5, 8, 24, 130)):
    lengths = torch.randint(0, 2 * entries // rows, (rows,), generator=draw)
    starts = (lengths.cumsum(0) - lengths).clamp(max=entries).int()
    index, other = torch.randint(nodes, (2, entries), generator=draw, dtype=torch.int32)
    x, y = torch.randn(2, nodes, columns, generator=draw)
    weight = torch.randn(entries, generator=draw)
    weight[entries // 2 :] = 0  # padding
    for given in (weight, None):
        plain = functional.embedding_bag(index, x, starts, mode="sum", per_sample_weights=given)
        ours = sparse_kernels.bags(x, index, starts, given)
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-4)
    dots = (x[index.long()] * y[other.long()]).sum(-1)
    ours = sparse_kernels.entry_dots(x, y, index, other)
    torch.testing.assert_close(ours, dots, rtol=1e-5, atol=1e-4)
print("equal")
"""


@needs_triton
def test_kernels_equal_the_operations_they_replace() -> None:
    done = interpreted(CODE)
    assert done.stdout == "equal\n", done.stderr
