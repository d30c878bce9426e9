"""A job that takes more time or memory than its owner allows."""

from __future__ import annotations

import threading

import pytest

from atoll.deploy import watchdog
from atoll.deploy.policy import Policy
from atoll.deploy.watchdog import Watchdog
from atoll.engines.fleet import Packet
from tests.deploy.private_site import make_site

STEP = Packet({"do": "step", "run": "r", "step": "train", "round": 3}, b"")


@pytest.fixture
def blocked(monkeypatch):
    """A watched site whose answers wait for an event. `ended` simulates the process's end."""
    go, ended = threading.Event(), threading.Event()

    def make(folder, policy):
        site = make_site(folder, policy)
        monkeypatch.setattr(site, "answer", lambda packet: go.wait(60) and Packet({}, b"done"))
        return Watchdog(site, ended.set)

    make.go, make.ended = go, ended
    yield make
    go.set()


def test_an_answer_within_the_limits_is_passed_on(blocked, tmp_path):
    watched = blocked(tmp_path, Policy())
    blocked.go.set()
    assert watched.answer(STEP) == Packet({}, b"done")
    watched.sent()
    assert not blocked.ended.is_set()


@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        (Policy(seconds=0.01), "0.01 seconds"),
        (Policy(round_seconds=0.02), "0.02 seconds"),
        (Policy(memory=1000), "1000 bytes of memory"),
    ],
)
def test_at_the_limit_the_server_is_answered_and_the_process_ends(policy, limit, blocked, tmp_path):
    watched = blocked(tmp_path, policy)
    answer = watched.answer(STEP)
    reason = f"over its limit: its policy allows {limit}, and the answer needs more"
    assert answer.head == {"failure": "bad", "reason": reason}
    (event,) = watched.site.audit.events(event="bad")
    assert (event["run"], event["step"], event["round"]) == ("r", "train", 3)
    assert event["seconds"] >= 0  # rounded
    assert not blocked.ended.is_set()
    assert watched.answer(STEP).head["failure"] == "bad"  # nothing more is computed
    watched.sent()
    assert blocked.ended.is_set()


def test_a_refusal_that_cannot_leave_does_not_keep_the_process(blocked, tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "GRACE", 0.01)
    blocked(tmp_path, Policy(seconds=0.01)).answer(STEP)
    assert blocked.ended.wait(60)


def test_the_note_does_not_wait_for_the_log_of_the_step(tmp_path, monkeypatch):
    """A step that is stuck while it holds the log must not keep the refusal from leaving."""
    site, held = make_site(tmp_path, Policy(seconds=0.01)), threading.Event()

    def stuck(packet):
        with site.audit.alone():
            held.wait(60)
        return Packet({}, b"")

    monkeypatch.setattr(site, "answer", stuck)
    watched = Watchdog(site, lambda: None)
    threading.Timer(0.5, held.set).start()
    assert watched.answer(STEP).head["failure"] == "bad"
    assert len(site.audit.events(event="bad")) == 1
