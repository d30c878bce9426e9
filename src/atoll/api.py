"""The verbs of the command line, for Python: `atoll.load` and `atoll.partition`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.core.federation import Federation
from atoll.data.federate import federate
from atoll.data.load import load as load_any
from atoll.data.load import one_graph
from atoll.data.source import GraphSet, Source


def load(name: str, *, root: str | Path | None = None, **options: Any) -> Source | GraphSet:
    """One whole graph (or a set of small graphs): "lagoon", a data set's name, or a path.

    Args:
        name: What to load; `atoll datasets` lists the names.
        root: Where data sets are looked for (default: the variable ATOLL_DATA).
        **options: clients and seed for the built-in lagoon; schema for tables of your own.
    """
    return load_any(name, root=root, **options)[0]


def partition(
    source: Source | GraphSet,
    recipe: str = "louvain",
    *,
    clients: int | None = 5,
    seed: int = 0,
    **options: Any,
) -> Federation:
    """Divide a graph among clients, and each client's nodes into training, validation and test.

    Args:
        source: The whole graph, from `load`.
        recipe: As `--partition` on the command line.
        clients: How many; not needed for "column:NAME".
        seed: Of the partition and the split.
        **options: split, ratios, allow and more, see `atoll.data.federate.federate`.
    """
    count = None if recipe.startswith("column:") else clients
    graph = one_graph(source).undirected_simple()
    return federate(graph, clients=count, partition=recipe, seed=seed, **options)
