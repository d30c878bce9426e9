"""A party's activity equals its audit log, read whole or as it grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.core.errors import DataError
from atoll.deploy.activity import Budget, News, ServerActivity, ServerRun, SiteActivity
from atoll.deploy.audit import Audit
from atoll.deploy.coordinator import coordinate
from atoll.deploy.policy import Policy
from atoll.engines.fleet import Packet, SitesFailed
from atoll.experiment.privacy import epsilon, release
from atoll.testing import small_federation
from tests.deploy.private_site import DP, NOISE, OPTIONS, ask, begin, make_site, model_for


def kit_of(folder: Path, party: Path) -> Path:
    """A kit whose `atoll` folder is the folder of a party."""
    folder.mkdir()
    (folder / "atoll").symlink_to(party)
    return folder


def test_the_server_counts_rounds_bytes_and_sites_that_are_out(make_room, tmp_path):
    room = make_room(small_federation())

    def lose(site, question, answer):
        lost = site == "site-2" and question.head.get("round", -9) >= 1
        return None if lost else answer

    told: list[dict] = []
    order = room.order("fedavg", rounds=3, seeds=2, set={"hidden": 5})
    folder = tmp_path / "kit" / "atoll" / "runs" / "run"
    coordinate(order, room.fleet(lose), folder, told.append)
    (run,) = ServerActivity(tmp_path / "kit").read()
    assert (run.name, run.done, run.rounds, run.round) == ("run", {0: 3, 1: 3}, 3, 6)
    assert run.ended
    assert run.epsilon is None
    lost = run.peers["site-2"]
    assert lost.out == "no answer to 'train' within 5 s"
    assert (lost.failures, lost.refusals) == (1, 0)
    events = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    steps = [event["bytes"] for event in events if event["event"] == "step"]
    for name in room.names:
        found = [step[name] for step in steps if name in step]
        peer = run.peers[name]
        assert (peer.sent, peer.received) == tuple(map(sum, zip(*found, strict=True)))
    assert told[-1]["sites"]["site-1"]["received"] == run.peers["site-1"].received
    assert told[-1]["sites"]["site-2"]["out"] == lost.out


def test_a_private_run_reports_its_epsilon_after_every_round(make_room, tmp_path):
    room = make_room(small_federation())
    told: list[dict] = []
    folder = tmp_path / "run"
    coordinate(room.order("fedavg", seeds=2, dp=DP, **OPTIONS), room.fleet(), folder, told.append)
    expected = [epsilon(sent * release(NOISE), 1e-5) for sent in (1, 2, 3, 4)]
    assert [now["epsilon"] for now in told] == pytest.approx(expected)
    assert ServerRun(folder).read().epsilon == pytest.approx(expected[-1])


def test_a_site_counts_its_answers_refusals_and_epsilon_as_its_log_grows(tmp_path):
    site = make_site(tmp_path, Policy(rounds=9))
    kit = kit_of(tmp_path / "kit", tmp_path / "site")
    activity = SiteActivity(kit)
    assert activity.read() == []
    assert activity.budget() == Budget(0.0, None, 1e-5)
    begin(site)
    size = len(ask(site, model_for(site), round=3).body)
    (run,) = activity.read()
    assert (run.name, run.round, run.peers["server"].sent) == ("r-0", 4, size)
    ask(site, model_for(site), round=3)  # the same answer again is sent, but not charged, twice
    ask(site, model_for(site), round=4)
    site.answer(
        Packet({"do": "begin", "run": "s", "config": 'method = "fedavg"\nrounds = 99'}, b"")
    )
    site.answer(Packet({"do": "nothing"}, b""))
    (run,) = activity.read()
    assert (run.round, run.peers["server"].sent) == (5, 3 * size)
    assert (activity.refusals, activity.failures) == (1, 1)
    assert activity.last_refusal == "its policy allows 9 rounds, but the run has 99"
    assert activity.budget().spent == pytest.approx(epsilon(2 * release(NOISE), 1e-5))
    assert SiteActivity(kit).read() == [run]


def test_a_console_tells_what_happens_to_runs_once(make_room, tmp_path):
    room = make_room(small_federation())
    kit, server = kit_of(tmp_path / "site", room.folder / "site-1"), tmp_path / "server"
    fleet, folder = room.fleet(), server / "atoll" / "runs" / "r"
    orders = [room.order("fedavg", rounds=1, set={"hidden": width}) for width in (5, 6)]
    coordinate(orders[0], fleet, folder, print)
    assert News(server).read() == News(kit).read() == []  # all events are old
    news = News(server), News(kit)
    with pytest.raises(SitesFailed):
        coordinate(orders[1], fleet, folder.parent / "other", print)
    why = "run 'run-0' was begun here with another configuration"
    refused = [f"run other: {name}: {why}" for name in room.names]
    assert news[0].read() == ["run run begins", *refused]
    assert news[1].read() == [f"run run-0 was refused: {why}"]
    coordinate(orders[0], fleet, folder, print)
    log = Audit(kit / "atoll" / "audit.jsonl")
    for _ in range(2):
        log.note("refused", reason="no")
    log.note("delivered", run="run")
    assert news[0].read() == ["run run begins", "run run has ended"]
    ends = ["a request was refused: no", "run run has ended, and its model is here"]
    assert news[1].read() == ["run run-0 begins", *ends]


def test_the_budget_is_that_of_the_policy_the_site_was_started_with(tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text("epsilon = 8.0\ndelta = 1e-6\n")
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "atoll.json").write_text(json.dumps({"policy": str(policy)}))
    assert SiteActivity(tmp_path).budget() == Budget(0.0, 8.0, 1e-6)


def test_half_a_line_waits_and_a_bad_line_is_passed_over(tmp_path):
    log = tmp_path / "atoll" / "audit.jsonl"
    log.parent.mkdir()
    activity = SiteActivity(tmp_path)
    event = '{"time": "2026-01-01T00:00:00Z", "event": "refused", "reason": "no"}'
    log.write_text('[1]\n{}\nnothing\n{"time": "2026-01-01T00:00:00Z"}\n' + event[:30])
    activity.read()
    assert activity.refusals == 0
    with log.open("a") as file:
        file.write(event[30:] + "\n")
    activity.read()
    assert activity.refusals == 1


def test_a_party_whose_state_is_elsewhere_is_read_there(tmp_path):
    state = tmp_path / "state"
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "atoll.json").write_text(json.dumps({"state": str(state)}))
    Audit(state / "audit.jsonl").note("begin", run="r-0")
    Audit(state / "runs" / "r" / "audit.jsonl").note("start", run="r", sites=["a"])
    assert [run.name for run in SiteActivity(tmp_path).read()] == ["r-0"]
    assert [run.name for run in ServerActivity(tmp_path).read()] == ["r"]


@pytest.mark.parametrize("kind", [SiteActivity, ServerRun])
@pytest.mark.parametrize("event", ["sent", "refused", "round", "step", "start", "back"])
def test_an_event_without_its_fields_is_one_sentence(kind, event, tmp_path):
    folder = tmp_path / "atoll" if kind is SiteActivity else tmp_path
    Audit(folder / "audit.jsonl").note(event, run="r-0")
    known = {SiteActivity: ("sent", "refused"), ServerRun: ("round", "step", "start", "back")}
    if event in known[kind]:
        with pytest.raises(DataError, match=f"an event '{event}' that cannot be used .KeyError"):
            kind(tmp_path).read()
    else:
        kind(tmp_path).read()
