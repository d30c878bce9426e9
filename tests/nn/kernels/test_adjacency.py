"""The adjacency of a small graph on a GPU equals the one that torch's operations make."""

from __future__ import annotations

from tests.nn.kernels import interpreted, needs_triton

CODE = """
import torch
from atoll.core.graph import make_graph
from atoll.core.tree import leaves
from atoll.nn import views
from atoll.nn.kernels import adjacency

# More entries than a program takes at once; no edge at all; a node that negative weights cut off.
for nodes, count in ((40, 300), (3, 0), (5, 20)):
    draw = torch.Generator().manual_seed(nodes)
    edges = torch.randint(nodes, (2, count), generator=draw)
    weight = torch.randint(-1 if nodes == 5 else 0, 3, (count,), generator=draw).float()
    graph = make_graph(torch.zeros(nodes, 1), edges, torch.zeros(nodes).long(), edge_weight=weight)
    if count:  # self-loops, some of weight zero
        assert (edges[0] == edges[1]).any()
    plain = views.gcn_adjacency(graph)
    ours = adjacency.gcn(graph.edges, graph.edge_weight, nodes)
    assert len(leaves(ours)) == 8
    for found, wanted in zip(leaves(ours), leaves(plain), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
print("equal")
"""


@needs_triton
def test_the_kernel_equals_the_operations_it_replaces() -> None:
    done = interpreted(CODE)
    assert done.stdout == "equal\n", done.stderr
