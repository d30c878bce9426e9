"""Hyper-parameters: a dataclass field declares its meaning and its range with `Annotated`.

    mu: Annotated[NonNegative, "weight of the pull towards the received model"] = 0.01

`atoll methods`, the documentation, errors and the tuner read these declarations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from atoll.core.errors import ConfigError, unknown


@dataclass(frozen=True)
class Limits:
    """The valid range of a hyper-parameter. Infinite numbers are never valid.

    The bounds `low` and `high` are valid, `above` and `below` are not. Errors describe the range by
    `words`, or else by the numbers.
    """

    low: float = -math.inf
    above: float = -math.inf
    high: float = math.inf
    below: float = math.inf
    words: str = ""

    def __contains__(self, number: float) -> bool:
        inside = self.low <= number <= self.high and self.above < number < self.below
        return inside and math.isfinite(number)

    def __str__(self) -> str:
        if self.words:
            return self.words
        if self.below < math.inf:
            return f"a number from {self.low:g} up to, not including, {self.below:g}"
        if self.high < math.inf:
            return f"a number from {self.low:g} to {self.high:g}"
        return "a finite number that is not negative" if self.low == 0 else "a finite number"


Positive = Annotated[float, Limits(above=0, words="a positive number")]
NonNegative = Annotated[float, Limits(low=0)]
Share = Annotated[float, Limits(low=0, high=1)]
ShareBelowOne = Annotated[float, Limits(low=0, below=1)]
LearningRate = Annotated[
    float, Limits(low=1e-12, below=1e6, words="a learning rate between 0 and a million")
]
OneOrMore = Annotated[int, Limits(low=1, words="at least 1")]
ZeroOrMore = Annotated[int, Limits(low=0, words="0 or more")]

Epochs = Annotated[OneOrMore, "passes over a client's training nodes, or graphs, per round"]
WeightBy = Annotated[
    Literal["nodes", "train", "uniform"],
    "a client's weight in the mean: its nodes (or graphs), its training ones, or 1",
]
OptimizerState = Annotated[
    Literal["keep", "reset"], "whether a client keeps the optimizer's moments between rounds"
]
Sharpness = Annotated[
    float,
    Limits(low=0, below=1e6, words="a number from 0 to a million"),
    "τ: how sharply similarity decides a client's mixture",
]
Width = Annotated[int, Limits(low=1, high=10**6, words="from 1 to a million")]
WidthOrNone = Annotated[int, Limits(low=0, high=10**6, words="from 0 to a million")]
Hidden = Annotated[OneOrMore, "width of the hidden layers"]
Layers = Annotated[OneOrMore, "number of layers"]
Dropout = Annotated[ShareBelowOne, "share of a layer's inputs that training drops"]


@dataclass(frozen=True)
class Hyper:
    """One hyper-parameter of a method, a network, an optimizer or a rule."""

    name: str
    kind: object  # the type, without the annotations
    default: object  # `dataclasses.MISSING` if the field has no default
    meaning: str  # one line; empty if the field is not a hyper-parameter
    limits: Limits | None  # None if every value of the type is valid

    @property
    def allowed(self) -> str:
        """The valid values as text."""
        if get_origin(self.kind) is Literal:
            return " or ".join(map(str, get_args(self.kind)))
        if self.kind is bool:
            return "true or false"
        return str(self.limits or ("a whole number" if self.kind is int else "a finite number"))

    def check(self, value: object) -> None:
        """Raise an error for an unknown choice, and for a non-finite or out-of-range number."""
        if get_origin(self.kind) is Literal and value not in get_args(self.kind):
            raise unknown(self.name, str(value), list(map(str, get_args(self.kind))))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        limits = self.limits or Limits()
        if value not in limits:
            about = f" ({self.meaning})" if self.meaning else ""
            raise ConfigError(f"{self.name} is {value}; give {limits}{about}")


def hypers(cls: type[object]) -> dict[str, Hyper]:
    """Return all fields of a dataclass by name, as hyper-parameters."""
    return _hypers(cls)  # type: ignore[arg-type]  # mypy misses that a class has a hash


@cache
def _hypers(cls: type) -> dict[str, Hyper]:
    hints, found = get_type_hints(cls, include_extras=True), {}
    for field in fields(cls):
        kind, notes = hints[field.name], list[object]()
        if get_origin(kind) is Annotated:
            kind, *notes = get_args(kind)
        # The notes of a named type come first, so the last note belongs to the field.
        limits = next((note for note in reversed(notes) if isinstance(note, Limits)), None)
        meaning = next((note for note in reversed(notes) if isinstance(note, str)), "")
        found[field.name] = Hyper(field.name, kind, field.default, meaning, limits)
    return found


def check_hypers(part: object) -> None:
    """Raise an error if a field of a dataclass has an invalid value."""
    for name, hyper in hypers(type(part)).items():
        hyper.check(getattr(part, name))
