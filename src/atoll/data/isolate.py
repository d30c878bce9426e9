"""A federation with only one kind of heterogeneity (FedTAD, Section 3 and Fig. 1b).

- `nodes`: every client keeps its nodes and loses its edges.
- `topology`: every client gets the nodes, labels, split and E edges of one client. Client i also
  gets i · ratio · E random edges, so client 0 gets none.
- `class-topology`: the same nodes, but every client gets ratio · E random edges. Each of them joins
  a node of the client's "own" classes and a node of another class. Of K clients, client j mod K
  owns class j. A client that owns no class gets no random edge.

Random edges lower the homophily of all classes equally. The client in the paper's Fig. 1(c) is
strong in one class and weak in another, and the text does not explain why. `class-topology` is one
possible explanation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.random import Generator as Rng

from atoll.core.errors import ConfigError, DataError, check_name
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.data.source import undirected_pairs

VARY = ("none", "nodes", "topology", "class-topology")
RATIO = 0.5  # random edges, as a share of the existing edges
_IDLE = 50  # draws without a new pair after which no pair is assumed to be left

Allowed = Callable[[np.ndarray], np.ndarray]  # which of the pairs (2, P) may be drawn, (P,) bool


def vary_federation(
    federation: Federation, vary: str, *, client: int = 0, ratio: float = RATIO, seed: int = 0
) -> Federation:
    """Return the federation with only one kind of heterogeneity, or unchanged for "none".

    For `topology` and `class-topology`, each client gets a copy of the graph of `client`, with
    random edges. The module docstring gives their number. `seed` and the client's number draw them.
    """
    check_name("value of --vary", vary, VARY)
    if not 0 <= ratio < np.inf:
        raise ConfigError(f"ratio is {ratio}; give a finite number that is not negative")
    check_client_number(federation, client)
    if vary == "none":
        return federation
    if vary == "nodes":
        graphs = [
            replace(graph, edges=graph.edges[:, :0], edge_weight=graph.edge_weight[:0])
            for graph in federation.graphs
        ]
    else:
        base = federation.graphs[federation.numbers.index(client)]
        graphs = [
            _perturbed(base, vary, place, len(federation), ratio, np.random.default_rng(key))
            for place, key in enumerate([seed, number] for number in federation.numbers)
        ]
    about = {key: value for key, value in federation.about.items() if key != "edges_total"}
    about["nodes"] = [graph.num_nodes for graph in graphs]
    about["edges"] = [int(graph.edges.shape[1]) for graph in graphs]
    return replace(federation, graphs=tuple(graphs), about={**about, "vary": vary})


def check_client_number(federation: Federation, client: int) -> None:
    """Refuse an unknown client, or a federation of one client."""
    if len(federation) < 2:
        raise DataError("a federation of one client has no other client; give two clients or more")
    if client not in federation.numbers:
        advice = f"give a number from {min(federation.numbers)} to {max(federation.numbers)}"
        raise ConfigError(f"client {client} is not among the {len(federation)} clients; {advice}")


def _perturbed(base: Graph, vary: str, place: int, clients: int, ratio: float, rng: Rng) -> Graph:
    """Return the common graph with the random edges of the client at `place`."""
    if vary == "topology":
        anything = np.ones(1, dtype=bool)
        return _with_random_edges(base, place * ratio, lambda _: anything, rng)
    known = ((base.train + base.val + base.test) > 0).numpy()
    labels = np.where(known, base.y.numpy(), -1)
    own = np.unique(labels[known])[place::clients]

    def allowed(pairs: np.ndarray) -> np.ndarray:
        """Return whether both classes are known and differ, and one of them is in `own`."""
        ends = labels[pairs]
        differ = (ends >= 0).all(axis=0) & (ends[0] != ends[1])
        return np.asarray(differ & np.isin(ends, own).any(axis=0))

    # A client without own classes keeps the graph unchanged.
    return _with_random_edges(base, ratio if own.size else 0.0, allowed, rng)


def _with_random_edges(graph: Graph, share: float, allowed: Allowed, rng: Rng) -> Graph:
    """Return the graph with more random edges: `share` times its number of connected pairs."""
    nodes = graph.num_nodes
    pairs, _ = undirected_pairs(graph.edges.numpy(), nodes)
    count, wanted = pairs.shape[1], round(share * pairs.shape[1])
    if count == 0:
        problem = "the client in question has no edge, so that its topology cannot be varied"
        raise DataError(f"{problem}; choose another client")
    found = pairs[0] * nodes + pairs[1]
    # More edges than pairs of nodes fail at once, more than allowed pairs after `_IDLE` draws.
    idle = 0 if count + wanted <= nodes * (nodes - 1) // 2 else _IDLE
    while found.size < count + wanted:
        if idle >= _IDLE:
            room = f"among {nodes:,} nodes with {count:,} edges"
            advice = "give a smaller --ratio or fewer clients"
            raise DataError(f"{wanted:,} random edges do not fit {room}; {advice}")
        ends = np.sort(rng.integers(0, nodes, (2, 2 * wanted + 64)), axis=0)
        ends = ends[:, (ends[0] < ends[1]) & allowed(ends)]
        fresh = np.setdiff1d(ends[0] * nodes + ends[1], found)
        idle = 0 if fresh.size else idle + 1
        # Shuffle, because the start of a sorted list contains the smallest node numbers.
        found = np.concatenate([found, rng.permutation(fresh)])
    new = np.stack(np.divmod(found[count : count + wanted], nodes))
    edges = torch.cat([graph.edges, torch.from_numpy(np.hstack([new, new[::-1]]))], dim=1)
    # New edges get the mean weight, because next to weights in the thousands 1 has no effect.
    weight = graph.edge_weight.mean().expand(2 * wanted)
    return replace(graph, edges=edges, edge_weight=torch.cat([graph.edge_weight, weight]))
