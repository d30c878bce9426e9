"""Weighted convolutions on a GPU equal the operations that they replace, and so do gradients."""

from __future__ import annotations

from tests.nn.kernels import interpreted, needs_triton

CODE = """
import torch
from atoll.core.graph import make_graph
from atoll.engines.stacking import stack_sparse
from atoll.nn import edges
from atoll.nn.views import loop_adjacency

draw = torch.Generator().manual_seed(0)

def adjacency(nodes, count, hub=0):
    ends = torch.randint(nodes, (2, count), generator=draw)
    ends[1, :hub] = 0  # a node with more entries than are read at once
    weight = (torch.rand(count, generator=draw) > 0.2).float()  # an edge of weight zero is none
    graph = make_graph(torch.zeros(nodes, 1), ends, torch.zeros(nodes).long(), edge_weight=weight)
    return loop_adjacency(graph)

# Clients of different sizes: padded nodes and entries must do nothing.
parts = [adjacency(40, 300, 200), adjacency(6, 8), adjacency(3, 0)]
stacked = stack_sparse(parts, 41)
weight = torch.rand(stacked.values.shape, generator=draw).requires_grad_()
h = torch.randn(3, 41, 5, generator=draw).requires_grad_()
bias, by = torch.randn(3, 5, generator=draw), torch.randn(3, 41, 5, generator=draw)

def found():
    def one(matrix, w, x, b):
        return edges.weighted_gcn(matrix, w)(x, b)

    out = torch.func.vmap(one)(stacked, weight, h, bias)
    return out, *torch.autograd.grad((out * by).sum(), (weight, h))

plain = found()
edges.on_gpu = lambda x: True
for ours, wanted in zip(found(), plain, strict=True):
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
print("equal")
"""


@needs_triton
def test_kernels_equal_the_operations_they_replace() -> None:
    done = interpreted(CODE)
    assert done.stdout == "equal\n", done.stderr
