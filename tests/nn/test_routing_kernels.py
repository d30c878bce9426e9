"""A GPU's routing kernels against torch's operations, in Triton's interpreter: no GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CODE = """
import torch
from atoll.core.graph import sparse_matrix
from atoll.engines.fused import stack_sparse
from atoll.nn import disengcn, routing_kernels

def adjacency(seed, nodes, entries):
    draw = torch.Generator().manual_seed(seed)
    row, column = torch.randint(nodes, (2, entries), generator=draw)
    place = (row * nodes + column)[row != column].unique()
    ones = torch.ones(len(place))
    return sparse_matrix(place // nodes, place % nodes, ones, (nodes, nodes), square=True)

# Clients of different sizes: padded nodes and edges must do nothing.
stacked = stack_sparse([adjacency(0, 7, 16), adjacency(1, 5, 4), adjacency(2, 3, 0)], 8)
names = ("offsets", "columns", "rows", "values", "t_offsets", "t_columns", "t_order")
matrix = [getattr(stacked, name).flatten() for name in names]
for factors, hidden, passes in ((3, 5, 2), (1, 8, 1)):
    draw = torch.Generator().manual_seed(factors)
    x, grad = torch.randn(2, 24, factors * hidden, generator=draw)
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


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_equal_the_operations_they_replace() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, timeout=120,
        env={**os.environ, "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.stdout == "equal\n", done.stderr
