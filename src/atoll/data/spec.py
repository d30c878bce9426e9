"""Recipes as one word, such as `dirichlet:alpha=0.5`, and checks of their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from atoll.core.errors import ConfigError, unknown

Value = int | float | bool | str | tuple["Value", ...]
"""A number, true or false, a word, or several of them separated by slashes (0.1/0.45/0.45)."""


def parse_recipe(text: str) -> tuple[str, dict[str, Value]]:
    """Return a recipe's name and its options."""
    name, colon, rest = text.partition(":")
    options: dict[str, Value] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            advice = f"options follow the name as {name}:key=value,key=value"
            raise ConfigError(f"'{text}' cannot be read; {advice}")
        options[key] = _value(value)
    return name, options


def _value(text: str) -> Value:
    if "/" in text:
        return tuple(_value(part) for part in text.split("/"))
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def options_of(recipe: Callable[..., object]) -> dict[str, Value | None]:
    """Return a recipe's options with their defaults: its keyword-only arguments."""
    parameters = inspect.signature(recipe).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse all values except integers of at least `least`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= least
    if not whole:
        raise ConfigError(f"{name} must be a whole number of at least {least}, but is {value!r}")


def check_seed(seed: int) -> None:
    """Refuse a seed that one of the generators does not accept."""
    check_whole("seed", seed, 0)
    if seed >= 2**32:  # the limit of NumPy's old generator, which the public codes use
        raise ConfigError(f"seed must be below 2**32, but is {seed}")


def check_positive(name: str, value: object) -> None:
    """Refuse all values except finite numbers above zero."""
    kinds = int | float | np.integer | np.floating
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < np.inf:
        raise ConfigError(f"{name} must be a number above 0, but is {value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuse all values except true and false. The text "false" would otherwise be true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, but is {value!r}")


def check_compat(given: str | None, *allowed: str) -> None:
    """Refuse a `compat` name that this recipe does not support."""
    if given is not None and given not in allowed:
        raise unknown("compat", str(given), allowed)
