"""Recipes as one word: `dirichlet:alpha=0.5`, `stratified:ratios=0.1/0.45/0.45`."""

from __future__ import annotations

from contextlib import suppress

from atoll.core.errors import ConfigError

Value = int | float | bool | str | tuple["Value", ...]
"""An option's value: a number, true or false, a word, or several of them with slashes."""


def parse_recipe(text: str) -> tuple[str, dict[str, Value]]:
    """A recipe's name and its options."""
    name, colon, rest = text.partition(":")
    options: dict[str, Value] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise ConfigError(
                f"'{text}' cannot be read; options follow the name as {name}:key=value,key=value"
            )
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
