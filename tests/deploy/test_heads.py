"""Heads of packets: types, lengths, and the values that reach a log."""

from __future__ import annotations

import pytest

from atoll.core.errors import WireError
from atoll.deploy.heads import (
    CONFIG,
    Begin,
    Delivery,
    Hello,
    Question,
    check_name,
    read_head,
    short,
)

HELLO = {"run": "r", "method": "fedavg", "rounds": 2, "dp": None}
BEGIN = {"run": "r", "config": ""}
QUESTION = {"run": "r-0", "owner": "method", "step": "train", "flags": {}, "round": 0,
            "attempt": "a", "state": -2, "key": 1}  # fmt: skip
DELIVERY = {"run": "r", "manifest": "{}", "signature": "", "certificate": ""}
HEADS = {Hello: HELLO, Begin: BEGIN, Question: QUESTION, Delivery: DELIVERY}


@pytest.mark.parametrize("kind", HEADS)
def test_an_honest_head_is_read_and_may_have_more_fields(kind):
    found = read_head(kind, {**HEADS[kind], "do": "it", "later": 1})
    assert {name: getattr(found, name) for name in HEADS[kind]} == HEADS[kind]


@pytest.mark.parametrize("value", ["x" * 10_000_000, 10**300, -(10**300), 1.5, True, [[]], b"x"])
@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind in HEADS for field in HEADS[kind]]
)
def test_a_field_of_another_type_or_size_is_refused_in_short(kind, field, value):
    if field == "rounds" and value == 10**300:
        pytest.skip("a number of rounds is the policy's to refuse")
    with pytest.raises(WireError) as error:
        read_head(kind, {**HEADS[kind], field: value})
    assert len(str(error.value)) < 200
    with pytest.raises(WireError, match="missing required field"):
        read_head(kind, {k: v for k, v in HEADS[kind].items() if k != field})


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Question, {"round": -2}),
        (Question, {"state": -3}),
        (Question, {"keep": -3}),
        (Question, {"key": 1 << 63}),
        (Question, {"flags": {"x": 1}}),
        (Question, {"flags": {str(i): True for i in range(21)}}),
        (Hello, {"rounds": -1}),
        (Hello, {"dp": {"x" * 201: 1.0}}),
        (Begin, {"config": "#" * (CONFIG + 1)}),
    ],
)
def test_numbers_and_tables_have_bounds(kind, change):
    with pytest.raises(WireError, match="a packet was refused"):
        read_head(kind, {**HEADS[kind], **change})


@pytest.mark.parametrize("name", ["", "../r", "r\n", "r/s", ".r", "r" * 101])
def test_a_run_name_is_a_plain_name(name):
    with pytest.raises(WireError, match="a run's name"):
        check_name(name)


@pytest.mark.parametrize(
    "value", ["x" * 10_000, "\u20ac" * 10_000, "\U0001f600\n" * 10_000, [[]], {}]
)
def test_a_log_keeps_a_short_plain_value(value):
    kept = short(value)
    assert isinstance(kept, str)
    assert len(kept.encode()) <= 100
    assert short(10**400) == "int"
    assert short(7) == 7
