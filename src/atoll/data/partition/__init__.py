"""How one graph, or one set of graphs, is divided among clients.

`divide` is the only entry: a pure function of (source, recipe, clients, seed, options). A recipe
draws from a generator of its own and leaves Python's, NumPy's and torch's global ones alone.
A recipe named after a public code reproduces it; a known fault of that code comes back only with
its named `compat` option.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import ConfigError, DataError, unknown
from atoll.data.partition.checks import check_seed, check_whole
from atoll.data.partition.label_mix import louvain_plus, metis_plus
from atoll.data.partition.louvain import louvain, louvain_fedgta, louvain_fedtad, louvain_openfgl
from atoll.data.partition.metis import metis, metis_overlap, metis_recursive
from atoll.data.partition.plain import column, random
from atoll.data.partition.skew import dirichlet, feature_skew, gcfl_oneds, topology_skew
from atoll.data.source import GraphSet, Source
from atoll.data.spec import Value, parse_recipe

Option = Value | None
Recipe = Callable[..., list[np.ndarray]]
"""(source, clients, seed, *, options) -> the ids of each client; keyword-only = its options."""

NODE_PARTITIONS: dict[str, Recipe] = {
    "louvain": louvain,
    "louvain-openfgl": louvain_openfgl,
    "louvain-fedtad": louvain_fedtad,
    "louvain-fedgta": louvain_fedgta,
    "louvain-plus": louvain_plus,
    "metis": metis,
    "metis-recursive": metis_recursive,
    "metis-overlap": metis_overlap,
    "metis-plus": metis_plus,
    "dirichlet": dirichlet,
    "random": random,
    "column": column,
}
"""Recipes that divide the nodes of one graph."""

GRAPH_PARTITIONS: dict[str, Recipe] = {
    "gcfl-oneds": gcfl_oneds,
    "feature-skew": feature_skew,
    "topology-skew": topology_skew,
    "dirichlet": dirichlet,
    "random": random,
}
"""Recipes that divide a set of graphs."""

PARTITIONS: dict[str, Recipe] = {**NODE_PARTITIONS, **GRAPH_PARTITIONS}


@dataclass(frozen=True, eq=False)
class Partition:
    """Which client owns what, and how that was decided.

    Attributes:
        recipe: As given to `divide`, for example "louvain" or "column:bank".
        clients: Number of clients, K.
        seed: The seed of the recipe's own generator.
        options: Every option of the recipe, defaults included.
        parts: Node ids (or graph ids) of each client, int64, in the order the recipe produces.
    """

    recipe: str
    clients: int
    seed: int
    options: Mapping[str, Option]
    parts: tuple[np.ndarray, ...]

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
    recipe: str,
    clients: int | None = None,
    seed: int = 0,
    **options: Option,
) -> Partition:
    """Divide the nodes of a graph, or the graphs of a set, among clients.

    Args:
        source: One graph or one set of graphs.
        recipe: A name of `PARTITIONS`, with options if need be ("dirichlet:alpha=0.5"), or
            "column:NAME" to follow a node column.
        clients: Number of clients; may be left out for "column:NAME" alone.
        seed: Seed of the recipe's own generator, 0 to 2**32 - 1.
        **options: The recipe's keyword-only arguments.

    Returns:
        The partition; no client is empty.
    """
    if recipe.startswith("column:"):
        name, options = "column", {**options, "name": recipe.partition(":")[2]}
    else:
        name, named = parse_recipe(recipe)
        options = {**named, **options}
    function = _recipe_for(source, name)
    settings = _with_defaults(name, function, options)
    check_seed(seed)
    if name != "column":
        _check_clients(source, recipe, clients)
    parts = tuple(
        np.ascontiguousarray(ids, dtype=np.int64)
        for ids in function(source, clients, int(seed), **settings)
    )
    settings.pop("name", None)  # already in the recipe's own text
    return Partition(recipe, len(parts), int(seed), settings, parts)


def _recipe_for(source: Source | GraphSet, name: str) -> Recipe:
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    is_set = isinstance(source, GraphSet)
    table = GRAPH_PARTITIONS if is_set else NODE_PARTITIONS
    if name not in table:
        divides = "one graph" if is_set else "sets of graphs"
        given = "a set of graphs" if is_set else "one graph"
        raise ConfigError(
            f"partition '{name}' divides {divides}, but '{source.name}' is {given}; "
            f"choose one of: {', '.join(sorted(table))}"
        )
    return table[name]


def _with_defaults(name: str, function: Recipe, given: Mapping[str, Option]) -> dict[str, Option]:
    """The options in full; a name that the recipe does not take is refused."""
    parameters = inspect.signature(function).parameters.values()
    allowed = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for option in given:
        if option not in allowed:
            if not allowed:
                raise ConfigError(f"partition '{name}' takes no options, but got '{option}'")
            raise unknown(f"option of partition '{name}'", option, allowed)
    return {**allowed, **given}


def _check_clients(source: Source | GraphSet, recipe: str, clients: int | None) -> None:
    check_whole(f"the number of clients for partition '{recipe}'", clients, 1)
    count = len(source.y)
    if clients is not None and clients > count:
        things = "graphs" if isinstance(source, GraphSet) else "nodes"
        raise DataError(
            f"data '{source.name}' has {count} {things}, too few for {clients} clients; "
            f"use at most {count} clients"
        )
