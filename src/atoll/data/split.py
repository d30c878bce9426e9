"""Which nodes (or graphs) of each client are for training, validation and testing."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Sequence

import numpy as np

from atoll.core.errors import ConfigError, DataError, check_name
from atoll.data.source import TEST, TRAIN, UNUSED, VAL, GraphSet, Source
from atoll.data.spec import Value, check_seed, check_whole, options_of, parse_recipe

Ratios = tuple[float, float, float]  # shares for training, validation and testing; they sum to one
Data = Source | GraphSet
Parts = Sequence[np.ndarray]
Roles = list[np.ndarray]
"""For each client int8 roles, in the order of its ids; UNUSED where there is no label (-1)."""

NODE_RATIOS: Ratios = (0.2, 0.4, 0.4)
GRAPH_RATIOS: Ratios = (0.8, 0.1, 0.1)


def split(
    source: Data,
    parts: Parts,  # ids of each client, as in `Partition.parts`
    recipe: str = "stratified",  # in `SPLITS`, also with options ("stratified:ratios=0.1/0.4/0.5")
    seed: int = 0,
    ratios: Ratios | None = None,  # by default 20/40/40 for nodes and 80/10/10 for graphs
    **options: Value,
) -> Roles:
    """Give every node (or graph) of every client a role."""
    recipe, named = parse_recipe(recipe)
    options = {**named, **options}
    check_name("split", recipe, SPLITS)
    shares = options.pop("ratios", ratios)
    for option in options:
        if option not in options_of(SPLITS[recipe]):
            raise ConfigError(f"split '{recipe}' has no option '{option}'")
    check_seed(seed)
    if shares is None:
        shares = GRAPH_RATIOS if isinstance(source, GraphSet) else NODE_RATIOS
    listed = (shares,) if isinstance(shares, int | float | str) else tuple(shares)
    valid = [share for share in listed if isinstance(share, int | float) and 0 <= share <= 1]
    usable = len(listed) == len(valid) == 3 and valid[0] > 0
    if not usable or abs(sum(valid) - 1) > 1e-6:
        advice = "give three shares for training, validation and testing that sum to 1"
        raise ConfigError(f"ratios {listed} are not usable; {advice}, the first above 0")
    roles = SPLITS[recipe](source, parts, seed, shares, **options)
    owned = zip(parts, roles, strict=True)
    return [np.where(source.y[ids] >= 0, own, UNUSED).astype(np.int8) for ids, own in owned]


def stratified(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """The strict default: per client and class, without the drift of per-class rounding."""
    # A client's nodes stand in a row, class after class, shuffled inside a class. Roles are spread
    # evenly along the row: each class gets its share to within about one node, and the totals are
    # the rounded ratios, with at least one training node. A node that several clients hold has the
    # same role at all of them, so that no client trains on a test node of another.
    role_of = np.full(len(source.y), UNUSED, dtype=np.int8)
    for client, ids in enumerate(parts):
        rng = np.random.default_rng([seed, client])
        fresh = np.unique(ids)
        fresh = rng.permutation(fresh[(source.y[fresh] >= 0) & (role_of[fresh] == UNUSED)])
        # In a random order of classes, or the first class would round down at every client.
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
    """True at round(share * count) of `count` places, evenly spread."""
    return np.asarray(np.diff(np.floor(share * np.arange(count + 1) + 0.5)) > 0)


def openfgl(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """Per client and class: cut at int(train · n) and int((train + validation) · n)."""
    result = [np.full(len(ids), UNUSED, dtype=np.int8) for ids in parts]
    for client, (ids, roles) in enumerate(zip(parts, result, strict=True)):
        rng = np.random.default_rng([seed, client])
        for places in _by_class(source.y[ids]):
            cuts = int(ratios[0] * len(places)), int((ratios[0] + ratios[1]) * len(places))
            roles[rng.permutation(places)] = _three_runs(len(places), *cuts)
    return result


def fedtad(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """Per client and class: int(train · n), then int(validation · n), the rest for testing."""
    # One Python generator shuffles class by class, client by client: with seed 2024 and FedTAD's
    # own partition of Cora, FedTAD and FedATH published their numbers on these very roles.
    rng = python_random.Random(seed)
    result = [np.full(len(ids), UNUSED, dtype=np.int8) for ids in parts]
    for ids, roles in zip(parts, result, strict=True):
        for places in _by_class(source.y[ids]):
            rng.shuffle(places)
            train = int(ratios[0] * len(places))
            roles[places] = _three_runs(len(places), train, train + int(ratios[1] * len(places)))
    return result


def _by_class(y: np.ndarray) -> list[list[int]]:
    """The places of every class, classes ascending."""
    return [np.flatnonzero(y == label).tolist() for label in np.unique(y)]


def _three_runs(count: int, first: int, second: int) -> np.ndarray:
    """TRAIN up to `first`, VAL up to `second`, TEST up to `count`."""
    sizes = [first, second - first, count - second]
    return np.repeat(np.array([TRAIN, VAL, TEST], dtype=np.int8), sizes)


def random(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """Per client: one shuffle, classes ignored, cut at the rounded ratios (FedGTA, AdaFGL)."""
    result = [np.full(len(ids), UNUSED, dtype=np.int8) for ids in parts]
    for client, (ids, roles) in enumerate(zip(parts, result, strict=True)):
        labelled = np.flatnonzero(source.y[ids] >= 0)
        order = np.random.default_rng([seed, client]).permutation(labelled)
        cuts = round(ratios[0] * len(order)), round((ratios[0] + ratios[1]) * len(order))
        roles[order] = _three_runs(len(order), *cuts)
    return result


def gcfl(source: Data, parts: Parts, seed: int, ratios: Ratios) -> Roles:
    """Per client: scikit-learn's stratified draw of training against the rest, then of the rest."""
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
    """One torch permutation of all nodes: training, then testing, then the rest for validation."""
    # FED-PUB (and FedIIH) draws its settings from one seed in order, so its split for 5, 10 and 20
    # clients is `draw` 0, 1 and 2 of seed 1234. A node has one role, whoever holds it. Not
    # stratified, and a client may be left without a training node.
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
    """The roles that came with the data; seed and ratios have no effect."""
    if isinstance(source, GraphSet) or source.split is None:
        problem = f"data '{source.name}' comes without a split, so split 'given' is not possible"
        raise DataError(f"{problem}; use split 'stratified'")
    return [source.split[ids] for ids in parts]


_RECIPES = (stratified, openfgl, fedtad, gcfl, random, global_, given)
SPLITS: dict[str, Callable[..., Roles]] = {f.__name__.rstrip("_"): f for f in _RECIPES}
