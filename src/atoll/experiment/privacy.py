"""Differential privacy: the options of `--dp`, the privacy that clients spent, and its report.

The accountant is Google's (`dp-accounting`). A client's releases are Gaussian mechanisms: k of them
with multiplier z reveal as much as one with z / √k, whose epsilon at a given delta is known
exactly. Two federations are neighbours if they differ in one client, whose updates are all zero in
one of them. The seed determines which clients take part in a round, so the draw counts as known: a
client is charged for its rounds, and no amplification by sampling is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from atoll.core.dp import Noised
from atoll.core.errors import ConfigError, check_name, not_installed
from atoll.core.method import Method
from atoll.engines.ledger import Ledger

if TYPE_CHECKING:
    from atoll.experiment.config import RunConfig

EXAMPLE = "write --dp clip=1,noise=1.1,delta=1e-5"
MOST = 1e12
"""The largest clip and noise: their product and its square cannot overflow."""
ADJACENCY = "one client's updates are all zero (zero-out)"
SAMPLING = "the draw counts as known; for the client drawn most often; no amplification"


class PrivacyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Client-level differential privacy."""

    clip: float  # C, the largest norm of one client's update
    noise: float  # z: every client adds noise of standard deviation z C to each parameter
    delta: float = 1e-5  # the probability that epsilon does not hold
    # Sites send their scores to the server, in the clear and outside epsilon, or keep them in a
    # file. In a simulation the experimenter has the scores.
    scores: Literal["kept", "told"] = "kept"
    # The source of a site's noise: the site, so that no other party can remove it, or the seed,
    # as in a simulation. The seed protects no site and is for tests.
    randomness: Literal["site", "seed"] = "site"


def keeps_scores(privacy: PrivacyConfig | None) -> bool:
    """Return whether scores and sizes stay at the sites."""
    return privacy is not None and privacy.scores == "kept"


def parse_privacy(text: str) -> dict[str, Any]:
    """Parse `clip=1,noise=1.1,delta=1e-5` to plain values."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not key:
            raise ConfigError(f"--dp takes key=value, but got '{part}'; {EXAMPLE}")
        check_name("key of --dp", key, PrivacyConfig.__struct_fields__)
        try:
            found[key] = float(value) if key in ("clip", "noise", "delta") else value
        except ValueError:
            raise ConfigError(f"dp: {key} cannot be '{value}'; it takes a number") from None
    return found


def make_privacy(given: str | Mapping[str, Any]) -> PrivacyConfig:
    """Make the options of `--dp` from text or plain values, and check them."""
    plain = parse_privacy(given) if isinstance(given, str) else dict(given)
    for key in ("clip", "noise"):
        if key not in plain:
            raise ConfigError(f"--dp lacks {key}; {EXAMPLE}")
    try:
        config: PrivacyConfig = msgspec.convert(plain, PrivacyConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"dp cannot be used: {error}") from error
    if not 0 < config.delta < 1:
        raise ConfigError(f"dp: delta is {config.delta:g}; give a number between 0 and 1")
    if not 0 < config.clip <= MOST:
        raise ConfigError(f"dp: clip is {config.clip:g}; give a number above 0, at most {MOST:g}")
    if not 0 <= config.noise <= MOST:
        raise ConfigError(f"dp: noise is {config.noise:g}; give a number from 0 to {MOST:g}")
    return config


def need_accountant() -> None:
    """Raise a one-sentence error if dp-accounting is not installed."""
    if find_spec("dp_accounting") is None:
        raise not_installed("differential privacy", "dp-accounting", "privacy")


def with_privacy(method: Method, privacy: PrivacyConfig | None) -> Method:
    """Return the method, with clipped and noised updates if `privacy` is given."""
    if privacy is None:
        return method
    need_accountant()
    return Noised(method.net, method, privacy.clip, privacy.noise, privacy.delta)


def epsilon(precision: float, delta: float) -> float:
    """Return epsilon of Gaussian releases. `precision` is the sum of 1/z², or inf without noise."""
    if precision in (0, math.inf):
        return float(precision)
    import dp_accounting

    return float(dp_accounting.get_epsilon_gaussian(1 / math.sqrt(precision), delta))


def release(noise: float) -> float:
    """Return the amount that one release adds to the precision (`epsilon`): 1/z²."""
    return 1 / noise**2 if noise**2 else math.inf  # the square of a tiny number is 0


@dataclass(frozen=True)
class Spent:
    """The privacy that clients spent."""

    releases: int  # of the client that sent most
    least: int  # fewest clients of a round
    server: float  # epsilon against the server, which sees every update
    # Epsilon against all other parties, which see only the models. Another site knows its own
    # noise, so only the noise of the others protects against it.
    peers: float


def spent(noise: float, delta: float, ledgers: Sequence[Ledger]) -> Spent:
    """Return the privacy that the traffic in all these ledgers spent together."""
    sent = [e for ledger in ledgers for e in ledger.entries if e.step == "train" and e.up]
    clients = max((entry.runs[-1][1] for entry in sent), default=1)
    releases, shares = np.zeros(clients, dtype=np.int64), np.zeros(clients)
    for entry in sent:
        for first, end in entry.runs:
            releases[first:end] += 1
            shares[first:end] += 1 / max(entry.size - 1, 1)
    most, one = int(releases.max()), release(noise)
    least = min((entry.size for entry in sent), default=0)
    revealed = (one * most, one * float(shares.max())) if most else (0.0, 0.0)
    return Spent(most, least, *(epsilon(precision, delta) for precision in revealed))


def site_report(
    privacy: PrivacyConfig | None, sent: Sequence[float], total: float, delta: float
) -> dict[str, Any] | None:
    """Return a site's report on a run from the noise of its updates, or None without privacy.

    `total` is the precision of all of the site's runs, because a server may ask under another run's
    name. It is infinite if updates left without noise. `delta` is the largest the owner allows.
    """
    if privacy is None:
        return None
    delta = min(delta, privacy.delta)
    seen = math.inf if privacy.randomness == "seed" else sum(map(release, sent))
    found = epsilon(seen, delta)
    spent = f"epsilon {found:.3g}" if math.isfinite(found) else "epsilon is infinite"
    in_all = f"epsilon {epsilon(total, delta):.3g}"
    if math.isinf(total):
        in_all = "epsilon is infinite, because other updates or scores left without privacy,"
    return {
        **msgspec.to_builtins(privacy),
        "delta": delta,
        "epsilon_server": found if math.isfinite(found) else None,
        "releases": len(sent),
        "adjacency": ADJACENCY,
        "sampling": SAMPLING,
        "says": f"{spent} against the server and the other sites, at delta {delta:g}, by "
        f"this site's own account when the model came (clip {privacy.clip:g}, noise "
        f"{privacy.noise:g}, {len(sent)} updates in all seeds; {in_all} in all runs of this site)",
    }


def privacy_report(
    config: RunConfig, ledgers: Sequence[Ledger], clients: int, *, federated: bool = False
) -> dict[str, Any] | None:
    """Return a result's privacy report in plain values, or None without differential privacy.

    An infinite epsilon is None. On real sites (`federated`), all seeds used the same data, so
    their costs add up. In a simulation each seed counts separately, and the worst is reported.
    """
    if (privacy := config.dp) is None:
        return None
    groups = [list(ledgers)] if federated else [[ledger] for ledger in ledgers]
    every = [spent(privacy.noise, privacy.delta, group) for group in groups]
    found = max(every, key=lambda one: one.releases)
    server, peers = max(one.server for one in every), max(one.peers for one in every)
    if federated and privacy.randomness == "seed":
        server = peers = math.inf
        says = (
            "epsilon is infinite: the noise was drawn from the seed, which the server knows "
            "(randomness=seed is for tests)"
        )
    elif math.isinf(server):
        says = "epsilon is infinite: without noise, clipping hides nothing"
    else:
        says = (
            f"epsilon {server:.3g} against the server, {peers:.3g} against parties that see "
            f"only the models, at delta {privacy.delta:g}, for what training sends (clip "
            f"{privacy.clip:g}, noise {privacy.noise:g}, {found.releases} updates of the client "
            "that sent most)"
        )
    says += "" if privacy.delta * clients < 1 else f"; give a delta far below 1/{clients}"
    return {
        **msgspec.to_builtins(privacy),
        "epsilon_server": server if math.isfinite(server) else None,
        "epsilon_peers": peers if math.isfinite(peers) else None,
        "releases": found.releases,
        "rounds": config.rounds or 0,
        "clients": clients,
        "fraction": config.fraction,
        "least_in_a_round": found.least,
        "adjacency": ADJACENCY,
        "sampling": SAMPLING,
        "accountant": f"dp-accounting {metadata.version('dp-accounting')}, get_epsilon_gaussian",
        "simulated": not federated,
        "says": says,
    }
