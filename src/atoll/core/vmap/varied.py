"""Hyper-parameters that differ between the runs of a sweep.

Runs that differ only in numbers are one program: `vmap` over the runs carries the numbers in the
same way as models. A `Varied` replaces a number. Arithmetic with it rounds as with a Python number
and does not change a tensor's dtype. A comparison returns the answer that all runs share. If the
answers differ, or code needs one plain number, `Undecided` is raised.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils import _pytree as pytree

T = TypeVar("T")


class Undecided(Exception):
    """Raised with the reason why runs with different hyper-parameters cannot be one program."""


Operand = object  # a number, a tensor, or another `Varied`
Result = Any  # a Varied, a tensor, or a boolean: no type checker can decide which
Args = tuple[object, ...]
Kwargs = dict[str, object] | None
Operator = Callable[["Varied", Operand], Result]


def _arithmetic(op: Callable[[Any, Any], Any]) -> tuple[Operator, Operator]:
    """Return an operator and its reflected form."""
    return lambda x, other: x._apply(op, x, other), lambda x, other: x._apply(op, other, x)


def _question(op: Callable[[Any, Any], bool]) -> Operator:
    return lambda x, other: x._ask(op, other)


class Varied:
    """A number that differs between runs, with its name, all values and the current run's value."""

    def __init__(self, name: str, values: Sequence[float], tensor: Tensor) -> None:
        self.name, self.values, self._tensor = name, tuple(values), tensor
        self._level = _functorch.maybe_get_level(tensor)

    @property
    def tensor(self) -> Tensor:
        """This run's number as a float64 scalar."""
        if self._level not in [x.level() for x in _functorch.get_interpreter_stack() or []]:
            raise Undecided(f"an operation takes {self.name} as a constant")
        return self._tensor

    def to(self, dtype: torch.dtype) -> Tensor:
        """This run's number in another dtype."""
        return self.tensor.to(dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Result], types: object, args: Args = (), kwargs: Kwargs = None
    ) -> Result:
        # Torch calls this for every operation that has a Varied among its arguments.
        flat, spec = pytree.tree_flatten((args, kwargs or {}))
        beside = [leaf.dtype for leaf in flat if isinstance(leaf, Tensor)]
        floats = [dtype for dtype in beside if dtype.is_floating_point]
        dtype = (*floats, torch.get_default_dtype())[0]
        plain = [leaf.to(dtype) if isinstance(leaf, Varied) else leaf for leaf in flat]
        args, kwargs = pytree.tree_unflatten(plain, spec)
        return func(*args, **kwargs)

    def _apply(self, op: Callable[[Any, Any], Result], one: Any, two: Any) -> Result:
        """Apply an operation to two numbers, or to a number and a tensor."""
        if isinstance(one, Tensor) or isinstance(two, Tensor):
            other = one if isinstance(one, Tensor) else two
            dtype = other.dtype if other.is_floating_point() else torch.get_default_dtype()
            return op(*(p.to(dtype) if isinstance(p, Varied) else p for p in (one, two)))
        values = [op(a, b) for a, b in zip(self._each(one), self._each(two), strict=True)]
        mine = (part.tensor if isinstance(part, Varied) else float(part) for part in (one, two))
        return Varied(self.name, values, op(*mine))

    def _each(self, part: Operand) -> Sequence[object]:
        return part.values if isinstance(part, Varied) else [part] * len(self.values)

    def _ask(self, question: Callable[[Any, Any], bool], other: Operand) -> Result:
        """Return the answer that all runs share, or for a tensor each run's elementwise answer."""
        if isinstance(other, Tensor):
            return self._apply(question, self, other)
        answers = {question(a, b) for a, b in zip(self.values, self._each(other), strict=True)}
        if len(answers) > 1:
            raise Undecided(f"{self.name} decides what is computed")
        return answers.pop()

    __add__, __radd__ = _arithmetic(operator.add)
    __sub__, __rsub__ = _arithmetic(operator.sub)
    __mul__, __rmul__ = _arithmetic(operator.mul)
    __truediv__, __rtruediv__ = _arithmetic(operator.truediv)
    __pow__, __rpow__ = _arithmetic(operator.pow)

    def __neg__(self) -> Result:
        return self._apply(operator.mul, self, -1.0)

    __lt__, __le__ = _question(operator.lt), _question(operator.le)
    __gt__, __ge__ = _question(operator.gt), _question(operator.ge)
    __eq__, __ne__ = _question(operator.eq), _question(operator.ne)

    def __bool__(self) -> bool:
        return bool(self._ask(operator.ne, 0))

    def __hash__(self) -> int:
        # A cache would store a tensor of this `vmap`, which the next `vmap` cannot use.
        raise Undecided(f"{self.name} is part of a key")

    def _needs_one(self, *_: object) -> NoReturn:
        raise Undecided(f"{self.name} is needed as one plain number")

    __float__ = __int__ = __index__ = __round__ = __abs__ = _needs_one
    __floor__ = __ceil__ = __trunc__ = __floordiv__ = __mod__ = _needs_one

    def __repr__(self) -> str:
        return f"Varied({self.name}: {', '.join(map(str, self.values))})"


def is_zero(number: float | Varied) -> bool:
    """Whether a number is zero in all runs, so that its product can be skipped."""
    return not any(number.values) if isinstance(number, Varied) else not number


def scalar(number: float | Varied, like: Tensor) -> Tensor:
    """Return a number as a float64 scalar on the device of `like`."""
    if isinstance(number, Varied):
        return number.tensor
    return torch.full((), number, dtype=torch.float64, device=like.device)  # a copy would wait


@dataclass(frozen=True)
class Points(Generic[T]):
    """Objects that differ only in the numbers at `paths` of fields. Each has a row of `values`."""

    first: T
    paths: tuple[tuple[str, ...], ...]
    values: tuple[tuple[float, ...], ...]

    def tensor(self, device: torch.device) -> Tensor | None:
        """Return the differing numbers, (objects, numbers), or None if the objects are equal."""
        return torch.tensor(self.values, dtype=torch.float64, device=device) if self.paths else None

    def at(self, row: Tensor | None) -> T:
        """Return the object of a row of `tensor`, under `vmap` over its rows."""
        made = self.first
        for column, path in enumerate(self.paths):
            assert row is not None
            values = [numbers[column] for numbers in self.values]
            made = _with(made, path, Varied(path[-1], values, row[column]))
        return made


def points(objects: Sequence[T]) -> Points[T]:
    """Find the numbers in which nested dataclasses differ. Other differences raise `Undecided`."""
    # Integers must be equal, because they are widths and numbers of steps.
    paths = tuple(_differences(objects, ()))
    numbers = [[operator.attrgetter(".".join(path))(one) for path in paths] for one in objects]
    return Points(objects[0], paths, tuple(tuple(map(float, row)) for row in numbers))


def _differences(objects: Sequence[object], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    first, name = objects[0], ".".join(path) or "the method"
    kinds = {type(one) for one in objects}
    if kinds <= {int, float} and float in kinds:
        return [path] if any(one != first for one in objects) else []
    if len(kinds) > 1:
        raise Undecided(f"they differ in {name}")
    if is_dataclass(first) and not isinstance(first, type):
        parts = {f.name: [getattr(one, f.name) for one in objects] for f in fields(first)}
        each = (_differences(part, (*path, name)) for name, part in parts.items())
        return [found for some in each for found in some]
    if any(one is not first and one != first for one in objects):
        raise Undecided(f"they differ in {name}")
    return []


def _with(part: T, path: Sequence[str], value: Varied) -> T:
    """Copy a dataclass with another value at a path."""
    # Not `dataclasses.replace`, because `__post_init__` has checked each run's numbers already.
    made = object.__new__(type(part))
    for field in fields(part):  # type: ignore[arg-type]  # a path leads through dataclasses
        given = getattr(part, field.name)
        if field.name == path[0]:
            given = _with(given, path[1:], value) if path[1:] else value
        object.__setattr__(made, field.name, given)
    return made
