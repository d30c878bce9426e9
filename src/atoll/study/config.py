"""A run's configuration: typed, complete, saved with every result.

What is left open (None) is filled in by `resolve` from the protocol and the data, so that a saved
configuration names every choice. Precedence: command line, file, protocol, the method's own
defaults.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from atoll.core.errors import ConfigError, unknown
from atoll.core.method import Method
from atoll.core.optim import OPTIMIZERS
from atoll.data.federate import DEGENERATE
from atoll.data.source import Source
from atoll.methods import method_class
from atoll.nn import NETS
from atoll.study.experiment import SCORED
from atoll.study.protocols import COMPAT, Protocol, protocol

Value = bool | int | float | str


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that decides a run's numbers, and where it runs. None: the protocol decides."""

    method: str = "fedavg"
    data: str = "lagoon"
    clients: int | None = None
    partition: str | None = None
    split: str | None = None
    ratios: tuple[float, float, float] | None = None
    protocol: str = "strict"
    rounds: int | None = None
    epochs: int | None = None
    fraction: float = 1.0
    seeds: int = 1
    seed: int = 0
    engine: str = "auto"
    device: str = "auto"
    chunk: int = 0
    set: dict[str, Value] = {}
    compat: tuple[str, ...] = ()
    evaluate: str | None = None
    allow: tuple[str, ...] = ()
    data_root: str | None = None
    schema: str | None = None
    own: dict[str, Value] = {}


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a TOML file, checked."""
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}") from error
    known = RunConfig.__struct_fields__
    for key in raw:
        if key not in known:
            raise unknown(f"key in {path}", key, known)
    make_config(**raw)
    return raw


def make_config(**given: Any) -> RunConfig:
    """A configuration from plain values; wrong types and impossible numbers are errors."""
    known = RunConfig.__struct_fields__
    for key in given:
        if key not in known:
            raise unknown("option", key, known)
    try:
        config: RunConfig = msgspec.convert(given, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the configuration cannot be used: {error}") from error
    for name in ("clients", "rounds", "epochs", "seeds"):
        number = getattr(config, name)
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}; give a whole number of at least 1")
    if not 0 < config.fraction <= 1:
        raise ConfigError(f"fraction is {config.fraction}; give a number above 0 and up to 1")
    if not 0 <= config.seed < 2**31:
        raise ConfigError(f"seed is {config.seed}; give a whole number from 0 to 2147483647")
    if config.chunk < 0:
        raise ConfigError(f"chunk is {config.chunk}; give 0 (choose) or a number of clients")
    return config


def write_config(config: RunConfig, path: Path) -> None:
    """Save a configuration as TOML; what is None is left out."""
    path.write_text(config_text(config))


def config_text(config: RunConfig) -> str:
    """A configuration as TOML."""
    plain = {k: v for k, v in msgspec.to_builtins(config).items() if v is not None}
    return tomli_w.dumps(plain)


def resolve(config: RunConfig) -> tuple[RunConfig, Protocol]:
    """Fill in what the protocol and the kind of data decide; check every name."""
    method_class(config.method)
    rules = protocol(config.protocol)
    for name in config.compat:
        if name not in COMPAT:
            raise unknown("compat switch", name, COMPAT)
    for name in config.allow:
        if name not in DEGENERATE:
            raise unknown("value of --allow", name, DEGENERATE)
    evaluate = config.evaluate or rules.evaluate
    if evaluate not in SCORED:
        raise unknown("value of --evaluate", evaluate, SCORED)
    built_in = config.data.partition(":")[0] == "lagoon"
    own = dict(config.own)
    if config.partition and config.partition.startswith("column:") and not built_in:
        # The column that names the owner is not a feature.
        own.setdefault("owner", config.partition.partition(":")[2])
    partition = config.partition or ("column:owner" if built_in else rules.partition)
    by_column = partition.startswith("column:") and not built_in
    filled = msgspec.structs.replace(
        config,
        clients=config.clients if by_column else config.clients or rules.clients,
        partition=partition,
        split=config.split or rules.split,
        ratios=config.ratios or rules.ratios,
        rounds=config.rounds or rules.rounds,
        epochs=config.epochs or rules.epochs,
        evaluate=evaluate,
        set={**rules.settings, **config.set},
        own=own,
    )
    return filled, rules


def with_own_partition(config: RunConfig, source: Source, asked: str | None) -> RunConfig:
    """A user's own graph that names its owners is divided by them, unless asked otherwise."""
    if asked is None and "client" in source.columns:
        return msgspec.structs.replace(config, partition="column:client", clients=None)
    return config


def build_method(config: RunConfig, features: int, classes: int) -> Method:
    """The method of a resolved configuration, with its network and optimizer."""
    cls = method_class(config.method)
    settings = dict(config.set)
    net_name = str(settings.pop("net", "gcn")).lower()
    if net_name not in NETS:
        raise unknown("net", net_name, NETS)
    optimizer_name = str(settings.pop("optimizer", "adam")).lower()
    if optimizer_name not in OPTIMIZERS:
        raise unknown("optimizer", optimizer_name, OPTIMIZERS)
    net = NETS[net_name](features=features, classes=classes)
    method: Any = cls(net=net)
    parts: dict[str, Any] = {"method": method, "net": net}
    if "optimizer" in _names(method):
        parts["optimizer"] = OPTIMIZERS[optimizer_name]()
    if "epochs" in _names(method):
        settings.setdefault("epochs", config.epochs or 3)
    for key, value in settings.items():
        owner, name = _owner(key, parts, config.method)
        parts[owner] = _with(parts[owner], name, value)
    changes = {name: part for name, part in parts.items() if name != "method"}
    built: Method = replace(parts["method"], **changes)
    return built


_FIXED = ("features", "classes", "net", "optimizer")


def _names(part: Any) -> list[str]:
    return [f.name for f in fields(part)]


def _owner(key: str, parts: Mapping[str, Any], method: str) -> tuple[str, str]:
    """Which part a key belongs to: `hidden`, or `net.hidden` to be exact."""
    part, dot, name = key.partition(".")
    if dot and part in parts and name in _names(parts[part]) and name not in _FIXED:
        return part, name
    for owner, candidate in parts.items():
        if key in _names(candidate) and key not in _FIXED:
            return owner, key
    keys = [n for part in parts.values() for n in _names(part) if n not in _FIXED]
    raise unknown(f"hyper-parameter of {method}", key, [*keys, "net", "optimizer"])


def _with(part: Any, name: str, value: Value) -> Any:
    """The part with one hyper-parameter changed, converted to its type."""
    assert is_dataclass(part)
    kind = get_type_hints(type(part))[name]
    try:
        converted = msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        wanted = (
            " or ".join(map(str, get_args(kind)))
            if get_origin(kind) is Literal
            else getattr(kind, "__name__", str(kind))
        )
        raise ConfigError(f"{name} cannot be '{value}'; it takes {wanted}") from None
    low, high, words = LIMITS.get(name, (None, None, ""))
    if isinstance(converted, int | float) and not isinstance(converted, bool):
        outside = (low is not None and converted < low) or (high is not None and converted >= high)
        if outside or math.isnan(converted):
            raise ConfigError(f"{name} is {converted}; {words}")
    return replace(part, **{name: converted})  # type: ignore[type-var]  # a dataclass, see above


LIMITS: dict[str, tuple[float | None, float | None, str]] = {
    "dropout": (0, 1, "give a number from 0 up to, not including, 1"),
    "lr": (1e-12, 1e6, "give a positive learning rate"),
    "weight_decay": (0, None, "it cannot be negative"),
    "momentum": (0, 1, "give a number from 0 up to, not including, 1"),
    "mu": (0, None, "it cannot be negative"),
    "hidden": (1, None, "give at least 1"),
    "layers": (1, None, "give at least 1"),
    "heads": (1, None, "give at least 1"),
    "hops": (1, None, "give at least 1"),
    "epochs": (1, None, "give at least 1"),
}
"""Ranges of hyper-parameters that several methods and networks share: at least, below, in words."""
