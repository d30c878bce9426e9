"""One encoder for several owners of tables: the statistics that each sends, and the agreement.

An owner sends no row. For a number it sends at most how many rows have one, their mean and the sum
of the squared deviations. For a category it sends the values. Kinds and rules must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from atoll.core.errors import ConfigError, DataError
from atoll.data.own.rules import OWN_CATEGORY, Rule
from atoll.data.own.schema import quoted, quoted_list

if TYPE_CHECKING:
    from atoll.data.own.encoder import Feature

MODES = ("federated", "local", "pooled")
TELLS = (
    "the names of columns and how they are read; for each number how many rows have one, their "
    "mean and, if they scale it, their squared deviations; for each category its values"
)
SCALED = ("standard", "log")  # scaled by the mean and the deviation of all rows
LARGEST = 1e100
Text = Annotated[str, Meta(max_length=1000)]
Values = Annotated[tuple[Text, ...], Meta(max_length=100_000)]


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The statistics of one column that one owner sends."""

    name: Text
    form: Text  # its kind and the choices that must be equal
    values: Values = ()  # of a category
    more: Values = ()  # names of the feature columns, except those of the values
    rows: Annotated[int, Meta(ge=0)] = 0  # rows that have a number
    mean: float = 0.0
    squares: Annotated[float, Meta(ge=0)] = 0.0  # sum of the squared deviations from the mean
    rest: float = 0.0  # sum of the deviations, which is zero up to rounding

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.mean, self.squares, self.rest))):
            raise ValueError(f"the statistics of column {quoted(self.name)} are not finite")
        # Features are 32-bit floats. Sums of the squares of these bounds are finite.
        if max(abs(self.mean), abs(self.rest)) > LARGEST or self.squares > LARGEST**2:
            raise ValueError(f"the statistics of column {quoted(self.name)} are too large")
        if self.rows and self.form.count(", ") < 2:  # kind, scale and treatment of missing values
            raise ValueError(f"the form of column {quoted(self.name)} is not complete")


class Agreed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The categories, or the scaling and the fill value, that all owners use for one column."""

    name: Text
    values: Values = ()
    centre: float = 0.0
    spread: Annotated[float, Meta(gt=0)] = 1.0
    fill: float = 0.0

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.centre, self.spread, self.fill))):
            raise ValueError(f"the statistics of column {quoted(self.name)} are not finite")


def needs(feature: Feature) -> str:
    """Return the statistic that a column needs: "nothing", "values", "sums" or "order" (median)."""
    rule = feature.rule
    if feature.kind == "category":
        return "nothing" if rule.values else "values"
    if feature.kind == "date" and "days" not in rule.parts:  # an angle needs no statistic
        return "nothing"
    if rule.scale == "robust" or rule.missing == "median":
        return "order"
    filled = rule.missing == "mean" or (rule.missing == OWN_CATEGORY and rule.scale != "range")
    return "sums" if rule.scale in SCALED or filled else "nothing"


def check_sums(features: Sequence[Feature]) -> None:
    """Refuse columns that need a median, because owners agree only on sums."""
    for name in (feature.name for feature in features if needs(feature) == "order"):
        problem = f"column '{name}' needs a median, which owners cannot agree on by sums"
        ways = 'scale = "standard" or "range" and missing = "mean" in schema.toml'
        raise ConfigError(f"{problem}; give {ways}, or --encoder local")


def check_declared(features: Sequence[Feature], *, numbers: bool = True) -> None:
    """Refuse, in a private run, categories whose values the schema does not declare.

    With `numbers`, the schema must also declare the ranges of numbers.
    """
    for feature in features:
        if (kind := needs(feature)) == "values" or (numbers and kind != "nothing"):
            told = "a private run tells no statistics of rows and no values of categories"
            keys = 'scale = "range", range = [LOW, HIGH] and missing = "own category" or "refuse"'
            where = f"under [columns.{feature.name}] of schema.toml"
            ways = f"{keys} {where}, or --encoder local"
            ways = f"values = [...] {where}" if kind == "values" else ways
            raise ConfigError(f"{told}; give {ways}")


def tell(feature: Feature, found: np.ndarray | None, values: tuple[str, ...] | None = None) -> Told:
    """Return an owner's statistics of a column.

    `found` are the numbers of its rows, NaN if missing. `values` are the values of a category, by
    default those of the feature.
    """
    rule = feature.rule
    choices = (rule.scale, rule.missing, rule.other, *rule.parts, rule.since, *map(str, rule.range))
    form = ", ".join(str(one) for one in (feature.kind, *choices) if one)
    if feature.kind == "category":
        more = feature.names[len(feature.values) :]
        return Told(feature.name, form, feature.values if values is None else values, tuple(more))
    told = feature.name, form, (), tuple(feature.names)
    if needs(feature) != "sums" or found is None:
        return Told(*told)
    known = found[~np.isnan(found)]
    mean = float(known.mean()) if known.size else 0.0
    away = known - mean
    squares = float((away**2).sum()) if rule.scale in SCALED else 0.0
    return Told(*told, known.size, mean, squares, float(away.sum()))


def in_words(told: Told) -> str:
    """Describe an owner's statistics of one column, for the owner to read."""
    kind = told.form.partition(", ")[0]
    found = f"values {quoted_list(told.values, 20)}" if kind == "category" else "no number"
    if told.rows:
        found = f"{told.rows} rows have one, mean {told.mean:.6g}"
        found += f", squared deviations {told.squares:.6g}" if told.squares else ""
    return f"{found} (read as {told.form})"


def feature_names(told: Sequence[Told], agreed: Sequence[Agreed]) -> list[str]:
    """Return the names of all feature columns after an agreement."""
    pairs = zip(told, agreed, strict=True)
    return [n for t, a in pairs for n in (*(f"{t.name}={v}" for v in a.values), *t.more)]


def agree(told: Mapping[str, Sequence[Told]]) -> tuple[Agreed, ...]:
    """Return the agreement on each column. `told` has each owner's statistics by the owner's name.

    Refuse owners whose columns or rules differ.
    """
    (first, ones), *others = told.items()
    for name, twos in others:
        if [c.name for c in ones] != [c.name for c in twos]:
            odd = sorted({c.name for c in ones} ^ {c.name for c in twos}) or [ones[0].name]
            differ = f"'{first}' and '{name}' differ in the column {quoted(odd[0])}"
            raise DataError(f"{differ}; all need the same feature columns in the same order")
        for one, two in zip(ones, twos, strict=True):
            if one.form != two.form:
                differ = f"({quoted(one.form, 80)} and {quoted(two.form, 80)})"
                problem = f"'{first}' and '{name}' read column {quoted(one.name)} differently"
                raise DataError(f"{problem} {differ}; give all the same schema.toml")
    return tuple(map(_agreed, zip(*told.values(), strict=True)))


def _agreed(told: Sequence[Told]) -> Agreed:
    name, (kind, *form) = told[0].name, told[0].form.split(", ")
    if kind == "category":
        return Agreed(name, tuple(dict.fromkeys(sorted({v for one in told for v in one.values}))))
    rows = sum(one.rows for one in told)
    if rows == 0:
        return Agreed(name)
    base = next(one.mean for one in told if one.rows)  # differences of means lose no digits
    shift = math.fsum(one.rows * (one.mean - base) + one.rest for one in told) / rows
    mean, squares = base + shift, 0.0
    for one in told:
        away = one.mean - base - shift
        squares += one.squares + 2 * away * one.rest + one.rows * away**2
    variance, eps = max(squares, 0.0) / rows, float(np.finfo(np.float64).eps)
    if not math.isfinite(variance + mean * mean):
        raise DataError(f"the statistics of column {quoted(name)} are too large; check its values")
    constant = variance <= rows * eps * variance + (rows * mean * eps) ** 2  # as scikit-learn
    spread = 1.0 if constant else math.sqrt(variance)
    fill = 0.0 if form[1] == "refuse" else mean
    scaled = form[0] in SCALED
    return Agreed(name, (), mean, spread, fill) if scaled else Agreed(name, fill=fill)


def with_agreed(features: Sequence[Feature], agreed: Sequence[Agreed]) -> tuple[Feature, ...]:
    """Return own features with the agreed values. Declared categories and ranges stay.

    A declared range may take only `fill`, the agreed mean for missing values.
    """
    if [f.name for f in features] != [a.name for a in agreed]:
        raise DataError("the agreed columns differ from the columns of the tables; agree again")
    taken = {"values": ("values",), "sums": ("centre", "spread", "fill"), "range": ("fill",)}
    wanted = ["range" if f.rule.range and needs(f) == "sums" else needs(f) for f in features]
    return tuple(
        replace(own, **{name: getattr(one, name) for name in taken.get(key, ())})
        for own, one, key in zip(features, agreed, wanted, strict=True)
    )


def declared(rule: Rule) -> tuple[float, float, float]:
    """Return centre, spread and fill of a declared range, which is scaled to -1 to 1."""
    low, high = rule.range
    return (low + high) / 2, (high - low) / 2, (low + high) / 2
