"""From what a method declares, and what the user narrows, to the space of one search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from atoll.core.errors import ConfigError, unknown
from atoll.core.method import Method
from atoll.core.space import OneOf, Range, Real, Space, Value, Whole, values_of
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig
from atoll.methods import METHODS, method_class


def parse_range(key: str, text: str) -> Range:
    """`1e-4..1e-1:log`, `1..5` or `32,64,128`."""
    ends, _, scale = text.partition(":")
    low, dots, high = ends.partition("..")
    if not dots:
        values = tuple(_value(part) for part in text.split(","))
        if "" in values:
            raise _unreadable(key, text)
        return OneOf(values)
    first, last = _value(low), _value(high)
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (first, last))
    if not numbers or scale not in ("", "log"):
        raise _unreadable(key, text)
    if isinstance(first, int) and isinstance(last, int):
        return Whole(first, last, log=scale == "log")
    return Real(first, last, log=scale == "log")  # type: ignore[arg-type]  # both are numbers


def _unreadable(key: str, text: str) -> ConfigError:
    return ConfigError(
        f"--search {key} cannot be '{text}'; write {key}=LOW..HIGH, {key}=LOW..HIGH:log or "
        f"{key}=A,B,C"
    )


def _value(text: str) -> Value:
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def space_of(
    asked: RunConfig,
    config: RunConfig,
    task: str,
    preset: str | None = None,
    search: Mapping[str, Range] | None = None,
) -> tuple[dict[str, Range], list[str]]:
    """What is searched for one method, and what was left out, in words.

    Args:
        asked: As the user gave it; what it sets is not searched.
        config: The same, resolved.
        task: What is classified.
        preset: One of the method's `grids`; None takes its `space`.
        search: Ranges by the user, in the place of the method's or beside them.
    """
    cls, name = method_class(config.method), config.method
    declared: Space = cls.space if preset is None else _grid(cls, name, preset)
    search = search or {}
    wanted = {**declared, **search}
    method = build_method(config, 1, 2, task)
    known = {key for part in _parts(method) for key in _names(part)}
    fixed = {key.rpartition(".")[2] for key in asked.set}
    fixed |= {"epochs"} if asked.epochs is not None else set()
    chose = {"net", "optimizer"} & fixed
    space: dict[str, Range] = {}
    notes = []
    for key, values in wanted.items():
        if key in fixed and key not in search:
            continue  # the user's word
        if key in fixed:
            raise ConfigError(f"{key} is both fixed and in --search; give one of the two")
        if key in known:
            space[key] = values
        elif key in search or not chose:
            raise unknown(f"hyper-parameter of {name}", key, known)
        else:
            notes.append(f"{name}: {key} is not searched, because {' and '.join(chose)} has none")
    if not space:
        raise ConfigError(f"{name} has nothing left to search; leave out a --set, or add --search")
    _check_values(config, task, space)
    return space, notes


def _grid(cls: type[Method], name: str, preset: str) -> Space:
    if preset in cls.grids:
        return cls.grids[preset]
    if cls.grids:
        raise unknown(f"preset of the search for {name}", preset, cls.grids)
    able = ", ".join(other for other, found in METHODS.items() if preset in found.grids)
    raise ConfigError(
        f"{name} has no published grid to search; leave out --preset {preset}, which is for: {able}"
    )


def _check_values(config: RunConfig, task: str, space: Mapping[str, Range]) -> None:
    """Every value of a choice and both ends of a range must be possible, before anything is run."""
    for key, wanted in space.items():
        ends = wanted.values if isinstance(wanted, OneOf) else (wanted.low, wanted.high)
        for value in ends:
            changed = msgspec.structs.replace(config, set={**config.set, key: value})
            try:
                build_method(changed, 1, 2, task)
            except ConfigError as error:
                raise ConfigError(
                    f"{config.method} cannot search {key}={wanted}: {error}"
                ) from None


def defaults_of(config: RunConfig, task: str, space: Mapping[str, Range]) -> dict[str, Value]:
    """What the method would take by itself, where that lies in the space."""
    method = build_method(config, 1, 2, task)
    found: dict[str, Value] = {}
    for key, wanted in space.items():
        owner = next(part for part in _parts(method) if key in _names(part))
        value = getattr(owner, key)
        if value in wanted:
            found[key] = value
    return found


def grid_of(space: Mapping[str, Range], most: int) -> list[dict[str, Value]] | None:
    """All points of a space that has at most so many; None if it has more."""
    axes = [values_of(wanted) for wanted in space.values()]
    if any(axis is None for axis in axes):
        return None
    values = [axis for axis in axes if axis is not None]
    if math.prod(map(len, values)) > most:
        return None
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*values)]


def _parts(method: Any) -> list[Any]:
    """Method, network, optimizer and base, in the order in which `--set` looks for a key."""
    names = ("net", "base", "optimizer")
    inner = [getattr(method, name, None) for name in names]
    return [method, *(part for part in inner if is_dataclass(part))]


def _names(part: Any) -> list[str]:
    skipped = ("net", "optimizer", "base", "features", "classes")
    return [f.name for f in fields(part) if f.name not in skipped]
