"""A federation: the clients' graphs, and the facts that all parties know about them.

`atoll.data` creates federations, engines train on them, and results record `about`. Graphs may be
lazy (`LazyGraphs`) if they do not fit into memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, overload

from atoll.core.batching import WHOLE, Batching
from atoll.core.errors import DataError, check_name, counted
from atoll.core.graph import Graph, View, with_views
from atoll.core.losses import with_loss
from atoll.core.task import Task


class LazyGraphs(Sequence[Graph]):
    """A sequence that creates a graph at each access and keeps none, to save memory."""

    def __init__(self, size: int, make: Callable[[int], Graph]) -> None:
        self.size, self.make = size, make

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Graph: ...
    @overload
    def __getitem__(self, index: slice) -> LazyGraphs: ...
    def __getitem__(self, index: int | slice) -> Graph | LazyGraphs:
        chosen = range(self.size)[index]
        if isinstance(chosen, range):
            return LazyGraphs(len(chosen), lambda i: self.make(chosen[i]))
        return self.make(chosen)


def each(change: Callable[[Graph], Graph], graphs: Sequence[Graph]) -> Sequence[Graph]:
    """Apply `change` to every graph: immediately, or at each access for `LazyGraphs`."""
    if isinstance(graphs, LazyGraphs):
        return LazyGraphs(len(graphs), lambda i: change(graphs[i]))
    return tuple(change(graph) for graph in graphs)


def known_names(about: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """Return the names of the clients ("client") or classes ("class"), or () if unknown."""
    sites = about.get("sites", ()) if kind == "client" else ()  # a real federation names its sites
    return tuple(map(str, about.get(f"{kind}_names", sites)))


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The clients' graphs. Their order has no meaning.

    Examples:
        >>> import atoll
        >>> federation = atoll.partition(atoll.load("lagoon"), "random", clients=3)
        >>> len(federation), federation.task.name, federation.classes
        (3, 'node', 6)
        >>> [graph.num_features for graph in federation.graphs]
        [600, 600, 600]
    """

    graphs: Sequence[Graph]  # one per client; a tuple, or `LazyGraphs`
    classes: int  # the number of classes, which all parties know
    name: str = "federation"  # of the data set, for tables
    numbers: tuple[int, ...] = ()  # the clients' permanent numbers; noise depends on these
    metric: str = "accuracy"  # one of the task's metrics
    batching: Batching = WHOLE  # the default; an experiment may choose another one
    # How the federation was created (partition, split, hashes). Results record it.
    about: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # How the columns of a user's tables became features (`data.own.encoder`), as plain values.
    encoder: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.graphs:
            raise DataError("a federation needs at least one client, but none was given")
        if not self.numbers:
            object.__setattr__(self, "numbers", tuple(range(len(self.graphs))))
        if isinstance(self.graphs, LazyGraphs):
            return  # they were checked when they were written
        widths = sorted({graph.num_features for graph in self.graphs})
        if len(widths) > 1:
            raise DataError(f"clients must have equally many features, but have {widths}")
        check_name("metric", self.metric, self.task.metrics)
        if len({graph.task for graph in self.graphs}) > 1:
            raise DataError("all clients must have one task: all classify nodes, or all graphs")

    def __len__(self) -> int:
        return len(self.graphs)

    def __repr__(self) -> str:
        sizes = [int(graph.size("nodes")) for graph in self.graphs]
        clients = f"{counted(len(sizes), 'client')} of {min(sizes)} to {max(sizes)}"
        shape = f"{counted(self.features, 'feature')}, {counted(self.classes, 'class')}"
        return f"<Federation {self.name}: {clients} {self.task.plural}, {shape}>"

    @property
    def features(self) -> int:
        return self.graphs[0].num_features

    @property
    def task(self) -> Task:
        """The prediction task of all clients."""
        return self.graphs[0].task

    @property
    def client_names(self) -> tuple[str, ...]:
        """The clients' names, or their numbers if the data contain no names."""
        known = known_names(self.about, "client")
        return tuple(known[n] if n < len(known) else str(n) for n in self.numbers)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' names, or their numbers if the data contain no names."""
        return known_names(self.about, "class") or tuple(map(str, range(self.classes)))

    def with_loss(self, weights: str | None, loss: str | None) -> Federation:
        """Let all clients train with class weights, another loss, or both (`core.losses`)."""
        if weights is None and loss is None:
            return self
        change = partial(with_loss, classes=self.classes, weights=weights, loss=loss)
        return replace(self, graphs=each(change, self.graphs))

    def prepared(self, views: Mapping[str, View]) -> Federation:
        """Return the federation with the given views of every client's graph."""
        return replace(self, graphs=each(lambda graph: with_views(graph, views), self.graphs))

    def reordered(self, order: Sequence[int]) -> Federation:
        """Return the same clients in another order."""
        chosen: Sequence[Graph] = LazyGraphs(len(order), lambda i: self.graphs[order[i]])
        chosen = chosen if isinstance(self.graphs, LazyGraphs) else tuple(chosen)
        return replace(self, graphs=chosen, numbers=tuple(self.numbers[i] for i in order))
