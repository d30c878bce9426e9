"""A federation: the clients' graphs and what everybody knows about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from atoll.core.errors import DataError
from atoll.core.graph import Graph, View, with_views


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Clients' graphs, in an order that carries no meaning.

    Attributes:
        graphs: One per client.
        classes: Number of classes, common knowledge.
        name: The data set's name, for tables.
        numbers: Each client's own number. Keyed noise follows it, so that listing the clients in
            another order changes nothing.
        metric: "accuracy" or "auc".
        about: How the federation was made (partition, split, hashes), for the record.
    """

    graphs: tuple[Graph, ...]
    classes: int
    name: str = "federation"
    numbers: tuple[int, ...] = ()
    metric: str = "accuracy"
    about: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not self.graphs:
            raise DataError("a federation needs at least one client, but none was given")
        if not self.numbers:
            object.__setattr__(self, "numbers", tuple(range(len(self.graphs))))
        if len({graph.num_features for graph in self.graphs}) > 1:
            widths = sorted({graph.num_features for graph in self.graphs})
            raise DataError(f"clients must have equally many features, but have {widths}")
        if len({graph.task for graph in self.graphs}) > 1:
            raise DataError("clients must all classify nodes or all classify graphs")

    def __len__(self) -> int:
        return len(self.graphs)

    def __repr__(self) -> str:
        sizes = [int(graph.size("nodes")) for graph in self.graphs]
        return (
            f"<Federation {self.name}: {len(sizes)} clients of {min(sizes)} to {max(sizes)} "
            f"{self.task}s, {self.features} features, {self.classes} classes>"
        )

    @property
    def features(self) -> int:
        return self.graphs[0].num_features

    @property
    def task(self) -> str:
        """What is classified: "node" or "graph"."""
        return self.graphs[0].task

    def prepared(self, views: Mapping[str, View]) -> Federation:
        """The federation with every client's views filled in."""
        return replace(self, graphs=tuple(with_views(graph, views) for graph in self.graphs))

    def reordered(self, order: Sequence[int]) -> Federation:
        """The same clients, listed in another order."""
        return replace(
            self,
            graphs=tuple(self.graphs[i] for i in order),
            numbers=tuple(self.numbers[i] for i in order),
        )
