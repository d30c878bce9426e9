"""One client's graph as a record of tensors, and the sparse matrices that networks multiply with.

A client that owns many small graphs stores them as one graph with disjoint parts. The root, one
node of each part, carries the label and the role of its small graph; no other node is in a mask.
Losses, masks, padding and scores therefore count graphs in the same way as nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.batching import WHOLE, Batching
from atoll.core.errors import check_name
from atoll.core.task import GRAPHS, NODES, TASKS, Task
from atoll.core.tree import Tree, inside_transform, leaves, record, static, tree_map
from atoll.core.vmap.stacks import Constant, Dims, Vmap, call


@record
class Sparse:
    """A sparse matrix (R, C) in row order, together with its transpose.

    Multiply with `atoll.nn.ops`; do not read the index tensors. If a matrix is stacked over
    clients, the indices of client k start after those of client k - 1. A product under `vmap` is
    therefore one block-diagonal product and needs no index arithmetic.
    """

    offsets: Tensor  # first entry of each row, (R,) int32
    columns: Tensor  # column of each entry, (E,) int32
    rows: Tensor  # row of each entry, (E,) int32
    values: Tensor  # value of each entry, (E,); zero for padding
    t_offsets: Tensor  # the same for the transpose, (C,)
    t_columns: Tensor  # (E,)
    t_order: Tensor  # position in row order of each entry of the transpose, (E,) int32
    t_values: Tensor  # (E,)
    square: bool = static(True)  # columns are nodes (an adjacency); otherwise they are features
    dense: Tensor | None = None  # as a dense matrix (R, C), if products with it are faster

    @property
    def shape(self) -> tuple[int, int]:
        return self.offsets.shape[-1], self.t_offsets.shape[-1]

    def to_dense(self) -> Tensor:
        """The matrix as a dense tensor, (R, C)."""
        place = self.rows.long(), self.columns.long()
        return self.values.new_zeros(self.shape).index_put(place, self.values, accumulate=True)


@record
class Distinct:
    """A matrix (R, C) with few different rows: the product of `which` and `rows`."""

    rows: Tensor  # each different row once, (U, C)
    which: Sparse  # a one per row, in the column of its entry in `rows`, (R, U), not square

    @property
    def shape(self) -> tuple[int, int]:
        return self.which.shape[0], self.rows.shape[-1]

    def to_dense(self) -> Tensor:
        """The matrix as a dense tensor, (R, C)."""
        return self.rows[self.which.columns.long()]


Matrix = Tensor | Sparse | Distinct  # the type of a view


@record
class Graph:
    """The data of one client: N nodes, E directed edges, D features."""

    x: Tensor | Sparse  # features, (N, D)
    edges: Tensor  # directed, source -> target, (2, E) int64
    edge_weight: Tensor  # (E,); one if the data have no weights, zero for padding
    y: Tensor  # labels, (N,) int64; zero if unknown (then no mask selects the node)
    train: Tensor  # one for training nodes, else zero, (N,)
    val: Tensor
    test: Tensor
    real: Tensor  # one for nodes, zero for padding, (N,). Every mean over nodes must use it
    ids: Tensor  # node numbers before the partition, (N,) int32; keyed noise depends on them
    views: dict[str, Matrix]  # matrices that networks precompute: N rows, or `lists_nodes`
    # Only for many small graphs: the root of each node's graph, (N,) int64, and the roots of all G
    # graphs, (G,) int64. Edges are then sorted by source.
    root: Tensor | None = None
    roots: Tensor | None = None
    # One for feature columns, (D,), and classes, (C,), that this client's data contain. Zero for
    # those that only other clients have. None if every client has all of them.
    has_features: Tensor | None = None
    has_classes: Tensor | None = None
    # The loss: the weight of each class at this client, (C,), or None for equal weights, and the
    # exponent of a focal loss (0 is cross entropy).
    class_weights: Tensor | None = None
    focal: float = static(default=0.0)
    batching: Batching = static(default=WHOLE)  # the batches of `fit`; an engine attaches it
    # Only for many small graphs, and attached by an engine: the validation and test graphs, for
    # scoring, and the training graphs, for training.
    held_out: Graph | None = None
    training: Graph | None = None
    derived: Tree = None  # the result of `Method.derive`, if an engine has cached it
    # The first stage in which a node, (N,), or an edge, (E,), exists, int8 (`core.stages`). None if
    # all exist from the start. `later` is the graph of the next stage, if an engine trains on it.
    since: Tensor | None = None
    edge_since: Tensor | None = None
    later: Graph | None = None
    task_name: str = static(default="")  # "": graphs if the graph has roots, else nodes

    @property
    def num_nodes(self) -> int:
        return self.y.shape[-1]

    @property
    def num_features(self) -> int:
        return self.x.shape[-1]

    def size(self, by: str) -> Tensor:
        """Return the client's weight in a mean.

        It is the number of nodes or graphs ("nodes"), of training ones ("train") or 1 ("uniform").
        """
        check_name("weight", by, ("nodes", "train", "uniform"))
        total = (self.train if by == "train" else self.at_roots(self.real)).sum()
        return total * 0 + 1 if by == "uniform" else total

    def at_roots(self, values: Tensor) -> Tensor:
        """Select the rows of classified items: roots (G, ...) if there are any, else all nodes."""
        return values if self.roots is None else pick(values, self.roots)

    def from_roots(self, rows: Tensor) -> Tensor:
        """Invert `at_roots`: place rows of classified items in a tensor for all nodes (N, ...)."""
        if self.roots is None:
            return rows
        everywhere = self.real.unsqueeze(-1) * rows.new_zeros(rows.shape[-1])
        return everywhere.index_copy(0, self.roots, rows)

    def tensor_view(self, name: str) -> Tensor:
        view = self.views[name]
        assert isinstance(view, Tensor)
        return view

    def sparse_view(self, name: str) -> Sparse:
        view = self.views[name]
        assert isinstance(view, Sparse)
        return view

    @property
    def task(self) -> Task:
        """The prediction task."""
        if self.task_name:
            return TASKS[self.task_name]
        return NODES if self.root is None else GRAPHS


PER_NODE = ("y", "train", "val", "test", "real", "ids")
"""Fields of a graph with one entry per node, in addition to `x` and `root`."""
View = Callable[[Graph], Matrix | None]
"""A pure function of a graph. It runs once per client before training; None adds no view."""


def lists_nodes(view: Matrix) -> bool:
    """Whether a view lists node numbers, (L,) int64. A view with a number per node is (N, 1)."""
    return isinstance(view, Tensor) and view.dtype == torch.int64 and view.dim() == 1


def with_views(graph: Graph, views: Mapping[str, View]) -> Graph:
    """Compute the named views of a graph. Each view can read the views before it."""
    made: dict[str, Matrix] = {}
    for name, view in views.items():
        found = view(replace(graph, views=made))
        made = made if found is None else {**made, name: found}
    return replace(graph, views=made)


def sparse_matrix(
    rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int], *, square: bool
) -> Sparse:
    """Build a `Sparse` from entries in any order. Duplicate entries stay separate."""
    order = torch.argsort(rows.long() * shape[1] + columns, stable=True)  # by row, then column
    rows, columns, values = (pick(one, order) for one in (rows, columns, values))
    t_order = torch.argsort(columns, stable=True)
    offsets, t_offsets = _starts(rows, shape[0]), _starts(pick(columns, t_order), shape[1])
    index = (columns, rows, pick(rows, t_order), t_order)
    columns, rows, t_columns, t_order = (numbers.to(torch.int32) for numbers in index)
    t_values = pick(values, t_order)
    if inside_transform():
        # Under `vmap`, indices count over the matrices of all clients. Either all tensors of a
        # matrix are stacked or none, so an axis of one tensor is added to all others.
        entries, (height, width) = values.shape[0], shape
        steps = (entries, width, height, entries, height, entries)
        numbers = (offsets, columns, rows, t_offsets, t_columns, t_order)
        numbers = call(_Blocks, steps, values.detach(), *numbers)
        offsets, columns, rows, t_offsets, t_columns, t_order = numbers
        spread = torch.zeros_like(columns, dtype=values.dtype)
        values, t_values = values + spread, t_values + spread
    return Sparse(offsets, columns, rows, values, t_offsets, t_columns, t_order, t_values, square)


class _Blocks(Constant):
    """Index tensors of a matrix. `vmap` shifts each by its step from one client to the next."""

    @staticmethod
    def forward(steps: tuple[int, ...], values: Tensor, *index: Tensor) -> tuple[Tensor, ...]:
        return tuple(numbers.clone() for numbers in index)

    @staticmethod
    def vmap(
        info: Vmap, in_dims: Dims, steps: tuple[int, ...], values: Tensor, *index: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        block = torch.arange(size, dtype=torch.int32, device=values.device)

        def stacked(numbers: Tensor, axis: int | None, step: int) -> Tensor:
            own = numbers.unsqueeze(0) if axis is None else numbers.movedim(axis, 0)
            return own + step * block.reshape(-1, *[1] * (own.dim() - 1))

        many = [stacked(*one) for one in zip(index, in_dims[2:], steps, strict=True)]
        outer = tuple(size * step for step in steps)
        around: tuple[Tensor, ...] = call(_Blocks, outer, values, *many)
        return around, (0,) * len(around)


def pick(values: Tensor, rows: Tensor) -> Tensor:
    """Return `values[rows]`. On a CPU, `index_select` is five times faster than indexing."""
    return values.index_select(0, rows)


def sum_at(places: Tensor, values: Tensor, size: int) -> Tensor:
    """Sum the values (E, ...) that share a place, in a fixed order. The result is (size, ...)."""
    none = values.new_zeros(size, *values.shape[1:])
    if values.is_cuda:  # there `index_add` adds in the order in which threads arrive
        return none.index_put((places,), values, accumulate=True)
    return none.index_add(0, places, values)


def runs(starts: Tensor, counts: Tensor, total: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenate ranges of numbers, given their first numbers and lengths.

    Return the numbers, the position at which each range begins, and the range of each number.
    A GPU waits for the total length, unless `total` gives it.
    """
    before = counts.cumsum(0) - counts
    numbers = torch.arange(len(counts), device=counts.device)
    run = numbers.repeat_interleave(counts, output_size=total)
    number = torch.arange(len(run), device=counts.device)
    return number + pick(starts - before, run), before, run


def _starts(groups: Tensor, size: int) -> Tensor:
    """Return the first position of each group among sorted group numbers."""
    # Not `bincount`, because it makes a GPU wait for the largest number. Under `vmap` each stack of
    # groups needs its own contiguous numbers.
    numbers = groups.new_zeros(size) + torch.arange(size, device=groups.device)
    return torch.searchsorted(groups, numbers, out_int32=True)


def make_graph(
    x: Tensor | Sparse,
    edges: Tensor,
    y: Tensor,
    train: Tensor | None = None,
    val: Tensor | None = None,
    test: Tensor | None = None,
    *,
    edge_weight: Tensor | None = None,
    views: Mapping[str, View] | None = None,
    ids: Tensor | None = None,
    root: Tensor | None = None,
    has_features: Tensor | None = None,
    has_classes: Tensor | None = None,
) -> Graph:
    """Make a graph with empty masks, edge weights of one and ids 0, 1, ... by default.

    A node without a label (-1) must be in no mask.
    """
    like = x.values if isinstance(x, Sparse) else x
    size, dtype = y.shape[0], like.dtype
    if root is not None:
        order = torch.argsort(edges[0], stable=True)
        edges = edges[:, order]
        edge_weight = None if edge_weight is None else edge_weight[order]
    none = torch.zeros(size, dtype=dtype, device=like.device)
    ones = torch.ones(edges.shape[1], dtype=dtype, device=like.device)
    graph = Graph(
        x=x,
        edges=edges,
        edge_weight=ones if edge_weight is None else edge_weight.to(dtype),
        y=y.clamp(min=0),
        train=none if train is None else train.to(dtype),
        val=none if val is None else val.to(dtype),
        test=none if test is None else test.to(dtype),
        real=none + 1,
        ids=torch.arange(size, dtype=torch.int32, device=like.device) if ids is None else ids,
        views={},
        root=root,
        roots=None if root is None else torch.unique(root),
        has_features=None if has_features is None else has_features.to(dtype),
        has_classes=None if has_classes is None else has_classes.to(dtype),
    )
    return graph if views is None else with_views(graph, views)


SMALL = 1 << 18  # largest tensor (in numbers) that is copied together with others
ALIGNED = 64  # numbers that fill a cache line, for every dtype


def moved(tree: Tree, device: torch.device | str) -> Tree:
    """Copy a tree to `device`. Small tensors share a copy, because each copy to a GPU waits."""
    found = {id(leaf): leaf for leaf in leaves(tree)}
    small: dict[torch.dtype, list[Tensor]] = {}
    for leaf in found.values():
        if leaf.numel() <= SMALL:
            small.setdefault(leaf.dtype, []).append(leaf)
    there: dict[int, Tensor] = {}
    for some in small.values():
        # Each tensor begins at a multiple of `ALIGNED` numbers, where a GPU reads fast.
        parts = [functional.pad(leaf.flatten(), (0, -leaf.numel() % ALIGNED)) for leaf in some]
        packed = torch.split(torch.cat(parts).to(device), [len(part) for part in parts])
        for leaf, part in zip(some, packed, strict=True):
            there[id(leaf)] = part[: leaf.numel()].view(leaf.shape)
    return tree_map(lambda leaf: there[id(leaf)] if id(leaf) in there else leaf.to(device), tree)


def cast(tree: Tree, *, dtype: torch.dtype, device: torch.device | str) -> Tree:
    """Convert the floating-point tensors of a tree to `dtype`, and move all to `device`."""
    return tree_map(lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), tree)
