"""Sparse products on a GPU equal the operations that they replace."""

from __future__ import annotations

from tests.nn.kernels import interpreted, needs_triton

CODE = """
import torch
from torch.nn import functional
from atoll.nn.kernels import sparse as sparse_kernels

draw = torch.Generator().manual_seed(0)
# The second has a bag longer than a program looks ahead, the third more columns than it takes.
cases = ((7, 9, 30, 5), (3, 40, 1500, 3), (5, 8, 24, 130), (60, 9, 300, 64))
for rows, nodes, entries, columns in cases:
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
    # Blocks that share x, each with a bias.
    far = index + nodes * torch.randint(3, (entries,), generator=draw, dtype=torch.int32)
    bias = torch.randn(1 if rows < 8 else 6, columns, generator=draw)
    plain = functional.embedding_bag(index, x, starts, mode="sum", per_sample_weights=weight)
    plain = (plain.reshape(len(bias), -1, columns) + bias[:, None]).view_as(plain)
    ours = sparse_kernels.bags(x, far, starts, weight, bias, shared=True)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-4)
    dots = (x[index.long()] * y[other.long()]).sum(-1)
    ours = sparse_kernels.entry_dots(x, y, index, other)
    torch.testing.assert_close(ours, dots, rtol=1e-5, atol=1e-4)
x = torch.randn(3, 300, 20, generator=draw)
torch.testing.assert_close(sparse_kernels.column_sums(x), x.sum(1), rtol=1e-5, atol=1e-4)
print("equal")
"""


@needs_triton
def test_kernels_equal_the_operations_they_replace() -> None:
    done = interpreted(CODE)
    assert done.stdout == "equal\n", done.stderr
