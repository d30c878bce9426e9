"""The account of differential privacy: what clients have spent, by what crossed.

It is Google's (`dp-accounting`). A client's releases are Gaussian mechanisms: k of them with
multiplier z tell as much as one with z / √k, whose epsilon at a given delta is known exactly.
Neighbours are two federations, in one of which a client's updates are all zero. Who takes part in a
round follows from the seed, so it is taken as known: a client is charged for the rounds that it was
drawn in, and no amplification by sampling is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from atoll.core.errors import ConfigError
from atoll.engines.ledger import Ledger

ADJACENCY = "one client's updates are all zero (zero-out)"
SAMPLING = "who is drawn is taken as known; the client drawn most often; no amplification"


def need_accountant() -> None:
    """One sentence where the extra is missing."""
    if find_spec("dp_accounting") is None:
        raise ConfigError(
            "differential privacy is accounted for by dp-accounting, which is not installed: pip "
            "install 'atoll-fgl[privacy]'"
        )


def epsilon(precision: float, delta: float) -> float:
    """Epsilon of Gaussian releases whose 1/z² add up to `precision`; infinite without noise."""
    if precision == math.inf:
        return math.inf
    if precision == 0:
        return 0.0
    import dp_accounting

    return float(dp_accounting.get_epsilon_gaussian(1 / math.sqrt(precision), delta))


def release(noise: float) -> float:
    """What one release adds to `precision`."""
    return 1 / noise**2 if noise**2 else math.inf  # the square of very little is 0


@dataclass(frozen=True)
class Spent:
    """What the clients of a run gave away, the one that gave most.

    Attributes:
        releases: How many updates the client that sent most has sent.
        least: Fewest clients of a round.
        server: Epsilon against the server, which sees every update.
        peers: Epsilon against everybody else, who see the models: another site, which knows its own
            noise, is left with the noise of the others.
    """

    releases: int
    least: int
    server: float
    peers: float


def spent(noise: float, delta: float, ledgers: Sequence[Ledger]) -> Spent:
    """By what crossed, in all these ledgers together."""
    sent = [e for ledger in ledgers for e in ledger.entries if e.step == "train" and e.up]
    clients = max((entry.runs[-1][1] for entry in sent), default=1)
    releases, shares = np.zeros(clients, dtype=np.int64), np.zeros(clients)
    for entry in sent:
        for first, end in entry.runs:
            releases[first:end] += 1
            shares[first:end] += 1 / max(entry.size - 1, 1)
    most = int(releases.max())
    one = release(noise)
    return Spent(
        most,
        min((entry.size for entry in sent), default=0),
        epsilon(one * most if most else 0.0, delta),
        epsilon(one * float(shares.max()) if most else 0.0, delta),
    )
