"""Louvain communities packed into clients.

`louvain` is the default of the strict protocol: symmetrised simple graph, seeded, and it works for
any number of clients up to the number of nodes. The others follow one public code each. Cutting is
by node id, as in all of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from atoll.core.errors import DataError
from atoll.data.partition.checks import check_compat, check_whole
from atoll.data.partition.communities import groups_of, networkx_louvain, scikit_louvain
from atoll.data.partition.packing import PackingRule, mistaken_smallest, pack, smallest, stay
from atoll.data.source import Source


def louvain(source: Source, clients: int, seed: int, *, delta: int = 20) -> list[np.ndarray]:
    """Seeded Louvain of scikit-network, packed to about N/K ± delta nodes per client.

    The first clients may take more than their share; nobody is left with less than half of it.
    """
    check_whole("delta", delta, 0)
    target = source.num_nodes // clients
    # The public rule never ends once N/K <= delta; within a quarter it also cuts few communities.
    slack = min(delta, target // 4)
    groups = groups_of(scikit_louvain(source.undirected_simple(), seed))
    return pack(groups, clients, replace(_about(target, slack), least=max(1, target // 2)))


def louvain_openfgl(
    source: Source, clients: int, seed: int, *, delta: int = 20, compat: str | None = None
) -> list[np.ndarray]:
    """OpenFGL: Louvain of scikit-network on the edges as they stand; the seed has no effect.

    `compat="give-up"` brings back its faulty choice for a group that fits nowhere.
    """
    del seed
    rule = _public_rule(source, "louvain-openfgl", clients, delta, compat)
    return pack(groups_of(scikit_louvain(source, None)), clients, rule)


def louvain_fedtad(
    source: Source, clients: int, seed: int, *, delta: int = 20, compat: str | None = None
) -> list[np.ndarray]:
    """FedTAD and FedATH: python-louvain with NumPy's old generator, then OpenFGL's packing.

    `compat="give-up"` brings back its faulty choice for a group that fits nowhere.
    """
    rule = _public_rule(source, "louvain-fedtad", clients, delta, compat)
    return pack(groups_of(networkx_louvain(source, seed)), clients, rule)


def louvain_fedgta(
    source: Source, clients: int, seed: int, *, compat: str | None = None
) -> list[np.ndarray]:
    """FedGTA and AdaFGL: python-louvain, clients of N/K + 1 nodes.

    `compat="duplicates"` brings back its fault: a group that fits nowhere is stored twice.
    """
    check_compat(compat, "duplicates")
    target = source.num_nodes // clients
    rule = PackingRule(target, target + 1, target + 1, stay, duplicates=compat == "duplicates")
    return pack(groups_of(networkx_louvain(source, seed)), clients, rule)


def _about(target: int, slack: int, compat: str | None = None) -> PackingRule:
    no_room = smallest if compat is None else mistaken_smallest
    return PackingRule(target - slack, max(target + slack - 1, target), target, no_room)


def _public_rule(
    source: Source, recipe: str, clients: int, delta: int, compat: str | None
) -> PackingRule:
    check_whole("delta", delta, 0)
    check_compat(compat, "give-up")
    target = source.num_nodes // clients
    if target <= delta:
        most = source.num_nodes // (delta + 1)
        fewer = f"use at most {most} clients, or " if most else "use "
        raise DataError(
            f"partition '{recipe}' needs more than delta = {delta} nodes per client, but "
            f"'{source.name}' has {source.num_nodes} nodes for {clients} clients; "
            f"{fewer}a smaller delta or partition 'louvain'"
        )
    return _about(target, delta, compat)
