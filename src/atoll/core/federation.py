"""A federation: the clients' graphs and what everybody knows about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, overload

from atoll.core.batching import WHOLE, Batching
from atoll.core.errors import DataError, check_name
from atoll.core.graph import Graph, View, with_views
from atoll.core.losses import with_loss
from atoll.core.task import Task


class LazyGraphs(Sequence[Graph]):
    """Graphs that are made when they are read, and not kept: more than memory holds."""

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
    """Every graph changed: now, or, where graphs are made lazily, whenever one is made."""
    if isinstance(graphs, LazyGraphs):
        return LazyGraphs(len(graphs), lambda i: change(graphs[i]))
    return tuple(change(graph) for graph in graphs)


def known_names(about: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """Names of "client" or "class" in the record of a federation, by number; empty if unknown."""
    sites = about.get("sites", ()) if kind == "client" else ()  # of a real federation
    return tuple(map(str, about.get(f"{kind}_names", sites)))


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Clients' graphs, in an order that carries no meaning.

    Examples:
        >>> import atoll
        >>> federation = atoll.partition(atoll.load("lagoon"), "random", clients=3)
        >>> len(federation), federation.task.name, federation.classes
        (3, 'node', 6)
        >>> [graph.num_features for graph in federation.graphs]
        [600, 600, 600]
    """

    graphs: Sequence[Graph]  # one per client; a tuple, or `LazyGraphs`
    classes: int  # how many there are, common knowledge
    name: str = "federation"  # of the data set, for tables
    numbers: tuple[int, ...] = ()  # the clients' own: noise follows them, and not the order
    metric: str = "accuracy"  # or "auc"
    batching: Batching = WHOLE  # how clients cut training into steps, unless an experiment chooses
    # How the federation was made (partition, split, hashes), for the record.
    about: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # How the columns of a user's own tables became features (`data.own.encoder`), as plain values.
    encoder: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.graphs:
            raise DataError("a federation needs at least one client, but none was given")
        if not self.numbers:
            object.__setattr__(self, "numbers", tuple(range(len(self.graphs))))
        if isinstance(self.graphs, LazyGraphs):
            return  # checked when they were written
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
        return (
            f"<Federation {self.name}: {len(sizes)} clients of {min(sizes)} to {max(sizes)} "
            f"{self.task.plural}, {self.features} features, {self.classes} classes>"
        )

    @property
    def features(self) -> int:
        return self.graphs[0].num_features

    @property
    def task(self) -> Task:
        """What is predicted."""
        return self.graphs[0].task

    @property
    def client_names(self) -> tuple[str, ...]:
        """The clients' names, or their numbers where the data name none."""
        known = known_names(self.about, "client")
        return tuple(known[n] if n < len(known) else str(n) for n in self.numbers)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' names, or their numbers."""
        return known_names(self.about, "class") or tuple(map(str, range(self.classes)))

    def with_loss(self, weights: str | None, loss: str | None) -> Federation:
        """The federation whose clients train with class weights or another loss (`core.losses`)."""
        if weights is None and loss is None:
            return self
        change = partial(with_loss, classes=self.classes, weights=weights, loss=loss)
        return replace(self, graphs=each(change, self.graphs))

    def prepared(self, views: Mapping[str, View]) -> Federation:
        """The federation with every client's views filled in."""
        return replace(self, graphs=each(lambda graph: with_views(graph, views), self.graphs))

    def reordered(self, order: Sequence[int]) -> Federation:
        """The same clients, listed in another order."""
        chosen: Sequence[Graph] = LazyGraphs(len(order), lambda i: self.graphs[order[i]])
        chosen = chosen if isinstance(self.graphs, LazyGraphs) else tuple(chosen)
        return replace(self, graphs=chosen, numbers=tuple(self.numbers[i] for i in order))
