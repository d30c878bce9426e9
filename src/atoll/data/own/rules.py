"""The rule for one column of a user's node table: `[columns.NAME]` of schema.toml, or `--own`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import date
from typing import Any, cast

from atoll.core.errors import ConfigError, check_name

OWN_CATEGORY = "own category"
SCALES = ("standard", "robust", "log", "range", "none")
FILLS = ("mean", "median", OWN_CATEGORY, "refuse")
PARTS = ("days", "year", "week", "day")
"""Parts of a date: days since a day, and the time in year, week and day on a circle."""
CHOICES = {
    "role": ("id", "label", "split", "owner", "feature", "ignore"),
    "kind": ("number", "category", "boolean", "date", "text"),
    "scale": SCALES,
    "missing": FILLS,
    "decimal": (".", ","),
}
LISTS = ("values", "parts", "empty")
SUITS = {
    "values": ("category",),
    "other": ("category",),
    "parts": ("date",),
    "since": ("date",),
    "format": ("date",),
    "decimal": ("number",),
    "scale": ("number", "date"),
    "range": ("number", "date"),
}
"""The kinds of columns that a key is for, if it is not for all."""


@dataclass(frozen=True)
class Rule:
    """The user's choices for one column. None leaves the choice to the default."""

    role: str | None = None
    kind: str | None = None
    scale: str | None = None
    missing: str | None = None
    values: tuple[str, ...] = ()  # all values of a category, in the order of their columns
    other: str | None = None  # the name of the column for all other values of a category
    parts: tuple[str, ...] = ()  # of a date, from PARTS
    since: str | None = None  # the day from which days are counted
    format: str | None = None  # of a date in a text, as in strptime
    decimal: str | None = None  # the decimal separator
    empty: tuple[str, ...] = ()  # texts that mean "no value"
    range: tuple[float, ...] = ()  # lowest and highest number, for scale = "range"

    @property
    def ignored(self) -> bool:
        """Whether the column is a text without a role. A text can still be an id or a label."""
        return self.kind == "text" and self.role in (None, "feature")

    @property
    def read_as_text(self) -> bool:
        """Whether a CSV reader must not infer the column's type."""
        return bool(self.kind == "category" or self.format or self.decimal == "," or self.empty)

    def over(self, other: Rule) -> Rule:
        """Return this rule, with open choices taken from another rule."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(other, **{name: value for name, value in given.items() if value})

    def settled(self, kind: str, scale: str | None, missing: str | None) -> Rule:
        """Return the rule with every choice made, for a column of this kind.

        `scale` and `missing` are the table's defaults.
        """
        fill = self.missing or missing or "refuse"
        if kind == "category":
            fill = fill if fill == "refuse" else OWN_CATEGORY
        scaled = kind in ("number", "date")
        return replace(
            self,
            kind=kind,
            missing=fill,
            scale=(self.scale or scale or "standard") if scaled else "none",
            parts=(self.parts or ("days",)) if kind == "date" else (),
            since=(self.since or "1970-01-01") if kind == "date" else None,
        )


def read_rule(raw: object, where: str) -> Rule:
    """Read and check a rule from a TOML table. `where` is its place in errors."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} is {raw!r}; write it as a section with keys such as kind")
    values: dict[str, Any] = {}  # str or tuple[str, ...], as the fields of Rule
    for key, value in raw.items():
        check_name(f"key of {where}", key, [f.name for f in fields(Rule)])
        if key == "range":
            values[key] = _range(value, where)
            continue
        if key in LISTS:
            if isinstance(value, str | int | float) or not all(isinstance(v, str) for v in value):
                raise ConfigError(f"{where} {key} is {value!r}; it must be a list of texts")
            values[key] = tuple(value)
            continue
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{where} {key} is {value!r}; it must be a text")
        if key in CHOICES:
            check_name(f"{key} of {where}", value, CHOICES[key])
        values[key] = value
    for part in values.get("parts", ()):
        check_name(f"part of {where}", part, PARTS)
    return Rule(**values)


def _range(value: object, where: str) -> tuple[float, ...]:
    given = value.split(",") if isinstance(value, str) else value
    try:
        low, high = (float(one) for one in cast("list[str]", given))
    except (TypeError, ValueError):
        low = high = 0.0
    if not -math.inf < low < high < math.inf:
        raise ConfigError(f"{where} range is {value!r}; give the lowest and the highest number")
    return low, high


def check_rule(rule: Rule, where: str) -> None:
    """Refuse keys that contradict each other, a repeated value, and an invalid date."""
    for key, kinds in SUITS.items():
        if getattr(rule, key) and rule.kind is not None and rule.kind not in kinds:
            problem = f"gives {key}, which is for a {' or a '.join(kinds)}"
            raise ConfigError(f"{where} {problem}, but kind is '{rule.kind}'; remove it")
        if getattr(rule, key) and rule.kind is None and len(kinds) == 1:
            raise ConfigError(f'{where} gives {key}; add kind = "{kinds[0]}"')
    if (rule.scale == "range") != bool(rule.range):
        raise ConfigError(f'{where}: scale = "range" and range = [LOW, HIGH] go together')
    if rule.kind == "category" and rule.missing in ("mean", "median"):
        problem = f"fills a category with the {rule.missing}, which only numbers have"
        raise ConfigError(f'{where} {problem}; give missing = "{OWN_CATEGORY}" or "refuse"')
    if rule.other is not None and rule.other in rule.values:
        advice = "give other a name that is no value"
        raise ConfigError(f"{where} names '{rule.other}' as a value and as other; {advice}")
    if len(set(rule.values)) < len(rule.values):
        raise ConfigError(f"{where} names a value twice; give each once")
    if rule.since is not None:
        try:
            date.fromisoformat(rule.since)
        except ValueError:
            raise ConfigError(f"{where} since is '{rule.since}'; give a day: 2020-01-31") from None


def rules_from_words(given: Mapping[str, object]) -> dict[str, Rule]:
    """Parse rules from options such as `age.scale=log`. List values are separated by commas."""
    raw: dict[str, dict[str, object]] = {}
    for words, value in given.items():
        name, _, key = words.rpartition(".")
        text = str(value)
        split = [part.strip() for part in text.split(",")] if key in LISTS else text
        raw.setdefault(name, {})[key] = split
    return {name: read_rule(one, f"--own {name}") for name, one in raw.items()}
