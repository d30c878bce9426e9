"""Clients' graphs as an engine's steps want them: views filled in, typed, on the device."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from atoll.core.batching import WHOLE, Batching
from atoll.core.clock import OFF, Clock
from atoll.core.federation import Federation, LazyGraphs, each
from atoll.core.graph import Graph, Matrix, Sparse, View, cast, moved, with_views
from atoll.core.minibatch import with_batching
from atoll.core.stages import staged
from atoll.core.tree import num_bytes
from atoll.nn.views import is_sparse

READY_BYTES = 2 << 30  # most bytes of graphs that stay prepared while no run trains on them


@dataclass(frozen=True)
class EngineInputs:
    """All that an engine is made from."""

    federation: Federation
    views: Mapping[str, View]  # what each client precomputes of its graph
    device: torch.device | str = "cpu"
    chunk: int = 0  # most clients in one program of the fused engine; 0 chooses
    runs_per_device: int = 1  # how many runs share the device's memory, this one included
    batching: Batching = WHOLE  # how clients cut their training into steps
    clock: Clock = OFF

    def graphs(self) -> Sequence[Graph]:
        """The `prepared` graphs of all clients; runs with equal inputs share them."""
        recipes = tuple((name, _recipe(self.views[name])) for name in sorted(self.views))
        options = self.runs_per_device, self.batching
        wanted = recipes, torch.device(self.device), torch.get_default_dtype(), *options
        how = *options, self.clock
        make = partial(prepared, self.federation.graphs, self.views, self.device, *how)
        try:
            found = _READY.get(self.federation, {}).get(wanted)
        except TypeError:  # a view that is made with a list cannot be looked up
            return make()
        if found is not None:
            return found
        _READY.pop(self.federation, None)  # of each federation, only the last graphs are kept
        graphs = make()
        if not isinstance(graphs, LazyGraphs) and num_bytes(list(graphs)) <= READY_BYTES:
            _READY[self.federation] = {wanted: graphs}
        return graphs


# By federation, so that prepared graphs go when their federation does.
_READY: WeakKeyDictionary[Federation, dict[Hashable, Sequence[Graph]]] = WeakKeyDictionary()


def ready_graphs(federation: Federation) -> Sequence[Graph]:
    """The graphs of a federation that stay prepared; none before its first run."""
    return [graph for graphs in _READY.get(federation, {}).values() for graph in graphs]


def forget_ready() -> None:
    """Keep no graphs prepared; a run that needs some prepares them again."""
    _READY.clear()


def prepared(
    graphs: Sequence[Graph],
    views: Mapping[str, View],
    device: torch.device | str = "cpu",
    runs_per_device: int = 1,
    batching: Batching = WHOLE,
    clock: Clock = OFF,
) -> Sequence[Graph]:
    """Graphs with their views filled in, in the default type, on the device (`EngineInputs`)."""
    if graphs[0].since is not None:  # steps get the graphs of training, and scoring the later ones
        how = views, device, runs_per_device, batching, clock
        return staged(graphs, lambda some: prepared(some, *how))
    dtype = torch.get_default_dtype()

    def one(graph: Graph) -> Graph:
        # Views are made where they are used: which product is cached depends on the device.
        there = cast(graph, dtype=graph.real.dtype, device=device)
        ready: Graph = cast(with_views(there, views), dtype=dtype, device=device)
        return ready

    cuda = torch.device(device).type == "cuda"
    if cuda and not isinstance(graphs, LazyGraphs):
        with clock.stage("transfer"):
            graphs = moved(tuple(graphs), device)
    placed = each(one, graphs)
    if cuda:
        placed = with_dense_views(placed, runs_per_device)
    return each(lambda graph: with_batching(graph, batching), placed)


DENSE_BYTES = 16 << 30
"""Most bytes of matrices, of all runs at once, that are stored with their zeros on a GPU."""
DENSE_NODES = 640  # most nodes of a client whose adjacency is multiplied with its zeros on a GPU


def with_dense_views(graphs: Sequence[Graph], runs_per_device: int = 1) -> tuple[Graph, ...]:
    """Feature views, and adjacencies of small clients, with all their zeros, where memory allows.

    Those with few entries stay sparse as well, because narrow products with them are then faster
    (`nn.ops.matmul`); wide ones read the zeros.
    """
    views = [view for graph in graphs for view in graph.views.values()]
    sparse = [view for view in views if not isinstance(view, Tensor)]
    sizes = {True: 0, False: 0}  # numbers of square matrices, and of features
    for view in sparse:
        sizes[isinstance(view, Sparse) and view.square] += math.prod(view.shape)
    most = DENSE_BYTES // (runs_per_device * graphs[0].real.element_size())
    found: dict[str, list[Sparse]] = {}
    for graph in graphs:
        for name, part in graph.views.items():
            if isinstance(part, Sparse):
                found.setdefault(name, []).append(part)
    few = {name for name, parts in found.items() if is_sparse(parts)}
    small = max(graph.num_nodes for graph in graphs) <= DENSE_NODES and sizes[True] <= most

    def dense(name: str, view: Matrix) -> Matrix:
        if isinstance(view, Sparse) and view.square:
            return replace(view, dense=view.to_dense()) if small else view
        if isinstance(view, Tensor) or sizes[False] > most:
            return view
        if isinstance(view, Sparse) and name in few:
            return replace(view, dense=view.to_dense())
        return view.to_dense()

    def one(graph: Graph) -> Graph:
        return replace(graph, views={name: dense(name, view) for name, view in graph.views.items()})

    return tuple(one(graph) for graph in graphs)


def _recipe(view: View) -> Hashable:
    """Equal for equal views: partial functions made alike do not compare as equal."""
    if not isinstance(view, partial):
        return view
    return view.func, view.args, tuple(sorted(view.keywords.items()))
