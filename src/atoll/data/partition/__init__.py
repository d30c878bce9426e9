"""Partition of one graph, or of one set of graphs, among clients.

A recipe draws from its own generator and does not touch the global ones. A recipe with the name of
a public code reproduces that code, but its known faults only with the option `compat`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import ConfigError, DataError, check_name, unknown
from atoll.data import spec
from atoll.data.partition import communities
from atoll.data.partition.communities import Parts, members
from atoll.data.source import GraphSet, Source

Recipe = Callable[..., Parts]
"""(source, clients, seed, *, options) -> the ids of each client."""
TRIES = 100  # draws of `dirichlet` before it gives up, as in OpenFGL
NUMBERS = (float, np.floating, np.datetime64)  # types that may be NaN
CHUNK = 50  # graphs that GCFL gives each client in file order before it draws


@dataclass(frozen=True, eq=False)
class Partition:
    """The ids that each client owns."""

    recipe: str  # as given to `divide`, for example "louvain" or "column:bank"
    parts: tuple[np.ndarray, ...]  # ids of each client, int64, in the order the recipe produces

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of nodes (or graphs) of each client."""
        return tuple(len(ids) for ids in self.parts)

    @property
    def sha1(self) -> str:
        """Twelve hex digits that identify the assignment, independent of the order in a client."""
        text = ";".join(",".join(map(str, np.sort(ids).tolist())) for ids in self.parts)
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12]


def divide(
    source: Source | GraphSet,
    recipe: str,  # in `PARTITIONS`, also with options ("dirichlet:alpha=0.5"), or "column:NAME"
    clients: int | None = None,  # only "column:NAME" may omit it
    seed: int = 0,  # of the recipe's own generator, below 2**32
    **options: spec.Value | None,
) -> Partition:
    """Partition the nodes of a graph, or the graphs of a set, among non-empty clients."""
    if recipe.startswith("column:"):
        name, options = "column", {**options, "name": recipe.partition(":")[2]}
    else:
        name, named = spec.parse_recipe(recipe)
        options = {**named, **options}
    check_name("partition", name, PARTITIONS)
    is_set = isinstance(source, GraphSet)
    table = GRAPH_PARTITIONS if is_set else NODE_PARTITIONS
    if name not in table:
        divides = "one graph" if is_set else "sets of graphs"
        given = "a set of graphs" if is_set else "one graph"
        problem = f"partition '{name}' divides {divides}, but '{source.name}' is {given}"
        raise ConfigError(f"{problem}; choose one of: {', '.join(sorted(table))}")
    allowed, count = spec.options_of(table[name]), len(source.y)
    for option in options:
        if option not in allowed:
            if not allowed:
                raise ConfigError(f"partition '{name}' takes no options, but got '{option}'")
            raise unknown(f"option of partition '{name}'", option, allowed)
    spec.check_seed(seed)
    if name != "column":
        spec.check_whole(f"the number of clients for partition '{recipe}'", clients, 1)
    if name != "column" and clients is not None and clients > count:
        has = f"{count} {'graphs' if is_set else 'nodes'}, too few for {clients} clients"
        raise DataError(f"data '{source.name}' has {has}; use at most {count} clients")
    found = table[name](source, clients, int(seed), **options)
    return Partition(recipe, tuple(np.ascontiguousarray(ids, dtype=np.int64) for ids in found))


def random(source: Source | GraphSet, clients: int, seed: int) -> Parts:
    """Distribute nodes (or graphs) uniformly at random. Clients' sizes differ by at most one."""
    order = np.random.default_rng(seed).permutation(len(source.y))
    return [np.sort(ids) for ids in np.array_split(order, clients)]


def column(source: Source, clients: int | None, seed: int, *, name: str | None = None) -> Parts:
    """Make one client for each value of a node column, ascending. The seed has no effect."""
    if not name or name not in source.columns:
        problem = f"partition 'column:{name or 'NAME'}' needs a node column of '{source.name}'"
        listed = ", ".join(sorted(source.columns)) or "none"
        raise ConfigError(f"{problem}; its columns are: {listed}")
    about = f"column '{name}' of '{source.name}' has"
    values = np.asarray(source.columns[name])
    absent = [v is None or (isinstance(v, NUMBERS) and bool(np.isnan(v))) for v in values]
    missing = np.flatnonzero(absent)
    if missing.size:
        problem = f"no value at node {int(missing[0])} ({missing.size} in all)"
        raise DataError(f"{about} {problem}; fill it, every node needs a client")
    if values.dtype == object:
        values = values.astype(str)
    distinct, owner = np.unique(values, return_inverse=True)
    if clients is not None and clients != len(distinct):
        count = len(distinct)
        problem = f"{about} {count} values, so it gives {count} clients, not {clients!r}"
        raise ConfigError(f"{problem}; remove the number or use that one")
    return members(owner, len(distinct))


def dirichlet(
    source: Source | GraphSet, clients: int, seed: int, *, alpha: float = 10.0, least: int = 5
) -> Parts:
    """Skew labels: divide each class among clients by shares from Dirichlet(alpha).

    Draw again, at most 100 times, until every client has at least `least` members.
    """
    # A small alpha makes uneven shares, a large one even ones. A client with N/K members gets no
    # further class (N members, K clients). Unknown labels count as one more class.
    spec.check_whole("least", least, 1)
    spec.check_positive("alpha", alpha)
    count = len(source.y)
    if clients * least > count:
        need = f"gives each client at least {least} of the {count} members of '{source.name}'"
        hint = f"use at most {max(1, count // least)} clients, or a smaller least"
        problem = f"partition 'dirichlet' {need}, too few for {clients} clients"
        raise DataError(f"{problem}; {hint} (dirichlet:least=1)")
    rng = np.random.default_rng(seed)
    for _ in range(TRIES):
        owner = _draw_owners(source.y, clients, alpha, rng)
        if np.bincount(owner, minlength=clients).min() >= least:
            return members(owner, clients)
    problem = f"left a client of '{source.name}' with fewer than {least} members in each of {TRIES}"
    advice = f"use fewer than {clients} clients, a larger alpha or a smaller least"
    raise DataError(f"partition 'dirichlet' with alpha = {alpha} {problem} draws; {advice}")


def _draw_owners(y: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    owner = np.empty(len(y), dtype=np.int64)
    sizes = np.zeros(clients, dtype=np.int64)
    for label in np.unique(y):
        ids = rng.permutation(np.flatnonzero(y == label))
        still_open = sizes < len(y) / clients
        share = rng.dirichlet(np.full(clients, alpha)) * still_open
        if share.sum() == 0:  # a small alpha gave everything to clients that are full
            share = still_open.astype(float)
        cuts = np.floor(np.cumsum(share / share.sum()) * len(ids)).astype(np.int64)
        cuts[-1] = len(ids)
        taken = np.diff(cuts, prepend=0)
        owner[ids] = np.repeat(np.arange(clients), taken)
        sizes += taken
    return owner


def feature_skew(source: GraphSet, clients: int, seed: int) -> Parts:
    """Cut graphs, sorted by mean feature value, into equal runs. The seed has no effect."""
    owner, count = source.graph_of_node(), source.num_graphs
    totals = np.bincount(owner, weights=source.x.sum(axis=1), minlength=count)
    return _runs(totals / np.maximum(np.diff(source.node_ptr) * source.num_features, 1), clients)


def topology_skew(source: GraphSet, clients: int, seed: int) -> Parts:
    """Cut graphs, sorted by mean degree, into equal runs. The seed has no effect."""
    edges = np.bincount(source.graph_of_node()[source.edges[0]], minlength=source.num_graphs)
    return _runs(edges / np.maximum(np.diff(source.node_ptr), 1), clients)


def _runs(value: np.ndarray, clients: int) -> Parts:
    """Cut the ids, in ascending order of value, into equal runs. The last run takes the rest."""
    length = len(value) // clients
    return np.split(np.argsort(value, kind="stable"), length * np.arange(1, clients))


def gcfl_oneds(
    source: GraphSet, clients: int, seed: int, *, overlap: bool = False, compat: str | None = None
) -> Parts:
    """Give each client up to 50 graphs in file order, then assign the remaining ones at random."""
    # TU files are often sorted by class, so the first chunk makes label skew. With `overlap` each
    # client draws 50 to 149 graphs of the whole set instead. `compat="replacement"` draws as GCFL
    # does: a client can have one graph twice, for training and for testing. GCFL's seed is 123.
    spec.check_flag("overlap", overlap)
    spec.check_compat(compat, "replacement")
    if compat and not overlap:
        raise ConfigError("compat 'replacement' of partition 'gcfl-oneds' needs overlap = true")
    stream = np.random.RandomState(seed)
    count = source.num_graphs
    if overlap:
        sizes = stream.randint(50, 150, size=clients)
        if compat:
            return [stream.choice(count, size=size, replace=True) for size in sizes]
        return [stream.choice(count, size=min(size, count), replace=False) for size in sizes]
    chunk = min(CHUNK, count // clients)
    handed_out = np.repeat(np.arange(clients), chunk)
    rest = stream.randint(0, clients, size=count - len(handed_out))
    return members(np.concatenate([handed_out, rest]), clients)


def _named(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.__name__.replace("_", "-"): recipe for recipe in recipes}


_ANY = (dirichlet, random)
NODE_PARTITIONS = _named(*communities.LOUVAIN, *communities.METIS, *_ANY, column)
"""Recipes that partition the nodes of one graph."""
GRAPH_PARTITIONS = _named(gcfl_oneds, feature_skew, topology_skew, *_ANY)
"""Recipes that partition a set of graphs."""
PARTITIONS = {**NODE_PARTITIONS, **GRAPH_PARTITIONS}
