"""The rule and the questions that the values of one column give."""

from __future__ import annotations

import pyarrow as pa
import pytest

from atoll.data.own.columns import Column, Rows
from atoll.data.own.look import Look, look_at
from atoll.data.own.rules import Rule


def look(values: list[object], rule: Rule | None = None) -> Look:
    column = Column(pa.chunked_array([pa.array(values)]), "f", Rows("nodes.csv", str))
    return look_at(column, rule or Rule())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1", "2.5", "-3e4"], Rule(kind="number")),
        (["1,5", "2", "1.000,25"], Rule(kind="number", decimal=",")),
        (["1", "2", "NA"], Rule(kind="number", empty=("NA",), missing="own category")),
        (["1", "2", "old"], Rule(kind="number", empty=("old",), missing="own category")),
        (["yes", "no", "yes"], Rule(kind="boolean")),
        (["2020-01-02", "2021-12-31"], Rule(kind="date", format="%Y-%m-%d")),
        (["31/12/2020", "1/2/2021"], Rule(kind="date", format="%d/%m/%Y")),
        (["a", "b", None], Rule(kind="category", missing="own category")),
        ([f"text {i}" for i in range(60)], Rule(kind="text")),
        ([True, False], Rule(kind="boolean")),
        ([1.5, float("nan")], Rule(kind="number", missing="own category")),
    ],
)
def test_kinds(values: list[object], expected: Rule) -> None:
    assert look(values).rule == expected


def test_a_date_that_can_be_read_in_two_ways_is_asked_about() -> None:
    assert "it could be %d/%m/%Y or %m/%d/%Y" in look(["1/2/2020", "3/4/2020"]).questions[0][0]


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (["1", "x"], Rule(kind="number")),
        (["2020-01-01", "x"], Rule(kind="date")),
        (["yes", "x"], Rule(kind="boolean")),
        (["a", "x"], Rule(kind="category", values=("a",))),
    ],
)
def test_values_that_do_not_fit_the_schema(values: list[object], rule: Rule) -> None:
    assert look(values, rule).questions == [(f"'x' do not fit kind = \"{rule.kind}\"", 1)]


def test_ids_are_asked_about() -> None:
    column = Column(pa.chunked_array([pa.array(range(99))]), "account_no", Rows("n", str))
    assert "may be an id" in look_at(column, Rule()).questions[0][0]
