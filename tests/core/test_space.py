"""Ranges of hyper-parameters: their values and their text."""

from __future__ import annotations

import pytest

from atoll.core.errors import ConfigError
from atoll.core.space import USUAL, USUAL_SGD, OneOf, Real, Whole, values_of


def test_a_range_holds_its_ends_and_only_its_kind() -> None:
    assert all(value in Real(0, 1) for value in (0, 0.5, 1))
    assert 1.1 not in Real(0, 1)
    assert "0.5" not in Real(0, 1)
    assert 5 in Whole(1, 5)
    assert 2.5 not in Whole(1, 5)
    assert "b" in OneOf(("a", "b"))


def test_a_range_prints_as_the_command_line_reads_it() -> None:
    assert str(Real(1e-4, 0.1, log=True)) == "0.0001..0.1:log"
    assert str(Whole(1, 2_000_000)) == "1..2000000"
    assert str(OneOf((32, 64))) == "32,64"


def test_ranges_of_one_kind_and_equal_ends_are_equal() -> None:
    assert Whole(1, 5) == Whole(1, 5) != Whole(1, 5, log=True)
    assert Real(1, 5) != Whole(1, 5)


@pytest.mark.parametrize("kind", [Real, Whole])
def test_impossible_ends_are_refused(kind) -> None:
    with pytest.raises(ConfigError, match="from a lower to a higher number, not 5 to 5"):
        kind(5, 5)
    with pytest.raises(ConfigError, match="begins above 0, not at 0"):
        kind(0, 5, log=True)


@pytest.mark.parametrize("values", [(), (1, 1)])
def test_a_choice_needs_different_values(values) -> None:
    with pytest.raises(ConfigError, match="needs different values"):
        OneOf(values)


def test_only_ranges_of_few_values_list_them() -> None:
    assert values_of(OneOf((3, 1))) == (3, 1)
    assert values_of(Whole(2, 4)) == (2, 3, 4)
    assert values_of(Real(0, 1)) is None


def test_sgd_searches_larger_rates() -> None:
    assert USUAL.keys() == USUAL_SGD.keys()
    assert USUAL_SGD["lr"].high > USUAL["lr"].high
