"""What `--dp` asks for, and what a run with it has spent.

The account is Google's (`dp-accounting`). A client's releases are Gaussian mechanisms: k of them
with multiplier z tell as much as one with z / √k, whose epsilon at a given delta is known exactly.
Neighbours are two federations, in one of which a client's updates are all zero. Who takes part in a
round follows from the seed, so it is taken as known: a client is charged for the rounds that it was
drawn in, and no amplification by sampling is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal

import msgspec
import numpy as np

from atoll.core.errors import ConfigError, unknown
from atoll.core.method import Method
from atoll.core.noised import Noised
from atoll.engines.ledger import Ledger

ADJACENCY = "one client's updates are all zero (zero-out)"
SAMPLING = "who is drawn is taken as known; the client drawn most often; no amplification"


class PrivacyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Client-level differential privacy.

    Attributes:
        clip: C, the largest norm of one client's update.
        noise: z: every client adds noise of standard deviation z C to each parameter.
        delta: The probability that epsilon does not hold.
        scores: Whether sites tell the server their scores, in the clear and outside epsilon, or
            keep them in a file of their own. In a simulation scores are the experimenter's.
        randomness: Where a site's noise comes from: the "site" itself, so that nobody else can take
            it off again, or the "seed", as in a simulation, which protects nobody: for tests.
    """

    clip: float
    noise: float
    delta: float = 1e-5
    scores: Literal["kept", "told"] = "kept"
    randomness: Literal["site", "seed"] = "site"


def parse_privacy(text: str) -> dict[str, Any]:
    """`clip=1,noise=1.1,delta=1e-5` as plain values."""
    known = PrivacyConfig.__struct_fields__
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not key:
            raise ConfigError(
                f"--dp takes key=value, but got '{part}'; write --dp clip=1,noise=1.1,delta=1e-5"
            )
        if key not in known:
            raise unknown("key of --dp", key, known)
        found[key] = value
        if key in ("clip", "noise", "delta"):
            try:
                found[key] = float(value)
            except ValueError:
                raise ConfigError(f"dp: {key} cannot be '{value}'; it takes a number") from None
    return found


def make_privacy(given: str | Mapping[str, Any]) -> PrivacyConfig:
    """The options, checked; what the numbers may be is the mechanism's own business."""
    plain = parse_privacy(given) if isinstance(given, str) else dict(given)
    for key in ("clip", "noise"):
        if key not in plain:
            raise ConfigError(f"--dp lacks {key}; write --dp clip=1,noise=1.1,delta=1e-5")
    try:
        config: PrivacyConfig = msgspec.convert(plain, PrivacyConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"dp cannot be used: {error}") from error
    if not 0 < config.delta < 1:
        raise ConfigError(f"dp: delta is {config.delta:g}; give a number between 0 and 1")
    if not 0 < config.clip < math.inf:
        raise ConfigError(f"dp: clip is {config.clip:g}; give a finite number above 0")
    if not 0 <= config.noise < math.inf:
        raise ConfigError(f"dp: noise is {config.noise:g}; give a finite number, not negative")
    return config


def with_privacy(method: Method, privacy: PrivacyConfig | None) -> Method:
    """The method, with clipped and noised updates if that was asked for."""
    if privacy is None:
        return method
    need_accountant()
    return Noised(
        net=method.net, base=method, clip=privacy.clip, noise=privacy.noise, delta=privacy.delta
    )


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
    return 1 / noise**2 if noise else math.inf


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
        most, min((entry.size for entry in sent), default=0),
        epsilon(one * most if most else 0.0, delta),
        epsilon(one * float(shares.max()) if most else 0.0, delta),
    )  # fmt: skip


def privacy_report(
    privacy: PrivacyConfig,
    ledgers: Sequence[Ledger],
    *,
    clients: int,
    fraction: float,
    rounds: int,
    federated: bool,
) -> dict[str, Any]:
    """What a result says about privacy, in plain values; an infinite epsilon is None.

    Args:
        privacy: What was asked for.
        ledgers: One for each seed.
        clients: How many there are.
        fraction: Share of them in a round.
        rounds: Of one seed.
        federated: Whether real sites ran all seeds on the same data, so that they add up; of a
            simulation's seeds each stands for itself, and the worst counts.
    """
    groups = [list(ledgers)] if federated else [[ledger] for ledger in ledgers]
    every = [spent(privacy.noise, privacy.delta, group) for group in groups]
    found = max(every, key=lambda one: one.releases)
    broken = federated and privacy.randomness == "seed"
    server, peers = (
        math.inf if broken else max(getattr(one, who) for one in every)
        for who in ("server", "peers")
    )
    return {
        **msgspec.to_builtins(privacy),
        "epsilon_server": _finite(server), "epsilon_peers": _finite(peers),
        "releases": found.releases, "rounds": rounds, "clients": clients, "fraction": fraction,
        "least_in_a_round": found.least, "adjacency": ADJACENCY, "sampling": SAMPLING,
        "accountant": f"dp-accounting {metadata.version('dp-accounting')}, get_epsilon_gaussian",
        "simulated": not federated,
        "says": _says(privacy, server, peers, found.releases, broken)
        + ("" if privacy.delta * clients < 1 else f"; give a delta far below 1/{clients}"),
    }  # fmt: skip


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _says(privacy: PrivacyConfig, server: float, peers: float, releases: int, broken: bool) -> str:
    """The report in a sentence or two."""
    if broken:
        return (
            "epsilon is infinite: the noise was drawn from the seed, which the server knows "
            "(randomness=seed is for tests)"
        )
    if math.isinf(server):
        return "epsilon is infinite: without noise, clipping alone hides nothing"
    return (
        f"epsilon {server:.3g} against the server, {peers:.3g} against those who see the models "
        f"alone, at delta {privacy.delta:g}, for what training sends (clip {privacy.clip:g}, noise "
        f"{privacy.noise:g}, {releases} updates of the client that sent most)"
    )
