"""Routing on a GPU equals the operations that it replaces."""

from __future__ import annotations

from tests.nn.kernels import interpreted, needs_triton

CODE = """
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
for factors, hidden, passes in ((3, 5, 4), (1, 8, 1)):
    routing_kernels.FEW = 8 * factors - 20  # some nodes, or all, have more entries
    draw = torch.Generator().manual_seed(factors)
    x, grad = torch.randn(2, 33, factors * hidden, generator=draw)
    x[3] = 0  # a row without a direction
    plain, shares = disengcn._Route.forward(factors, passes, x, *matrix)
    slope = disengcn._RouteBack.forward(shares, grad, x, *matrix)
    disengcn._kernels = lambda x: routing_kernels
    ours, kept = disengcn._Route.forward(factors, passes, x, *matrix)
    by_x = disengcn._RouteBack.forward(kept, grad, x, *matrix)
    disengcn._kernels = lambda x: None
    for one, other in ((ours, plain), (kept, shares), (by_x, slope)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
print("equal")
"""


@needs_triton
def test_kernels_equal_the_operations_they_replace() -> None:
    done = interpreted(CODE)
    assert done.stdout == "equal\n", done.stderr
