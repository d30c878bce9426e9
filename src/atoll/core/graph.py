"""One client's graph as a record of tensors, and the sparse matrices that networks multiply with.

A client that owns many small graphs holds them end to end as one graph without edges between them.
Label and role of a small graph stand on one of its nodes, its root; every other node is in no mask.
So losses, masks, padding and scores count graphs where they would count nodes.
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

    Multiply with `atoll.nn.ops`; do not read the index tensors. Stacked by the fused engine, or
    made under `vmap`, they number rows, columns and entries over *all* clients: a product under
    `vmap` is then one block-diagonal product without index arithmetic.
    """

    offsets: Tensor  # first entry of each row, (R,) int32
    columns: Tensor  # column of each entry, (E,) int32
    rows: Tensor  # row of each entry, (E,) int32
    values: Tensor  # value of each entry, (E,); zero where an entry is only padding
    t_offsets: Tensor  # the same of the transpose, (C,)
    t_columns: Tensor  # (E,)
    t_order: Tensor  # where each entry of the transpose stands in row order, (E,) int32
    t_values: Tensor  # (E,)
    square: bool = static(True)  # columns are nodes too (an adjacency), or else features
    dense: Tensor | None = None  # with its zeros, (R, C), where products with that are faster

    @property
    def shape(self) -> tuple[int, int]:
        return self.offsets.shape[-1], self.t_offsets.shape[-1]

    def to_dense(self) -> Tensor:
        """The matrix with all its zeros, (R, C)."""
        place = self.rows.long(), self.columns.long()
        return self.values.new_zeros(self.shape).index_put(place, self.values, accumulate=True)


@record
class Distinct:
    """A matrix (R, C) that has few different rows: `which` times `rows`."""

    rows: Tensor  # each row once, (U, C)
    which: Sparse  # a one in every row, at the number of its row, (R, U), not square

    @property
    def shape(self) -> tuple[int, int]:
        return self.which.shape[0], self.rows.shape[-1]

    def to_dense(self) -> Tensor:
        """The matrix with all its rows, (R, C)."""
        return self.rows[self.which.columns.long()]


Matrix = Tensor | Sparse | Distinct  # what a view may be


@record
class Graph:
    """What one client owns. N nodes, E directed edges, D features."""

    x: Tensor | Sparse  # features, (N, D)
    edges: Tensor  # directed, source -> target, (2, E) int64
    edge_weight: Tensor  # (E,); one where the data has no weights, zero for padding
    y: Tensor  # labels, (N,) int64; zero where unknown (no mask then selects the node)
    train: Tensor  # one for training nodes, else zero, (N,)
    val: Tensor
    test: Tensor
    real: Tensor  # one for nodes, zero for padding, (N,). Never a mean over nodes without it
    ids: Tensor  # numbers for keyed noise, (N,) int32, of the graph before it was divided
    views: dict[str, Matrix]  # what networks precompute; tensors have N rows, or `lists_nodes`
    # Of many small graphs: the node that stands for each node's graph, (N,) int64; edges are then
    # sorted by source. And these nodes, one for each of G graphs, (G,) int64.
    root: Tensor | None = None
    roots: Tensor | None = None
    # One for feature columns, (D,), and classes, (C,), that this client's data have, zero for those
    # that only other clients have. None where all clients have all.
    has_features: Tensor | None = None
    has_classes: Tensor | None = None
    # The loss: how much each class counts at this client, (C,), None if all count alike; and the
    # exponent of a focal loss, 0 for plain cross entropy.
    class_weights: Tensor | None = None
    focal: float = static(default=0.0)
    batching: Batching = static(default=WHOLE)  # how `fit` sees it; an engine attaches it
    held_out: Graph | None = None  # only validation and test graphs: scoring predicts no others
    training: Graph | None = None  # only the training graphs, for cheap mini-batches
    derived: Tree = None  # from `Method.derive`, where an engine has kept it
    # The first stage in which a node, (N,), or an edge, (E,), is there, int8 (`core.stages`), and,
    # in a graph that an engine trains on, the graph of the next stage. None: all are always there.
    since: Tensor | None = None
    edge_since: Tensor | None = None
    later: Graph | None = None
    task_name: str = static(default="")  # "" classifies graphs where there are roots, else nodes

    @property
    def num_nodes(self) -> int:
        return self.y.shape[-1]

    @property
    def num_features(self) -> int:
        return self.x.shape[-1]

    def size(self, by: str) -> Tensor:
        """The client's weight in an average: its "nodes" or "train" nodes (or graphs), or one."""
        check_name("weight", by, ("nodes", "train", "uniform"))
        total = (self.train if by == "train" else self.at_roots(self.real)).sum()
        return total * 0 + 1 if by == "uniform" else total

    def at_roots(self, values: Tensor) -> Tensor:
        """Rows, (N, ...), of what is classified: of the graphs' roots (G, ...), or of all nodes."""
        return values if self.roots is None else pick(values, self.roots)

    def from_roots(self, rows: Tensor) -> Tensor:
        """What `at_roots` reads: rows of what is classified among rows for all nodes, (N, ...)."""
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
        """What is predicted."""
        if self.task_name:
            return TASKS[self.task_name]
        return NODES if self.root is None else GRAPHS


PER_NODE = ("y", "train", "val", "test", "real", "ids")
"""Fields of a graph with an entry for each node, beside `x` and `root`."""
View = Callable[[Graph], Matrix | None]
"""A pure function of a graph, evaluated once per client before training; None leaves it out."""


def lists_nodes(view: Matrix) -> bool:
    """Whether a view is a list of node numbers, (L,) int64; one number per node is (N, 1)."""
    return isinstance(view, Tensor) and view.dtype == torch.int64 and view.dim() == 1


def with_views(graph: Graph, views: Mapping[str, View]) -> Graph:
    """The graph with the named views filled in; a view finds those before it in the graph."""
    made: dict[str, Matrix] = {}
    for name, view in views.items():
        found = view(replace(graph, views=made))
        made = made if found is None else {**made, name: found}
    return replace(graph, views=made)


def sparse_matrix(
    rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int], *, square: bool
) -> Sparse:
    """Build a `Sparse` from its entries, in any order; entries at one place stay separate."""
    order = torch.argsort(rows.long() * shape[1] + columns, stable=True)  # by row, then column
    rows, columns, values = (pick(one, order) for one in (rows, columns, values))
    t_order = torch.argsort(columns, stable=True)
    offsets, t_offsets = _starts(rows, shape[0]), _starts(pick(columns, t_order), shape[1])
    index = (columns, rows, pick(rows, t_order), t_order)
    columns, rows, t_columns, t_order = (numbers.to(torch.int32) for numbers in index)
    t_values = pick(values, t_order)
    if inside_transform():
        # Under `vmap` it is numbered over all clients' matrices, and stacked whole, all of its
        # tensors or none: what one of them has an axis for gets every other as well.
        entries, (height, width) = values.shape[0], shape
        steps = (entries, width, height, entries, height, entries)
        numbers = (offsets, columns, rows, t_offsets, t_columns, t_order)
        numbers = call(_Blocks, steps, values.detach(), *numbers)
        offsets, columns, rows, t_offsets, t_columns, t_order = numbers
        spread = torch.zeros_like(columns, dtype=values.dtype)
        values, t_values = values + spread, t_values + spread
    return Sparse(offsets, columns, rows, values, t_offsets, t_columns, t_order, t_values, square)


class _Blocks(Constant):
    """Index tensors of a matrix; `steps` lie between the numbers of one block and the next."""

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
    """`values[rows]`, which costs a CPU five times as much."""
    return values.index_select(0, rows)


def sum_at(places: Tensor, values: Tensor, size: int) -> Tensor:
    """The sum of the values, (E, ...), at each place, (size, ...), always in the same order."""
    none = values.new_zeros(size, *values.shape[1:])
    if values.is_cuda:  # `index_add` adds there in the order in which threads arrive
        return none.index_put((places,), values, accumulate=True)
    return none.index_add(0, places, values)


def runs(starts: Tensor, counts: Tensor, total: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Runs of numbers one after another; where each run begins, and the run of each number.

    A GPU waits for how many there are, unless `total` says it.
    """
    before = counts.cumsum(0) - counts
    numbers = torch.arange(len(counts), device=counts.device)
    run = numbers.repeat_interleave(counts, output_size=total)
    number = torch.arange(len(run), device=counts.device)
    return number + pick(starts - before, run), before, run


def _starts(groups: Tensor, size: int) -> Tensor:
    """First position of each group among sorted group numbers."""
    # Not by counting them: `bincount` makes a GPU wait for the largest number. Under `vmap` each
    # stack of groups wants numbers of its own, one after another in memory.
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
    """A graph with the usual defaults; a node without a label (-1) must be in no mask."""
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


SMALL = 1 << 18  # most numbers of a tensor that travels with others
ALIGNED = 64  # numbers that fill a line of a cache, whatever their type


def moved(tree: Tree, device: torch.device | str) -> Tree:
    """The tree on `device`. Small tensors travel together, because each copy to a GPU waits."""
    found = {id(leaf): leaf for leaf in leaves(tree)}
    small: dict[torch.dtype, list[Tensor]] = {}
    for leaf in found.values():
        if leaf.numel() <= SMALL:
            small.setdefault(leaf.dtype, []).append(leaf)
    there: dict[int, Tensor] = {}
    for some in small.values():
        # Each begins where a GPU reads fast: after a multiple of so many numbers.
        parts = [functional.pad(leaf.flatten(), (0, -leaf.numel() % ALIGNED)) for leaf in some]
        packed = torch.split(torch.cat(parts).to(device), [len(part) for part in parts])
        for leaf, part in zip(some, packed, strict=True):
            there[id(leaf)] = part[: leaf.numel()].view(leaf.shape)
    return tree_map(lambda leaf: there[id(leaf)] if id(leaf) in there else leaf.to(device), tree)


def cast(tree: Tree, *, dtype: torch.dtype, device: torch.device | str) -> Tree:
    """The tree with its floating-point tensors in `dtype`, everything on `device`."""
    return tree_map(lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), tree)
