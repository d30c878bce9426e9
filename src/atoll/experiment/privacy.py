"""What `--dp` asks for, and what a result says about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Literal

import msgspec

from atoll.core.dp import Noised
from atoll.core.errors import ConfigError, unknown
from atoll.core.method import Method
from atoll.engines.ledger import Ledger
from atoll.experiment.accounting import ADJACENCY, SAMPLING, need_accountant, spent


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
        "epsilon_server": _finite(server),
        "epsilon_peers": _finite(peers),
        "releases": found.releases,
        "rounds": rounds,
        "clients": clients,
        "fraction": fraction,
        "least_in_a_round": found.least,
        "adjacency": ADJACENCY,
        "sampling": SAMPLING,
        "accountant": f"dp-accounting {metadata.version('dp-accounting')}, get_epsilon_gaussian",
        "simulated": not federated,
        "says": _says(privacy, server, peers, found.releases, broken)
        + ("" if privacy.delta * clients < 1 else f"; give a delta far below 1/{clients}"),
    }


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
