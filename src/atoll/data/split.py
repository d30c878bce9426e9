"""Splits of each client's nodes (or graphs) into training, validation and testing."""

from __future__ import annotations

import random as python_random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import ConfigError, DataError, check_name
from atoll.data.source import (
    MISSING,
    TEST,
    TRAIN,
    UNSEEN,
    UNUSED,
    VAL,
    GraphGroup,
    GraphSet,
    Source,
)
from atoll.data.spec import Value, check_seed, check_whole, options_of, parse_recipe

Ratios = tuple[float, float, float]  # shares of training, validation and testing; their sum is one
Data = Source | GraphSet
Parts = Sequence[np.ndarray]
Roles = list[np.ndarray]
"""For each client int8 roles, in the order of its ids. Nodes without a label (-1) are UNUSED."""

NODE_RATIOS: Ratios = (0.2, 0.4, 0.4)
GRAPH_RATIOS: Ratios = (0.8, 0.1, 0.1)
TIME_RATIOS: Ratios = (0.6, 0.2, 0.2)


def split(
    source: Data,
    parts: Parts,  # ids of each client, as in `Partition.parts`
    recipe: str = "stratified",  # in `SPLITS`, also with options ("stratified:ratios=0.1/0.4/0.5")
    seed: int = 0,
    ratios: Ratios | None = None,  # default: 20/40/40 for nodes (by time 60/20/20), 80/10/10 graphs
    **options: Value,
) -> Roles:
    """Give every node (or graph) of every client a role."""
    check_seed(seed)
    recipe, shares, options = _resolved(source, recipe, ratios, options)
    roles = SPLITS[recipe](source, parts, seed, shares, **options)
    owned = zip(parts, roles, strict=True)
    return [np.where(source.y[ids] >= 0, own, UNUSED).astype(np.int8) for ids, own in owned]


def check_split(recipe: str, known: Iterable[str]) -> None:
    """Raise an error for an unknown split, or for shares such as 80/10/10 instead of a name."""
    if re.fullmatch(r"[1-9]\d*(/\d+){2}", recipe):
        shares = [int(part) for part in recipe.split("/")]
        meant = "/".join(f"{share / sum(shares):g}" for share in shares)
        raise ConfigError(f"split cannot be '{recipe}'; give shares as --ratios {meant}")
    check_name("split", recipe, known)


def _resolved(
    source: Data, recipe: str, ratios: Ratios | None, options: dict[str, Value]
) -> tuple[str, Ratios, dict[str, Value]]:
    """Return a recipe's name, its shares and its options, all checked."""
    if recipe.startswith("time:") and "=" not in recipe.partition(",")[0]:
        recipe = recipe.replace("time:", "time:column=", 1)
    recipe, named = parse_recipe(recipe)
    options = {**named, **options}
    check_split(recipe, SPLITS)
    shares = options.pop("ratios", ratios)
    for option in options:
        if option not in (known := options_of(SPLITS[recipe])):
            allowed = ", ".join(("ratios (as in 0.6/0.2/0.2)", *sorted(known)))
            raise ConfigError(
                f"split '{recipe}' has no option '{option}'; choose one of: {allowed}"
            )
    if isinstance(source, GraphSet) and recipe in GROWING:
        problem = f"split '{recipe}' is for one graph, but '{source.name}' is a set of graphs"
        raise ConfigError(f"{problem}; use split 'stratified'")
    if shares is None:
        usual = GRAPH_RATIOS if isinstance(source, GraphSet) else NODE_RATIOS
        shares = TIME_RATIOS if recipe == "time" else usual
    listed = (shares,) if isinstance(shares, int | float | str) else tuple(shares)
    valid = [share for share in listed if isinstance(share, int | float) and 0 <= share <= 1]
    usable = len(listed) == len(valid) == 3 and valid[0] > 0
    if not usable or abs(sum(valid) - 1) > 1e-6:
        advice = "give three shares for training, validation and testing that sum to 1"
        raise ConfigError(f"ratios {listed} are not usable; {advice}, the first above 0")
    return recipe, (valid[0], valid[1], valid[2]), options


def stratified(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """Split each client's nodes of every class by the ratios. This is the default split.

    The ratios are rounded once per client, so rounding errors of classes do not add up.
    """
    # A client's nodes form a row, class after class, shuffled inside a class. Roles are spread
    # evenly along the row: each class gets its share to within about one node, and the totals are
    # the rounded ratios, with at least one training node. A node of several clients has the same
    # role at all of them, so that no client trains on a test node of another.
    role_of = np.full(len(source.y), UNUSED, dtype=np.int8)
    for client, ids in enumerate(parts):
        rng = np.random.default_rng([seed, client])
        fresh = np.unique(ids)
        fresh = rng.permutation(fresh[(source.y[fresh] >= 0) & (role_of[fresh] == UNUSED)])
        # In a random order of classes. Otherwise the first class would always round down.
        rank = rng.permutation(source.classes)
        row = fresh[np.argsort(rank[source.y[fresh]], kind="stable")]
        role_of[row] = TEST
        train, other = _evenly(len(row), ratios[0]), ratios[1] + ratios[2]
        role_of[row[train]] = TRAIN
        if other > 0:
            rest = row[~train]
            role_of[rest[_evenly(len(rest), ratios[1] / other)]] = VAL
        if len(row) and not (role_of[ids] == TRAIN).any():
            role_of[row[0]] = TRAIN
    return [role_of[ids] for ids in parts]


def _evenly(count: int, share: float) -> np.ndarray:
    """Return True at round(share * count) of `count` places, evenly spread."""
    return np.asarray(np.diff(np.floor(share * np.arange(count + 1) + 0.5)) > 0)


def openfgl(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """Split each class of a client, n nodes: cut at int(train · n) and int((train + val) · n)."""
    result = [np.full(len(ids), UNUSED, dtype=np.int8) for ids in parts]
    for client, (ids, roles) in enumerate(zip(parts, result, strict=True)):
        rng = np.random.default_rng([seed, client])
        for places in _by_class(source.y[ids]):
            cuts = int(ratios[0] * len(places)), int((ratios[0] + ratios[1]) * len(places))
            roles[rng.permutation(places)] = _three_runs(len(places), *cuts)
    return result


def fedtad(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """Split each class of a client, n nodes: int(train · n) train, int(val · n) validate."""
    # One Python generator shuffles class by class, client by client. With seed 2024 and FedTAD's
    # own partition of Cora, these are the roles of the published numbers of FedTAD and FedATH.
    rng = python_random.Random(seed)
    result = [np.full(len(ids), UNUSED, dtype=np.int8) for ids in parts]
    for ids, roles in zip(parts, result, strict=True):
        for places in _by_class(source.y[ids]):
            rng.shuffle(places)
            train = int(ratios[0] * len(places))
            roles[places] = _three_runs(len(places), train, train + int(ratios[1] * len(places)))
    return result


def _by_class(y: np.ndarray) -> list[list[int]]:
    """Return the places of every class, classes ascending."""
    return [np.flatnonzero(y == label).tolist() for label in np.unique(y)]


def _three_runs(count: int, first: int, second: int) -> np.ndarray:
    """Return TRAIN up to `first`, VAL up to `second`, TEST up to `count`."""
    sizes = [first, second - first, count - second]
    return np.repeat(np.array([TRAIN, VAL, TEST], dtype=np.int8), sizes)


def random(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """Shuffle each client's nodes of all classes, and cut at rounded ratios (FedGTA, AdaFGL)."""
    result = [np.full(len(ids), UNUSED, dtype=np.int8) for ids in parts]
    for client, (ids, roles) in enumerate(zip(parts, result, strict=True)):
        labelled = np.flatnonzero(source.y[ids] >= 0)
        order = np.random.default_rng([seed, client]).permutation(labelled)
        cuts = round(ratios[0] * len(order)), round((ratios[0] + ratios[1]) * len(order))
        roles[order] = _three_runs(len(order), *cuts)
    return result


def gcfl(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """Split each client twice with scikit-learn, stratified by class.

    The first cut separates training from the rest, the second validation from testing.
    """
    from sklearn.model_selection import train_test_split

    other, result = ratios[1] + ratios[2], []
    for client, ids in enumerate(parts):
        y, places = source.y[ids], np.arange(len(ids))
        try:
            _, rest = train_test_split(places, test_size=other, stratify=y, random_state=seed)
            share = ratios[2] / other
            val, test = train_test_split(rest, test_size=share, stratify=y[rest], random_state=seed)
        except (ValueError, ZeroDivisionError) as error:
            counts = np.unique(y, return_counts=True)[1].tolist()
            problem = f"split 'gcfl' cannot stratify client {client} with class counts {counts}"
            raise DataError(f"{problem}; use split 'stratified' or fewer clients") from error
        roles = np.full(len(ids), TRAIN, dtype=np.int8)
        roles[val], roles[test] = VAL, TEST
        result.append(roles)
    return result


def global_(source: Data, parts: Parts, seed: int, ratios: Ratios, *, draw: int = 0) -> Roles:
    """Split one torch permutation of all nodes: training, testing, the rest for validation."""
    # FED-PUB (and FedIIH) draws its settings from one seed in order, so its split for 5, 10 and 20
    # clients is `draw` 0, 1 and 2 of seed 1234. A node has one role at all its clients. The split
    # is not stratified, and a client may have no training node.
    import torch

    check_whole("draw", draw, 0)
    stream = torch.Generator().manual_seed(seed)
    count = len(source.y)
    for _ in range(draw):
        torch.randperm(count, generator=stream)
    order = torch.randperm(count, generator=stream).numpy()
    train, test = round(ratios[0] * count), round(ratios[2] * count)
    role_of = np.full(count, VAL, dtype=np.int8)
    role_of[order[:train]] = TRAIN
    role_of[order[train : train + test]] = TEST
    return [role_of[ids] for ids in parts]


def given(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """Return the roles that came with the data. Seed and ratios have no effect."""
    if isinstance(source, GraphSet) or source.split is None:
        problem = f"data '{source.name}' comes without a split, so split 'given' is not possible"
        raise DataError(f"{problem}; use split 'stratified'")
    return [source.split[ids] for ids in parts]


def time_column(recipe: str | None) -> str | None:
    """Return the column of a split by time, or None for other splits."""
    name, _, rest = (recipe or "").partition(":")
    column = rest.partition(",")[0].removeprefix("column=")
    return column if name == "time" and column else None


def inductive(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """Split as `stratified`. Training uses no validation and test nodes, and no edges of these."""
    return stratified(source, parts, seed, ratios)


def time(
    source: Source,
    parts: Parts,
    seed: int,
    ratios: Ratios,
    *,
    column: str = "",
    val: Value | None = None,
    test: Value | None = None,
) -> Roles:
    """Split by time: the earliest nodes train, later ones validate, the latest ones test.

    All clients use the same two cut-off times. They are given, as in
    `time:signup,val=2024-06-01,test=2024-07-01`, or divide the labelled nodes by the ratios. The
    seed has no effect.
    """
    stages = Growth(column, _cuts(source, ratios, column, val, test)).of_nodes(source)
    roles = np.array([TRAIN, VAL, TEST], dtype=np.int8)[stages]
    return [roles[ids] for ids in parts]


def unseen(
    source: Source,
    parts: Parts,
    seed: int,
    ratios: Ratios,
    *,
    share: float = 0.2,
    classes: int = 1,
) -> Roles:
    """Make some nodes of each client arrive only after training (FedLoG).

    Each client draws `classes` of its classes, but not all. Their nodes are MISSING, so the client
    trains without these classes. A `share` of every other class is UNSEEN. The rest has the roles
    of `stratified`. The paper's own draw is not public, so this one is reconstructed.
    """
    check_whole("classes", classes, 0)
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"share is {share}; give a number from 0 to below 1")
    if np.unique(np.concatenate(parts)).size < sum(ids.size for ids in parts):
        hint = "choose another --partition"
        raise ConfigError(f"split 'unseen' needs clients that have no node in common; {hint}")
    result = []
    for client, ids in enumerate(parts):
        rng, y = np.random.default_rng([seed, client, UNSEEN]), source.y[ids]
        row, rank = rng.permutation(np.flatnonzero(y >= 0)), rng.permutation(source.classes)
        row = row[np.argsort(rank[y[row]], kind="stable")]  # as in `stratified`
        roles = np.full(len(ids), UNUSED, dtype=np.int8)
        roles[row[_evenly(len(row), share)]] = UNSEEN
        known = rng.permutation(np.unique(y[row]))
        roles[np.isin(y, known[: min(classes, len(known) - 1)])] = MISSING
        result.append(roles)
    seen = [ids[own == UNUSED] for ids, own in zip(parts, result, strict=True)]
    drawn = zip(parts, result, stratified(source, seen, seed, ratios), strict=True)
    for ids, roles, rest in drawn:
        roles[roles == UNUSED] = rest
        trained = np.isin(source.y[ids], source.y[ids][roles == TRAIN])
        roles[(roles == UNSEEN) & ~trained] = MISSING
    return result


def _cuts(
    source: Source, ratios: Ratios, column: str, val: Value | None, test: Value | None
) -> tuple[float, float]:
    """Return the times at which validation and testing begin."""
    if column not in source.columns:
        listed = ", ".join(sorted(source.columns)) or "none"
        problem = f"split 'time:{column or 'COLUMN'}' needs a node column of '{source.name}'"
        raise ConfigError(f"{problem}; its columns are: {listed}")
    times = np.sort(_times(source.columns[column], f"column '{column}'")[source.y >= 0])
    if (val is None) != (test is None):
        raise ConfigError(f"give both times, as in time:{column},val=60,test=80, or none of them")
    if val is None:
        shares = ratios[0], ratios[0] + ratios[1]
        places = [round(share * times.size) for share in shares]
        first, second = (times[place] if place < times.size else np.inf for place in places)
    else:
        first, second = _times(np.array([str(val), str(test)]), "val and test")
    if not (times < first).any() or first > second:
        hint = f"give the times where validation and testing begin: time:{column},val=...,test=..."
        counts = [int((times < t).sum()) for t in (first, second)]
        told = f"{counts[0]} of {times.size} labelled nodes before validation, {counts[1]} before"
        raise ConfigError(f"split 'time:{column}' leaves {told} testing; {hint}")
    return float(first), float(second)


def _times(values: np.ndarray, what: str) -> np.ndarray:
    """Convert numbers, dates, or texts of either to float64. Dates become seconds."""
    try:
        if values.dtype.kind in "OUS":
            texts = values.astype(str)
            try:
                return texts.astype(np.float64)
            except ValueError:
                values = texts.astype("datetime64[s]")
        if values.dtype.kind == "M":
            missing, values = np.isnat(values), values.astype("datetime64[s]").astype(np.float64)
            values[missing] = np.nan
        found = values.astype(np.float64)
    except ValueError as error:
        raise DataError(f"{what} is no number and no date like 2024-06-30: {error}") from None
    if (gaps := np.flatnonzero(np.isnan(found))).size:
        raise DataError(f"{what} has no time at row {gaps[0]} ({gaps.size} in all); fill it")
    return found


@dataclass(frozen=True)
class Growth:
    """The stage in which nodes and edges appear: training (0), validation (1) or testing (2).

    For the split `unseen` the later stages are the roles UNSEEN (3) and MISSING (4).
    """

    column: str = ""  # the node column of times, or "" to use the roles
    cuts: tuple[float, float] = (np.inf, np.inf)  # the times at which stages 1 and 2 begin
    first: int = VAL  # without a column, the first role that is absent in training

    def of_nodes(self, part: Source, roles: np.ndarray | None = None) -> np.ndarray:
        """Return the stage of each node, (N,) int8, from its time, or else from its role."""
        if not self.column:
            assert roles is not None
            return np.asarray(np.where(roles >= self.first, roles, 0), dtype=np.int8)
        return self.of_times(_times(part.columns[self.column], f"column '{self.column}'"))

    def of_edges(self, part: Source, of_nodes: np.ndarray) -> np.ndarray:
        """Return the stage of each edge, (E,) int8, from its two nodes and its own time."""
        found = np.asarray(of_nodes[part.edges].max(0))
        if self.column and part.edge_time is not None:
            found = np.maximum(found, self.of_times(_times(part.edge_time, "the time of edges")))
        return found

    def of_times(self, times: np.ndarray) -> np.ndarray:
        """Return the stage of each time, int8."""
        return np.asarray((times[:, None] >= np.array(self.cuts)).sum(1).astype(np.int8))


def growth(
    source: Data | GraphGroup, recipe: str, ratios: Ratios | None, **options: Value
) -> Growth | None:
    """Return when nodes and edges appear in a split, or None if all are present from the start."""
    if not isinstance(source, Source):
        return None
    recipe, shares, options = _resolved(source, recipe, ratios, options)
    if recipe not in GROWING:
        return None
    if recipe != "time":
        return Growth(first=UNSEEN if recipe == "unseen" else VAL)
    chosen = (options.get(name) for name in ("val", "test"))
    column = str(options.get("column", ""))
    return Growth(column, _cuts(source, shares, column, *chosen))


_RECIPES = (stratified, openfgl, fedtad, gcfl, random, global_, given, inductive, time, unseen)
GROWING = ("inductive", "time", "unseen")  # splits that hide a part of the graph in training
SPLITS: dict[str, Callable[..., Roles]] = {f.__name__.rstrip("_"): f for f in _RECIPES}
