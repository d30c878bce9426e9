"""The verbs of the command line, for Python: `atoll.load`, `atoll.partition` and `atoll.save`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.data.archive import is_federation_file, load_federation, save_federation
from atoll.data.divide import federate
from atoll.data.divide_graphs import federate_graphs
from atoll.data.load import load as load_any
from atoll.data.source import GraphGroup, GraphSet, Source


def load(
    name: str, *, root: str | Path | None = None, **options: Any
) -> Source | GraphSet | GraphGroup | Federation:
    """One whole graph, a set of small graphs, or a group of such sets, by its name or path.

    A file that `save` or `atoll partition` wrote is a federation, divided already.

    Args:
        name: What to load; `atoll datasets` lists the names.
        root: Where data sets are looked for (default: the variable ATOLL_DATA).
        **options: clients and seed for the built-in data; schema for tables of your own; lazy for
            a federation that does not fit into memory.

    Examples:
        >>> import atoll
        >>> source = atoll.load("lagoon", clients=3)
        >>> source.num_nodes, source.classes
        (3000, 6)
    """
    if is_federation_file(name):
        return load_federation(name, **options)
    return load_any(name, root=root, **options)[0]


def partition(
    source: Source | GraphSet | GraphGroup | Federation,
    recipe: str | None = None,
    *,
    clients: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Federation:
    """Divide a graph, or a set of graphs, among clients, and what each has into roles.

    Args:
        source: What `load` gave.
        recipe: As `--partition` on the command line; "louvain" by default, "gcfl-oneds" for a set
            of graphs, and each client gets a set of a group.
        clients: How many, 5 by default; not for "column:NAME" and groups, which know.
        seed: Of the partition and the split.
        **options: split, ratios, allow and more, see `federate` and `federate_graphs` in
            `atoll.data`.

    Examples:
        >>> import atoll
        >>> source = atoll.load("lagoon")
        >>> len(atoll.partition(source, "louvain", clients=4))
        4
        >>> len(atoll.partition(source, "column:owner"))  # whoever owns the nodes
        5
    """
    if isinstance(source, Federation):
        raise ConfigError(f"'{source.name}' is a federation, divided already; use it as it is")
    undirected = source.undirected_simple()
    if isinstance(undirected, GraphGroup):
        count = clients
    else:
        count = None if (recipe or "").startswith("column:") else clients or 5
    if isinstance(undirected, Source):
        recipe = recipe or "louvain"
        return federate(undirected, clients=count, partition=recipe, seed=seed, **options)
    return federate_graphs(undirected, clients=count, partition=recipe, seed=seed, **options)


def save(federation: Federation, path: str | Path) -> Path:
    """Write a federation into one file, which `load`, and `--data` of every command, can read.

    Examples:
        >>> import atoll
        >>> path = atoll.save(atoll.partition(atoll.load("lagoon"), clients=2), "two.atoll")
        >>> len(atoll.load("two.atoll"))
        2
    """
    return save_federation(federation, path)
