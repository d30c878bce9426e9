"""What networks precompute from a graph, once per client: adjacencies, and adjacency times features.

Each function is a `View`: a pure function of a `Graph`. Networks name the views that they read.
Adjacencies have the target of an edge as the row, so that `matmul(adjacency, h)` gathers messages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.graph import Graph, Sparse, sparse_matrix

DENSE_ABOVE = 0.1
"""Share of non-zero entries above which a dense product is faster (measured: docs/adr/0005)."""


def plain_adjacency(graph: Graph) -> Sparse:
    """A: the weighted edges as they are."""
    source, target = graph.edges
    size = graph.num_nodes
    return sparse_matrix(target, source, graph.edge_weight, (size, size), square=True)


def loop_adjacency(graph: Graph) -> Sparse:
    """A + I: the edges without self-loops, and one self-loop of weight one per node."""
    source, target, weight = _with_loops(graph)
    size = graph.num_nodes
    return sparse_matrix(target, source, weight, (size, size), square=True)


def gcn_adjacency(graph: Graph) -> Sparse:
    """D^-1/2 (A + I) D^-1/2 with D the degrees of A + I (Kipf and Welling, 2017)."""
    source, target, weight = _with_loops(graph)
    size = graph.num_nodes
    degree = torch.zeros(size, dtype=weight.dtype, device=weight.device).index_add(0, target, weight)
    scale = degree.clamp(min=1e-12).rsqrt()
    return sparse_matrix(
        target, source, scale[target] * weight * scale[source], (size, size), square=True
    )


def mean_adjacency(graph: Graph) -> Sparse:
    """D^-1 A: the mean over neighbours; a zero row for a node without any (GraphSAGE)."""
    source, target = graph.edges
    size = graph.num_nodes
    ones = (graph.edge_weight != 0).to(graph.edge_weight.dtype)
    degree = torch.zeros_like(graph.real).index_add(0, target, ones)
    return sparse_matrix(
        target, source, ones / degree.clamp(min=1)[target], (size, size), square=True
    )


def features(graph: Graph) -> Tensor | Sparse:
    """X, dense or sparse, whichever multiplies faster."""
    return _fastest(graph.x)


def gcn_features(graph: Graph) -> Tensor | Sparse:
    """Â X: exact to cache for a first GCN layer, because nothing is dropped from its input."""
    return product(gcn_adjacency(graph), graph.x)


def mean_features(graph: Graph) -> Tensor | Sparse:
    """D^-1 A X, for a first GraphSAGE layer."""
    return product(mean_adjacency(graph), graph.x)


def product(adjacency: Sparse, x: Tensor | Sparse) -> Tensor | Sparse:
    """A X, sparse if both are and the result is worth it."""
    left = _coo(adjacency)
    if isinstance(x, Tensor):
        return _fastest(torch.sparse.mm(left, x))
    out = torch.sparse.mm(left, _coo(x)).coalesce()
    rows, columns = out.indices()
    shape = (adjacency.shape[0], x.shape[1])
    return _fastest(sparse_matrix(rows, columns, out.values(), shape, square=False))


def sparse_features(x: Tensor) -> Sparse:
    """A dense feature matrix as `Sparse`."""
    rows, columns = x.nonzero(as_tuple=True)
    shape = (x.shape[0], x.shape[1])
    return sparse_matrix(rows, columns, x[rows, columns], shape, square=False)


def _with_loops(graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
    source, target = graph.edges
    others = source != target
    nodes = torch.arange(graph.num_nodes, device=source.device)
    return (
        torch.cat([source[others], nodes]),
        torch.cat([target[others], nodes]),
        torch.cat([graph.edge_weight[others], torch.ones_like(graph.real)]),
    )


def _coo(matrix: Sparse) -> Tensor:
    index = torch.stack([matrix.rows.long(), matrix.columns.long()])
    return torch.sparse_coo_tensor(
        index, matrix.values, matrix.shape, check_invariants=False
    ).coalesce()


def _fastest(x: Tensor | Sparse) -> Tensor | Sparse:
    entries = x.numel() if isinstance(x, Tensor) else x.shape[0] * x.shape[1]
    if isinstance(x, Sparse):
        return x if x.values.numel() <= DENSE_ABOVE * entries else x.to_dense()
    if int(torch.count_nonzero(x)) <= DENSE_ABOVE * entries and entries:
        return sparse_features(x)
    return x
