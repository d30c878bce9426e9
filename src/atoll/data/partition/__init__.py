"""How one graph, or one set of graphs, is divided among clients.

A recipe draws from a separate generator and leaves the global ones alone. One that is named after
a public code reproduces it; a known fault of that code comes back only with its `compat` option.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import ConfigError, DataError, check_name, unknown
from atoll.data.partition import communities, plain
from atoll.data.source import GraphSet, Source
from atoll.data.spec import Value, check_seed, check_whole, options_of, parse_recipe

Recipe = Callable[..., list[np.ndarray]]
"""(source, clients, seed, *, options) -> the ids of each client; keyword-only = its options."""


def _named(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.__name__.replace("_", "-"): recipe for recipe in recipes}


_ANY = (plain.dirichlet, plain.random)
NODE_PARTITIONS = _named(*communities.LOUVAIN, *communities.METIS, *_ANY, plain.column)
"""Recipes that divide the nodes of one graph."""
GRAPH_PARTITIONS = _named(plain.gcfl_oneds, plain.feature_skew, plain.topology_skew, *_ANY)
"""Recipes that divide a set of graphs."""
PARTITIONS = {**NODE_PARTITIONS, **GRAPH_PARTITIONS}


@dataclass(frozen=True, eq=False)
class Partition:
    """Which client owns what."""

    recipe: str  # as given to `divide`, for example "louvain" or "column:bank"
    parts: tuple[np.ndarray, ...]  # ids of each client, int64, in the order the recipe produces

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many nodes (or graphs) each client owns."""
        return tuple(len(ids) for ids in self.parts)

    @property
    def sha1(self) -> str:
        """Twelve hex digits that name the assignment, whatever the order inside a client."""
        text = ";".join(",".join(map(str, np.sort(ids).tolist())) for ids in self.parts)
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12]


def divide(
    source: Source | GraphSet,
    recipe: str,  # in `PARTITIONS`, also with options ("dirichlet:alpha=0.5"), or "column:NAME"
    clients: int | None = None,  # only "column:NAME" may leave it out
    seed: int = 0,  # of the recipe's own generator, below 2**32
    **options: Value | None,
) -> Partition:
    """Divide the nodes of a graph, or the graphs of a set, among clients; none is empty."""
    if recipe.startswith("column:"):
        name, options = "column", {**options, "name": recipe.partition(":")[2]}
    else:
        name, named = parse_recipe(recipe)
        options = {**named, **options}
    check_name("partition", name, PARTITIONS)
    is_set = isinstance(source, GraphSet)
    table = GRAPH_PARTITIONS if is_set else NODE_PARTITIONS
    if name not in table:
        divides = "one graph" if is_set else "sets of graphs"
        given = "a set of graphs" if is_set else "one graph"
        raise ConfigError(
            f"partition '{name}' divides {divides}, but '{source.name}' is {given}; "
            f"choose one of: {', '.join(sorted(table))}"
        )
    allowed, count = options_of(table[name]), len(source.y)
    for option in options:
        if option not in allowed:
            if not allowed:
                raise ConfigError(f"partition '{name}' takes no options, but got '{option}'")
            raise unknown(f"option of partition '{name}'", option, allowed)
    check_seed(seed)
    if name != "column":
        check_whole(f"the number of clients for partition '{recipe}'", clients, 1)
    if name != "column" and clients is not None and clients > count:
        raise DataError(
            f"data '{source.name}' has {count} {'graphs' if is_set else 'nodes'}, too few for "
            f"{clients} clients; use at most {count} clients"
        )
    found = table[name](source, clients, int(seed), **options)
    return Partition(recipe, tuple(np.ascontiguousarray(ids, dtype=np.int64) for ids in found))
