"""Preparation of clients' graphs for an engine: with views, in the right type, on the device."""

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

READY_BYTES = 2 << 30  # most bytes of a federation's prepared graphs that are cached between runs


@dataclass(frozen=True)
class EngineInputs:
    """All inputs of an engine's factory."""

    federation: Federation
    views: Mapping[str, View]  # functions that compute matrices from a client's graph, by name
    device: torch.device | str = "cpu"
    chunk: int = 0  # most clients in one program of the fused engine; 0: automatic
    runs_per_device: int = 1  # how many runs share the device's memory, including this one
    batching: Batching = WHOLE  # how clients cut their training into steps
    clock: Clock = OFF

    def graphs(self) -> Sequence[Graph]:
        """Return the `prepared` graphs of all clients.

        They come from a cache if the federation's last run had equal inputs.
        """
        recipes = tuple((name, _recipe(self.views[name])) for name in sorted(self.views))
        options = self.runs_per_device, self.batching
        wanted = recipes, torch.device(self.device), torch.get_default_dtype(), *options
        how = *options, self.clock
        make = partial(prepared, self.federation.graphs, self.views, self.device, *how)
        try:
            found = _READY.get(self.federation, {}).get(wanted)
        except TypeError:  # a view with a list among its arguments is not hashable
            return make()
        if found is not None:
            return found
        _READY.pop(self.federation, None)  # keep only the last graphs of each federation
        graphs = make()
        if not isinstance(graphs, LazyGraphs) and num_bytes(list(graphs)) <= READY_BYTES:
            _READY[self.federation] = {wanted: graphs}
        return graphs


# By federation, so that prepared graphs are freed together with their federation.
_READY: WeakKeyDictionary[Federation, dict[Hashable, Sequence[Graph]]] = WeakKeyDictionary()


def ready_graphs(federation: Federation) -> Sequence[Graph]:
    """Return the cached prepared graphs of a federation, or an empty list if none are cached."""
    return [graph for graphs in _READY.get(federation, {}).values() for graph in graphs]


def forget_ready() -> None:
    """Clear the cache of prepared graphs. A run prepares them again on demand."""
    _READY.clear()


def prepared(
    graphs: Sequence[Graph],
    views: Mapping[str, View],
    device: torch.device | str = "cpu",
    runs_per_device: int = 1,
    batching: Batching = WHOLE,
    clock: Clock = OFF,
) -> Sequence[Graph]:
    """Return graphs with their views, in torch's default dtype, on the device (`EngineInputs`)."""
    if graphs[0].since is not None:  # steps get the training graphs, and scoring the later ones
        how = views, device, runs_per_device, batching, clock
        return staged(graphs, lambda some: prepared(some, *how))
    dtype = torch.get_default_dtype()

    def one(graph: Graph) -> Graph:
        # Make views on the device, because it determines which product is cached.
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
"""Most bytes of dense feature views on a GPU, and of dense adjacencies, of all runs together."""
DENSE_NODES = 640  # most nodes of the largest client if a GPU multiplies adjacencies densely


def with_dense_views(graphs: Sequence[Graph], runs_per_device: int = 1) -> tuple[Graph, ...]:
    """Store feature views densely, and adjacencies if all clients are small, if memory allows.

    Adjacencies, and features with few entries, also keep their sparse form, because narrow products
    with it are faster on a GPU (`nn.ops.matmul`). Wide products use the dense form.
    """
    views = [view for graph in graphs for view in graph.views.values()]
    sparse = [view for view in views if not isinstance(view, Tensor)]
    sizes = {True: 0, False: 0}  # entries of square matrices, and of features
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
    """Return a key that is equal for equal views: equal partial functions do not compare equal."""
    if not isinstance(view, partial):
        return view
    return view.func, view.args, tuple(sorted(view.keywords.items()))
