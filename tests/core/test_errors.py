"""Errors: one tree, and sentences that say what to do."""

from __future__ import annotations

import pickle

import pytest

from atoll.core.errors import (
    AtollError,
    ClientLost,
    ConfigError,
    DataError,
    StepError,
    WireError,
    counted,
    unknown,
)

NAMES = ("fedavg", "fedprox", "local")


@pytest.mark.parametrize("kind", [ConfigError, DataError, WireError, StepError, ClientLost])
def test_one_tree(kind):
    assert issubclass(kind, AtollError)


@pytest.mark.parametrize(
    ("given", "near"), [("fedporx", "fedprox"), ("FEDAVG", "fedavg"), ("locall", "local")]
)
def test_an_unknown_name_suggests_the_nearest(given, near):
    error = unknown("method", given, NAMES)
    assert isinstance(error, ConfigError)
    assert str(error) == f"unknown method '{given}'; did you mean '{near}'?"


def test_another_number_is_no_suggestion():
    names = ("table10", "table2", "fig1")
    error = str(unknown("item", "table1", names))
    assert error == "unknown item 'table1'; choose one of: fig1, table2, table10"
    assert str(unknown("item", "tabel2", names)) == "unknown item 'tabel2'; did you mean 'table2'?"
    assert "did you mean 'table2'" in str(unknown("item", "TABLE2", names))
    assert "choose one of: 5, 9, 10" in str(unknown("number", "99", ("10", "9", "5")))
    assert "did you mean 'fedavg'" in str(unknown("method", "fedavg2", NAMES))


@pytest.mark.parametrize("given", ["zzz", "", "1"])
def test_a_name_like_nothing_lists_what_there_is(given):
    assert str(unknown("method", given, NAMES)) == (
        f"unknown method '{given}'; choose one of: fedavg, fedprox, local"
    )


def test_names_may_come_from_any_iterable():
    assert "choose one of: a, b" in str(unknown("thing", "zzz", iter({"b": 1, "a": 2})))


def test_a_step_error_names_client_step_and_round():
    error = StepError(3, "train", 12, "loss is nan")
    assert str(error) == "client 3, step train, round 12: loss is nan"
    assert (error.client, error.step, error.round, error.problem) == (3, "train", 12, "loss is nan")


def test_a_step_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(StepError(3, "train", 12, "loss is nan")))
    assert str(error) == "client 3, step train, round 12: loss is nan"
    assert (error.client, error.step, error.round) == (3, "train", 12)


def test_a_count_of_one_is_singular() -> None:
    assert counted(1, "edge") == "1 edge"
    assert counted(0, "class") == "0 classes"
    assert counted(1, "site remains", "sites remain") == "1 site remains"
    assert counted(2, "site remains", "sites remain") == "2 sites remain"
