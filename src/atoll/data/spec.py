"""Recipes as one word: `dirichlet:alpha=0.5`, `stratified:ratios=0.1/0.45/0.45`."""

from __future__ import annotations

from typing import Any

from atoll.core.errors import ConfigError


def parse_recipe(text: str) -> tuple[str, dict[str, Any]]:
    """A recipe's name and its options: numbers, true or false, words, numbers with slashes."""
    name, colon, rest = text.partition(":")
    options: dict[str, Any] = {}
    if not colon:
        return name, options
    for item in rest.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise ConfigError(
                f"'{text}' cannot be read; options follow the name as {name}:key=value,key=value"
            )
        options[key] = _value(value)
    return name, options


def _value(text: str) -> Any:
    if "/" in text:
        return tuple(_value(part) for part in text.split("/"))
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
