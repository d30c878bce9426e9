"""A GPU's kernels against torch's operations, in Triton's interpreter: no GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

ROUTING = """
import torch
from atoll.core.graph import sparse_matrix
from atoll.engines.stacking import stack_sparse
from atoll.nn import disengcn
from atoll.nn.kernels import routing as routing_kernels

def adjacency(seed, nodes, entries):
    draw = torch.Generator().manual_seed(seed)
    row, column = torch.randint(nodes, (2, entries), generator=draw)
    place = (row * nodes + column)[row != column].unique()
    ones = torch.ones(len(place))
    return sparse_matrix(place // nodes, place % nodes, ones, (nodes, nodes), square=True)

# Clients of different sizes: padded nodes and edges must do nothing.
stacked = stack_sparse([adjacency(0, 9, 30), adjacency(1, 6, 8), adjacency(2, 4, 0)], 11)
names = ("offsets", "columns", "rows", "values", "t_offsets", "t_columns", "t_order")
matrix = [getattr(stacked, name).flatten() for name in names]
for factors, hidden, passes in ((3, 5, 4), (1, 8, 1), (2, 4, 2)):
    draw = torch.Generator().manual_seed(factors)
    x, grad = torch.randn(2, 33, factors * hidden, generator=draw)
    x[3] = 0  # a row without a direction
    plain, shares = disengcn._Route.forward(factors, passes, x, *matrix)
    slope = disengcn._RouteBack.forward(factors, shares, grad, x, *matrix)
    disengcn._kernels = lambda x: routing_kernels
    ours, kept = disengcn._Route.forward(factors, passes, x, *matrix)
    by_x = disengcn._RouteBack.forward(factors, kept, grad, x, *matrix)
    disengcn._kernels = lambda x: None
    for one, other in ((ours, plain), (kept, shares), (by_x, slope)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
print("equal")
"""


SPARSE = """
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


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("code", [ROUTING, SPARSE], ids=["routing", "sparse"])
def test_kernels_equal_the_operations_they_replace(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.stdout == "equal\n", done.stderr
