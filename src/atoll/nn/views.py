"""Matrices that networks precompute once per client: adjacencies, and their products with x.

Each function is a `View`: a pure function of a `Graph`. Networks name the views that they read.
The row of an adjacency is the target of an edge, so `matmul(adjacency, h)` gathers messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.graph import Distinct, Graph, Matrix, Sparse, View, runs, sparse_matrix, sum_at
from atoll.core.kernels import on_gpu
from atoll.core.tree import inside_transform
from atoll.nn.ops import matmul

DENSE_ABOVE = 0.1
"""Share of non-zero entries above which a dense product is faster (measured: docs/adr/0005)."""
_DENSE_IS_FASTER = 0.1  # time per entry of a dense product, relative to a sparse product
_DISTINCT = 0.7  # entries of a sparse product A X per term, because terms share places
MAX_TERMS = 1 << 22
"""Terms of a sparse product in memory at once, about 80 bytes each. A row is never split."""
SPARSE_BELOW = 0.04
"""Share of non-zero entries below which a sparse product with few columns is faster on a GPU."""
REPEATED = 4  # mean number of copies of a row from which distinct rows are stored once
MAX_COMPARED = 1 << 26  # most numbers of a matrix whose rows are compared with each other

Adjacency = Callable[[Graph], Sparse]


def plain_adjacency(graph: Graph) -> Sparse:
    """Return A: the weighted edges, unchanged."""
    return _square(graph, graph.edges, graph.edge_weight)


def loop_adjacency(graph: Graph) -> Sparse:
    """Return A + I: the edges without self-loops, and a self-loop of weight one per node."""
    return _square(graph, *_with_loops(graph, torch.ones_like(graph.real)))


def sum_adjacency(graph: Graph) -> Sparse:
    """Return A + I for GIN. A self-loop of the data stays in A, so its node counts itself twice."""
    weight = torch.cat([graph.edge_weight, torch.ones_like(graph.real)])
    return _square(graph, _with_loops(graph, graph.real)[0], weight)


def gcn_adjacency(graph: Graph) -> Sparse:
    """Return D^-1/2 (A + I) D^-1/2 with D the degrees of A + I (Kipf and Welling, 2017).

    As in PyG (`add_remaining_self_loops`), a self-loop of the data replaces the added self-loop and
    keeps its weight. If a node has several, the last one counts. An edge of weight zero is
    padding, so such a self-loop is ignored; PyG would keep the zero.
    """
    if on_gpu(graph.edge_weight) and not inside_transform():
        from atoll.nn.kernels import adjacency

        if graph.edges.shape[1] + graph.num_nodes <= adjacency.FEW:
            return adjacency.gcn(graph.edges, graph.edge_weight, graph.num_nodes)
    return _normalised(graph, *_with_loops(graph, _own_loops(graph)))


def gcn_degrees(graph: Graph) -> Tensor:
    """Return D of `gcn_adjacency`: the sum of the weights of A + I that end at each node, (N,)."""
    edges, weight = _with_loops(graph, _own_loops(graph))
    return sum_at(edges[1], weight, graph.num_nodes)


def bare_adjacency(graph: Graph) -> Sparse:
    """Return D^-1/2 A D^-1/2, without added self-loops. Nodes without edges have zero rows."""
    return _normalised(graph, graph.edges, graph.edge_weight)


def degrees(graph: Graph) -> Tensor:
    """Return the number of edges that end at each node, without self-loops, (N,)."""
    source, target = graph.edges
    ones = ((source != target) & (graph.edge_weight != 0)).to(graph.real.dtype)
    return torch.zeros_like(graph.real).index_add(0, target, ones)


def mean_adjacency(graph: Graph) -> Sparse:
    """Return D^-1 A, the unweighted mean over neighbours. Nodes without edges have zero rows."""
    target = graph.edges[1]
    ones = (graph.edge_weight != 0).to(graph.edge_weight.dtype)
    degree = torch.zeros_like(graph.real).index_add(0, target, ones)
    return _square(graph, graph.edges, ones / degree.clamp(min=1)[target])


def features(graph: Graph) -> Tensor | Sparse:
    """Return X, dense or sparse, in the form that multiplies faster."""
    return _fastest(graph.x)


def first_layer(name: str, adjacency: Adjacency) -> dict[str, View]:
    """Return the views of a first layer: the adjacency `name`, and either `name_x` or `x`.

    `name_x` is the adjacency's product with X. It replaces X where it multiplies faster.
    """
    cached, product_view = f"{name}_x", partial(product_features, name, adjacency)
    return {name: adjacency, cached: product_view, "x": partial(features_unless, cached)}


def first_product(graph: Graph, name: str, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return A X W + b of a first layer, (N, H), with the views of `first_layer`."""
    cached = graph.views.get(f"{name}_x")
    if cached is not None:
        return matmul(cached, weight, bias)
    return matmul(graph.views[name], matmul(graph.views["x"], weight), bias)


def product_features(name: str, view: Adjacency, graph: Graph) -> Tensor | Sparse | None:
    """Return A X, or None if it has so many entries that A (X W) is faster.

    A X replaces X in a first layer exactly, because there is no dropout on the input. A X has more
    entries, because a node gets its neighbours' features: 157,000 on Cora, A and X together 60,000.
    """
    adjacency, x = _made(graph, name, view), graph.x
    if isinstance(x, Tensor):
        return product(adjacency, x)
    if x.values.is_cuda:  # decide by the density only, which clients of one federation share
        return None if is_sparse([x]) else product(adjacency, x)
    terms = int(row_lengths(x)[adjacency.columns.long()].sum())
    dense = _DENSE_IS_FASTER * adjacency.shape[0] * x.shape[1]
    apart = x.values.shape[0] + adjacency.values.shape[0]
    return product(adjacency, x) if min(_DISTINCT * terms, dense) <= apart else None


def features_unless(name: str, graph: Graph) -> Tensor | Sparse | None:
    """Return X, or None if the view `name` exists, which replaces it."""
    return None if name in graph.views else features(graph)


def sum_features_and_ones(graph: Graph) -> Matrix:
    """Return (A + I) [X 1], for a linear layer with a bias before GIN's sum.

    If features are types of nodes, there are few different rows (NCI1: 243 of 122,747), because
    many atoms have the same type and the same types of neighbours.
    """
    x, nodes = graph.x, torch.arange(graph.num_nodes, device=graph.y.device)
    if isinstance(x, Tensor):
        x1: Tensor | Sparse = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    else:
        size, width = x.shape
        rows = torch.cat([x.rows.long(), nodes])
        columns = torch.cat([x.columns.long(), torch.full_like(nodes, width)])
        values = torch.cat([x.values, x.values.new_ones(size)])
        x1 = sparse_matrix(rows, columns, values, (size, width + 1), square=False)
    return _distinct(product(_made(graph, "sum", sum_adjacency), x1))


def training_nodes(graph: Graph) -> Tensor:
    """Return the numbers of the training nodes, so that work on their pairs skips other nodes."""
    return graph.train.nonzero().squeeze(1)


def pool(graph: Graph, mean: bool) -> Sparse:
    """Return a matrix that sums or averages the rows of each small graph at its root."""
    if graph.root is None:
        raise ConfigError("a network that classifies graphs needs clients with many graphs each")
    nodes, ones = torch.arange(graph.num_nodes, device=graph.y.device), torch.ones_like(graph.real)
    size = torch.zeros_like(graph.real).index_add(0, graph.root, ones)
    return _square(graph, torch.stack([nodes, graph.root]), 1 / size[graph.root] if mean else ones)


def hop_features(graph: Graph, hops: int) -> Tensor | Sparse:
    """Return Â^hops X, the only input of SGC."""
    adjacency, x = gcn_adjacency(graph), features(graph)
    for _ in range(hops):
        x = product(adjacency, x)
    return x


def product(adjacency: Sparse, x: Tensor | Sparse) -> Tensor | Sparse:
    """Return A X, dense or sparse, in the form that multiplies faster."""
    if isinstance(x, Tensor):
        return _fastest(matmul(adjacency, x))
    return _fastest(_sparse_product(adjacency, x))


def sparse_features(x: Tensor) -> Sparse:
    """Convert a dense feature matrix to `Sparse`."""
    (rows, columns), (height, width) = x.nonzero(as_tuple=True), x.shape
    return sparse_matrix(rows, columns, x[rows, columns], (height, width), square=False)


def _made(graph: Graph, name: str, view: Adjacency) -> Sparse:
    """Return the graph's view of this name, or else compute it."""
    found = graph.views.get(name)
    return found if isinstance(found, Sparse) else view(graph)


def _square(graph: Graph, edges: Tensor, weight: Tensor) -> Sparse:
    source, target = edges
    return sparse_matrix(target, source, weight, (graph.num_nodes, graph.num_nodes), square=True)


def _normalised(graph: Graph, edges: Tensor, weight: Tensor) -> Sparse:
    """Return D^-1/2 A D^-1/2 for these edges. D is the sum of weights that end at each node."""
    source, target = edges
    degree = sum_at(target, weight, graph.num_nodes)
    # Negative weights can cancel. The row of such a node is then zero instead of infinite.
    scale = torch.where(degree > 0, degree, torch.inf).rsqrt()
    return _square(graph, edges, scale[target] * weight * scale[source])


def _with_loops(graph: Graph, loops: Tensor) -> tuple[Tensor, Tensor]:
    """Return edges and weights, followed by self-loops with weights `loops`, (N,)."""
    source, target = graph.edges
    nodes = torch.arange(graph.num_nodes, device=source.device)
    # Self-loops of the data stay with weight zero. Removing them would wait for their number.
    others = torch.where(source != target, graph.edge_weight, 0)
    return torch.cat([graph.edges, nodes.expand(2, -1)], dim=1), torch.cat([others, loops])


def _own_loops(graph: Graph) -> Tensor:
    """Return the weight of each node's last self-loop, or one without a self-loop, (N,)."""
    source, target = graph.edges
    loops = (source == target) & (graph.edge_weight != 0)
    place = torch.where(loops, torch.arange(len(source), device=source.device), -1)
    last = torch.full_like(graph.y, -1).scatter_reduce(0, source, place, "amax")
    # Without a self-loop, -1 reads the one at the end.
    return torch.cat([graph.edge_weight, graph.edge_weight.new_ones(1)])[last]


def row_lengths(x: Sparse) -> Tensor:
    """Return the number of entries of each row, (R,)."""
    starts = x.offsets.long()
    return torch.diff(starts, append=starts.new_tensor([x.values.shape[0]]))


def _sparse_product(a: Sparse, x: Sparse) -> Sparse:
    """Return A X of two sparse matrices. Entries that cancel stay, as zeros.

    This is own code, because torch warns that its compressed matrices are a beta. Entry (i, j) of
    A adds row j of X to row i. Write out all terms, whole rows at a time, then sum equal places.
    """
    width = x.shape[1]
    a_rows, a_columns, x_columns = a.rows.long(), a.columns.long(), x.columns.long()
    starts, counts = x.offsets.long()[a_columns], row_lengths(x)[a_columns]
    before = counts.cumsum(0) - counts
    block = before[a.offsets.long()[a_rows]] // MAX_TERMS
    ends = torch.unique_consecutive(block, return_counts=True)[1].cumsum(0)
    places, sums = [a_rows[:0]], [a.values[:0]]
    for first, end in pairwise([0, *ends.tolist()]):
        term, _, entry = runs(starts[first:end], counts[first:end])
        entry = entry + first
        place, where = torch.unique(a_rows[entry] * width + x_columns[term], return_inverse=True)
        places.append(place)
        sums.append(sum_at(where, a.values[entry] * x.values[term], place.shape[0]))
    place, shape = torch.cat(places), (a.shape[0], width)
    return sparse_matrix(place // width, place % width, torch.cat(sums), shape, square=False)


def _distinct(x: Tensor | Sparse) -> Matrix:
    """Store the different rows of a matrix once, if they are few."""
    if x.shape[0] * x.shape[1] > MAX_COMPARED:
        return x
    whole = x.to_dense() if isinstance(x, Sparse) else x
    rows, which = torch.unique(whole, dim=0, return_inverse=True)
    if len(rows) * REPEATED > len(which):
        return x
    number, shape = torch.arange(len(which), device=which.device), (len(which), len(rows))
    ones = torch.ones_like(number, dtype=rows.dtype)
    return Distinct(rows, sparse_matrix(number, which, ones, shape, square=False))


def is_sparse(parts: Sequence[Sparse]) -> bool:
    """Whether a GPU multiplies these matrices of several clients faster as sparse matrices."""
    entries = sum(part.values.shape[0] for part in parts)
    return entries <= SPARSE_BELOW * sum(part.shape[0] * part.shape[1] for part in parts)


def _fastest(x: Tensor | Sparse) -> Tensor | Sparse:
    entries = x.numel() if isinstance(x, Tensor) else x.shape[0] * x.shape[1]
    if isinstance(x, Sparse):
        return x if x.values.numel() <= DENSE_ABOVE * entries else x.to_dense()
    if x.is_cuda:
        return x  # a dense product is fast there, and counting would wait for the GPU
    few = entries and int(torch.count_nonzero(x)) <= DENSE_ABOVE * entries
    return sparse_features(x) if few else x
