"""A short run of the fuzz target with fixed inputs. `python -m fuzz.packets` runs longer."""

from __future__ import annotations

import random

import pytest
from fuzz.cases import Case, Targets, mutated

from atoll.core.errors import AtollError


@pytest.fixture
def targets(tmp_path):
    return Targets(tmp_path)


def test_mutated_packets_raise_nothing_but_atolls_errors(targets):
    chance, seeds, refused = random.Random(7), targets.seeds(), 0
    for _ in range(2000):
        case = mutated(chance.choice(seeds), chance, seeds)
        assert Case.unpacked(case.packed()) == case
        try:
            targets.all[case.kind](case)
        except AtollError:
            refused += 1
    assert 200 < refused < 1500  # mutations reach the code behind the first check


def test_every_seed_is_a_real_input(targets):
    for case in targets.seeds():
        targets.all[case.kind](case)
    reasons = {event["reason"] for event in targets.site.audit.events(event="bad")}
    # The step `train` got the tree of a reply.
    assert all("it does not have the structure" in reason for reason in reasons), reasons


def test_an_error_of_another_type_inside_a_site_is_found(targets, monkeypatch):
    monkeypatch.setattr(targets.site.data.__class__, "summary", lambda self, **_: 1 / 0)
    hello = next(case for case in targets.seeds() if case.kind == 2)
    with pytest.raises(ZeroDivisionError):
        targets.try_one(hello)
