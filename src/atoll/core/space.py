"""Search spaces of hyper-parameters: `space = USUAL | {"mu": Real(1e-4, 10, log=True)}`.

A method declares `space` (for `atoll tune`), `grids` (other named spaces) and `presets` (named
values for `--set preset=NAME`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from atoll.core.errors import ConfigError

Value = bool | int | float | str
Settings = Mapping[str, Value]  # values of hyper-parameters, with the keys of `--set`
Presets = Mapping[str, Settings]
N = TypeVar("N", float, int)


def preset_table(*keys: str, **rows: tuple[Value, ...]) -> Presets:
    """Make presets that set the same keys: one row of values per name."""
    return {name: dict(zip(keys, row, strict=True)) for name, row in rows.items()}


@dataclass(frozen=True)
class _Interval(Generic[N]):
    """Numbers from `low` to `high`, both included. With `log` the scale is logarithmic."""

    low: N
    high: N
    log: bool = False

    def __post_init__(self) -> None:
        low, high = self.low, self.high
        if not low < high:
            raise ConfigError(f"a range goes from a lower to a higher number, not {low} to {high}")
        if self.log and low <= 0:
            raise ConfigError(f"a logarithmic range begins above 0, not at {low}")


class Real(_Interval[float]):
    """A number from `low` to `high`. With `log` all orders of magnitude are equally likely."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}{':log' if self.log else ''}"


class Whole(_Interval[int]):
    """A whole number from `low` to `high`, both included."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low}..{self.high}{':log' if self.log else ''}"


@dataclass(frozen=True)
class OneOf:
    """One of a few values without an order."""

    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values):
            raise ConfigError(f"a choice needs different values, but has {list(self.values)}")

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return ",".join(map(str, self.values))


Range = Real | Whole | OneOf
Space = Mapping[str, Range]
Grids = Mapping[str, Space]


def paper_grid(**values: tuple[Value, ...]) -> Grids:
    """Make the grid "paper" of a method: the values that its authors tried."""
    return {"paper": {name: OneOf(tried) for name, tried in values.items()}}


USUAL: MappingProxyType[str, Range] = MappingProxyType(
    {
        "lr": Real(1e-4, 1e-1, log=True),
        "weight_decay": Real(1e-6, 1e-2, log=True),
        "dropout": Real(0, 0.8),
        "hidden": OneOf((32, 64, 128, 256)),
    }
)
"""The default space: learning rate and weight decay for Adam, the network's dropout and width."""
USUAL_SGD = MappingProxyType(USUAL | {"lr": Real(1e-2, 1, log=True)})
"""The same for methods that train with plain SGD, whose learning rates are larger."""


def values_of(wanted: Range) -> tuple[Value, ...] | None:
    """Return all values of a range, or None for real numbers."""
    if isinstance(wanted, OneOf):
        return wanted.values
    return tuple(range(wanted.low, wanted.high + 1)) if isinstance(wanted, Whole) else None
