"""A site that lies, fails or dies in many ways: the run ends with or without its contribution.

Every test has four sites and a quorum of two. The run always reaches its last round. If the server
detects the lie, its numbers equal a run without the site from that round on. If the lie is
plausible, the site counts like any other.
"""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save

from atoll.core.errors import ConfigError
from atoll.core.task import Scores
from atoll.core.tree import leaves, tree_map
from atoll.deploy.coordinator import outcome
from atoll.deploy.federated import Diverged
from atoll.engines.codec import decode, encode, load_checkpoint
from atoll.engines.fleet import Packet
from atoll.engines.plausible import LARGEST
from atoll.methods import METHODS
from atoll.nn import vgae
from atoll.testing import small_federation
from tests.deploy.test_coordinator import SHORTER, SMALL, audit, without

LIAR, ROUNDS = "site-3", 3


def model(change):
    """Change the model of a reply."""
    return lambda reply: type(reply)(tree_map(change, reply.model), reply.weight)


def weight(value):
    return lambda reply: type(reply)(
        reply.model, torch.full_like(reply.weight.to(torch.float64), value).to(reply.weight.dtype)
    )


def scores(**change):
    return lambda reply: Scores(
        **{key: change.get(key, lambda x: x)(getattr(reply, key))
           for key in ("confusion", "loss", "auc")}
    )  # fmt: skip


def body(change):
    """A lie in the tree of a reply."""
    return lambda question, answer: Packet(answer.head, encode(change(decode(answer.body))))


def raw(change):
    """A lie in the bytes of a reply."""
    return lambda question, answer: Packet(answer.head, change(answer.body))


def fails(kind, reason="no reason"):
    return lambda question, answer: Packet({"failure": kind, "reason": reason}, b"")


def silent(question, answer):
    return None


def set_all(value):
    return lambda leaf: torch.full_like(leaf, value)


def named(name, value):
    """A reply of one tensor with a name that the site chose."""
    plan = json.dumps({"dict": {name: {"tensor": name}}})
    return lambda data: save({name: torch.tensor(value)}, metadata={"tree": plan})


TRAIN = {
    "an evil name of nan": raw(named("\x1b[2J\nround 9 of 9", torch.nan)),
    "an evil name": raw(named("\x1b[2J\nround 9 of 9", 1.0)),
    "an evil name of another type": raw(named("\x1b]0;x\x07", 1j)),
    "a long name": raw(named("x" * 9000, 1.0)),
    "model nan": body(model(set_all(torch.nan))),
    "model inf": body(model(set_all(torch.inf))),
    "model 3e38": body(model(set_all(3e38))),
    "model -3e38": body(model(set_all(-3e38))),
    "model 1e12": body(model(set_all(1e12))),
    "model 1e6": body(model(set_all(1e6))),
    "update times 1e5": body(model(lambda leaf: leaf * 1e5 + 10)),
    "one huge number": body(model(lambda leaf: leaf + 1e9 * (torch.arange(leaf.numel()) == 0)
                                  .reshape(leaf.shape))),
    "model wider": body(model(lambda leaf: torch.cat([leaf, leaf]))),
    "model flat": body(model(torch.flatten)),
    "model double": body(model(torch.Tensor.double)),
    "model half": body(model(torch.Tensor.half)),
    "model integer": body(model(torch.Tensor.long)),
    "model complex": body(model(lambda leaf: leaf.to(torch.complex64))),
    "model empty": body(model(lambda leaf: leaf[:0])),
    "weight -1e30": body(weight(-1e18)),
    "weight -1": body(weight(-1)),
    "weight 0": body(weight(0)),
    "weight 1e-40": body(weight(1e-40)),
    "weight 1e18": body(weight(1e18)),
    "weight one too many": body(weight(1000)),
    "weight of two numbers": body(lambda r: type(r)(r.model, r.weight.repeat(2))),
    "weight of another type": body(lambda r: type(r)(r.model, r.weight.to(torch.float16))),
    "weight missing": body(lambda r: {"model": r.model}),
    "nothing": body(lambda r: None),
    "a list": body(lambda r: [r.model]),
    "more fields": body(lambda r: {"model": r.model, "weight": r.weight, "more": r.weight}),
    "scores instead": body(
        lambda r: Scores(torch.zeros(3, 3, 3), torch.zeros(3), torch.zeros(3))
    ),
    "empty": raw(lambda data: b""),
    "cut": raw(lambda data: data[: len(data) // 2]),
    "padded": raw(lambda data: data + bytes(1 << 20)),
    "pickle": raw(lambda data: b"\x80\x04." + data),
    "zeros": raw(lambda data: bytes(len(data))),
    "length of 2**62": raw(lambda data: (1 << 62).to_bytes(8, "little") + data[8:]),
    "its question": lambda question, answer: Packet(answer.head, question.body),
    "silent": silent,
    "lost": fails("lost"),
    "bad": fails("bad"),
    "refuses late": fails("refused", "its policy does not allow step 'train'"),
    "diverges": fails("diverged", "training diverged"),
    "unknown kind": fails("king"),
    "kind is a list": fails(["bad"]),
    "kind is a number": fails(7),
    "dropped itself": fails("dropped"),
    "reason of 10 MB": fails("bad", "x" * 10_000_000),
    "reason with control characters": fails("bad", "\x1b[2J\x00\nround 9 of 9"),
    "reason is a dict": fails("bad", {"a": 1}),
    "no reason": lambda question, answer: Packet({"failure": "bad"}, b""),
}  # fmt: skip
SCORE = {
    "confusion negative": body(scores(confusion=lambda x: x - 1)),
    "confusion huge": body(scores(confusion=set_all(10**9))),
    "confusion one too many": body(scores(confusion=lambda x: x + 1)),
    "loss nan": body(scores(loss=set_all(torch.nan))),
    "auc 7": body(scores(auc=set_all(7.0))),
    "scores of fewer classes": body(scores(confusion=lambda x: x[:, :2, :2])),
    "scores cut": raw(lambda data: data[:-3]),
    "score silent": silent,
    "score refused": fails("refused"),
}


def events(room):
    return [json.loads(line) for line in audit(room).splitlines()]


def tell(step, lie, first=1, liar=LIAR):
    """A tamper: the liar lies in a step, from a round on."""

    def tamper(site, question, answer):
        head = question.head
        lies = site == liar and head.get("step") == step and head.get("round", -9) >= first
        return lie(question, answer) if lies else answer

    return tamper


def check_without(room, federation, out):
    """The server's tree is that of a run in which the liar took no part in the rounds `out`."""
    expected = without(federation, "fedavg", ROUNDS, {number: [2] for number in out})
    saved = load_checkpoint(room.folder / "server" / "seed-0" / "checkpoint.atoll")
    for one, other in zip(leaves(saved["server"]), leaves(expected), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("step", "lie"), [("train", k) for k in TRAIN] + [("score", k) for k in SCORE]
)
def test_a_lie_leaves_its_site_out_and_changes_nothing_else(step, lie, make_room):
    federation = small_federation()
    room = make_room(federation)
    fleet = room.fleet(tell(step, {**TRAIN, **SCORE}[lie]))
    room.run(room.order("fedavg", rounds=ROUNDS, set=SMALL), fleet)
    left = [e for e in events(room) if e["event"] == "left out"]
    assert [(e["site"], e["round"]) for e in left] == [(LIAR, 1)]
    reason = left[0]["reason"]
    assert len(reason) <= 1000
    assert reason.isprintable()
    assert "Error" not in reason  # a sentence, not the name of an exception
    check_without(room, federation, [1, 2])


@pytest.mark.parametrize("dp", [None, "clip=1,noise=1"])
@pytest.mark.parametrize("value", [0, 1e-40])
def test_a_site_alone_in_a_round_cannot_take_all_weight_away(value, dp, make_room):
    """The mean of one reply without weight is no number, which every other site would refuse."""
    room = make_room(small_federation())
    order = room.order("fedavg", rounds=8, fraction=0.25, set=SMALL, dp=dp)
    room.run(order, room.fleet(tell("train", body(weight(value)), first=0)))
    (left,) = [e for e in events(room) if e["event"] == "left out"]
    assert left["site"] == LIAR
    assert "'weight' is" in left["reason"]


@pytest.mark.parametrize("value", [89.0, -100.0])
def test_a_site_that_spoils_the_model_for_itself_ends_no_run(value, make_room, monkeypatch):
    """The server of FedIIH makes one model for each site. The liar's model is not finite."""
    monkeypatch.setattr(vgae, "_bounded", lambda log_variance: log_variance)
    room = make_room(small_federation())

    def lie(reply):
        return replace(reply, log_variance=torch.full_like(reply.log_variance, value))

    room.run(
        room.order("fediih", rounds=2, set=SMALL), room.fleet(tell("train", body(lie), first=0))
    )
    assert {e["site"] for e in events(room) if e["event"] == "left out"} == {LIAR}


@pytest.mark.parametrize("value", [1e30, -3e38])
def test_a_loss_leaves_no_site_out_and_counts_as_one_in_the_range(value, make_room):
    room = make_room(small_federation())
    lie = tell("score", body(scores(loss=set_all(value))))
    result = room.run(room.order("fedavg", rounds=ROUNDS, set=SMALL), room.fleet(lie))
    assert "left out" not in audit(room)
    found = result.seeds[0].history.scores["deployed"]
    assert np.nanmax(np.abs(np.stack(found))) == LARGEST


def poisoned(growth):
    """A tamper: the liar's update is as long as the limit allows and drives the model up."""

    def tamper(site, question, answer):
        if site != LIAR:
            return answer
        if question.head["do"] == "hello":
            return Packet({**answer.head, "nodes": 1 << 26}, answer.body)
        if question.head.get("step") != "train" or "failure" in answer.head:
            return answer
        got, reply = decode(question.body), decode(answer.body)
        flat = torch.cat([leaf.flatten() for leaf in leaves(got)])
        more = growth * float(flat.norm() + 1) / len(flat) ** 0.5
        moved = tree_map(lambda leaf: leaf + more * torch.where(leaf >= 0, 1.0, -1.0), got)
        weight = torch.full_like(reply.weight, float(1 << 26))
        return Packet(answer.head, encode(type(reply)(moved, weight)))

    return tamper


def test_a_model_that_grows_drives_no_honest_site_out(make_room):
    """The loss grows with the depth's power of the model, and the range only with the model."""
    room = make_room(small_federation())
    order = room.order("fedavg", rounds=25, set=SMALL, epochs=1, quorum=1)
    room.run(order, room.fleet(poisoned(0.999)))
    assert "left out" not in audit(room)


@pytest.mark.parametrize("quorum", [1, 3])
def test_replies_of_most_sites_above_the_range_mark_the_run_as_diverged(quorum, make_room):
    room = make_room(small_federation())
    order = room.order("fedavg", rounds=3, set=SMALL, quorum=quorum)

    def spoilt(site, question, answer):
        late = question.head.get("step") == "train" and question.head["round"] == 2
        lie = body(model(set_all(3e37)))
        return lie(question, answer) if late and site != LIAR else answer

    with pytest.raises(Diverged, match="round 2: training diverged at 3 of 4 sites"):
        room.run(order, room.fleet(spoilt))
    room.run(msgspec.structs.replace(order, without=(LIAR,)), room.fleet())
    assert "back before divergence" in audit(room)


def test_a_site_alone_in_a_round_drives_no_honest_site_out(make_room):
    """A site sends the largest plausible number for its size, and the other sites are smaller."""
    room = make_room(small_federation())
    lie = tell("train", body(model(set_all(2.1e7))), first=0)
    room.run(room.order("fedavg", rounds=8, fraction=0.25, set=SMALL), room.fleet(lie))
    assert [e["site"] for e in events(room) if e["event"] == "left out"] == [LIAR]


def test_a_site_that_declares_many_nodes_drives_no_honest_site_out(make_room):
    """The features that FedSage+ shows to others must be like those of the others."""
    room, nodes = make_room(small_federation()), 1000

    def lie(reply):
        return replace(reply, x=torch.full_like(reply.x, 0.99e6 * nodes))

    def tamper(site, question, answer):
        if site == LIAR and question.head["do"] == "hello":
            return Packet({**answer.head, "nodes": nodes}, answer.body)
        return tell("learn", body(lie), first=-1)(site, question, answer)

    options = {"rounds": 1, "set": {**SMALL, **SHORTER["fedsage+"]}}
    room.run(room.order("fedsage+", **options), room.fleet(tamper))
    assert [e["site"] for e in events(room) if e["event"] == "left out"] == [LIAR]


PLAUSIBLE = {
    "its last model again": raw(lambda data: data),
    "model zero": body(model(torch.zeros_like)),
    "sign flipped": body(model(torch.neg)),
}


@pytest.mark.parametrize("lie", PLAUSIBLE)
def test_a_plausible_lie_moves_the_model_as_far_as_an_honest_update_may(lie, make_room):
    """No server can detect such a lie, but the result stays finite and of normal size."""
    federation = small_federation()
    room = make_room(federation)
    room.run(
        room.order("fedavg", rounds=ROUNDS, set=SMALL), room.fleet(tell("train", PLAUSIBLE[lie]))
    )
    assert not [e for e in events(room) if e["event"] == "left out"]
    saved = load_checkpoint(room.folder / "server" / "seed-0" / "checkpoint.atoll")
    honest = leaves(without(federation, "fedavg", ROUNDS, {}))
    for one, other in zip(leaves(saved["server"]), honest, strict=True):
        assert one.abs().max() <= 2 * other.abs().max()


def test_the_reply_of_another_site_or_round_counts_as_its_own(make_room):
    """A copy is plausible. The server checks its weight against the sender's data."""
    room, seen = make_room(small_federation()), {}

    def tamper(site, question, answer):
        if question.head.get("step") != "train":
            return answer
        seen.setdefault((site, question.head["round"]), answer)
        if site == LIAR and question.head["round"] == 1:
            return seen["site-1", 0]
        return answer

    room.run(room.order("fedavg", rounds=ROUNDS, set=SMALL), room.fleet(tamper))
    left = [e["reason"] for e in events(room) if e["event"] == "left out"]
    assert all("'weight' is" in reason for reason in left)


@pytest.mark.parametrize("phase", ["begin", "train", "score"])
@pytest.mark.parametrize("how", [silent, fails("bad"), fails("lost")], ids=["dies", "bad", "lost"])
def test_a_site_that_fails_in_a_phase_is_left_out(phase, how, make_room):
    federation = small_federation()
    room = make_room(federation)

    def tamper(site, question, answer):
        head = question.head
        now = head["do"] if head["do"] != "step" else head["step"]
        return how(question, answer) if site == LIAR and now == phase else answer

    room.run(room.order("fedavg", rounds=ROUNDS, set=SMALL), room.fleet(tamper))
    left = [(e["site"], e["round"]) for e in events(room) if e["event"] == "left out"]
    expected = {"begin": [(LIAR, -1)], "train": [(LIAR, 0)], "score": [(LIAR, 0)]}
    assert left == expected[phase]
    check_without(room, federation, [0, 1, 2])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_begins_without_a_site_and_takes_it_in_later(name, make_room):
    room = make_room(small_federation())
    fleet = room.fleet()

    def tamper(site, question, answer):
        if question.head.get("round") == 1:
            fleet.returned.add(LIAR)
        return None if site == LIAR and LIAR not in fleet.returned else answer

    fleet.tamper = lambda site, question, answer: (
        answer if question.head["do"] == "hello" else tamper(site, question, answer)
    )
    options = {"rounds": ROUNDS, "set": {**SMALL, **SHORTER.get(name, {})}, "epochs": 1}
    room.run(room.order(name, **options), fleet)
    seen = [(e["event"], e["round"]) for e in events(room) if e.get("site") == LIAR]
    assert seen == [("left out", -1), ("back", 2)]


@pytest.mark.parametrize("how", [silent, fails("refused"), fails("bad")], ids=["dies", "no", "bad"])
def test_a_site_that_comes_back_and_fails_at_begin_stays_out(how, make_room):
    federation = small_federation()
    room = make_room(federation)
    fleet = room.fleet()

    def tamper(site, question, answer):
        head = question.head
        if site == LIAR and head.get("round") == 1:
            fleet.returned.add(LIAR)
            return None
        back = site == LIAR and head["do"] == "begin" and LIAR in fleet.returned
        return how(question, answer) if back else answer

    fleet.tamper = tamper
    room.run(room.order("fedavg", rounds=ROUNDS, set=SMALL), fleet)
    check_without(room, federation, [1, 2])


@pytest.mark.parametrize(
    "change",
    [
        {"counts": [1 << 80, 1, 1]},
        {"counts": [-1, 1, 1]},
        {"counts": [1, 1]},
        {"counts": [1, 1, 1, 1]},
        {"counts": [500, 1, 1]},
        {"nodes": 1 << 80},
        {"nodes": 1 << 36},  # a server that keeps a number for each needs 550 GB
        {"nodes": -3},
        {"nodes": 2.5},
        {"features": 1 << 70},
        {"words": "x"},
        {"words": [1]},
        {"task": None},
        {"metric": 3},
        {"evil": 1},
        {"\x1b[2J\n": 1},
        {"task": "x" * 9999},
    ],
)
def test_nonsense_at_hello_is_named_before_the_run_begins(change, make_room):
    room = make_room(small_federation())

    def tamper(site, question, answer):
        lies = site == LIAR and question.head["do"] == "hello"
        return Packet({**answer.head, **change}, b"") if lies else answer

    ended = outcome(lambda: room.run(room.order("fedavg", rounds=1), room.fleet(tamper)))
    assert ended["status"] == "failed"
    assert ended["reason"].startswith("site-3: its summary of the data cannot be used: ")
    assert ended["reason"].isprintable()


@pytest.mark.parametrize(
    "change",
    [
        {"task": "\x1b[2J\n"},
        {"metric": "\x1b[2J\n"},
        {"words": ["\x1b[2J\n"]},
        {"words": [str(number) for number in range(1_000_000)]},
    ],
)
def test_names_that_do_not_fit_are_one_short_line(change, make_room):
    room = make_room(small_federation())

    def tamper(site, question, answer):
        own = {"words": [str(-number) for number in range(1_000_000)]} if "words" in change else {}
        lie = change if site == LIAR else own
        return Packet({**answer.head, **lie}, b"") if question.head["do"] == "hello" else answer

    ended = outcome(lambda: room.run(room.order("fedavg", rounds=1), room.fleet(tamper)))
    assert "do not fit together" in ended["reason"]
    assert ended["reason"].isprintable()
    assert len(ended["reason"]) < 1000


@pytest.mark.parametrize("change", [{"nodes": 1 << 80}, {"counts": [0, 0, 0]}, {"evil": 1}, None])
def test_a_site_that_answers_hello_differently_is_left_out_of_a_resumed_run(change, make_room):
    federation = small_federation()
    room = make_room(federation)

    class Killed(BaseException):
        pass

    def kill(site, question, answer):
        if question.head.get("round") == 1:
            raise Killed
        return answer

    order = room.order("fedavg", rounds=ROUNDS, set=SMALL)
    with pytest.raises(Killed):
        room.run(order, room.fleet(kill))

    def tamper(site, question, answer):
        lies = site == LIAR and question.head["do"] == "hello"
        if lies and change is None:
            return fails("refused")(question, answer)
        return Packet({**answer.head, **change}, b"") if lies else answer

    room.run(order, room.fleet(tamper))
    check_without(room, federation, [1, 2])


def test_an_error_of_any_kind_becomes_an_outcome(make_room, caplog):
    def explode():
        raise RuntimeError("out of luck")

    ended = outcome(explode)
    assert ended["status"] == "failed"
    assert ended["reason"] == "the server failed (RuntimeError: out of luck); its log has more"
    assert "out of luck" in caplog.text


def test_a_site_with_more_nodes_than_fit_into_the_servers_memory_is_named(make_room, monkeypatch):
    """The server of FedGNN sorts as many keys for each site as the largest one counts."""
    monkeypatch.setattr("atoll.deploy.coordinator.available_memory", lambda: 1 << 30)
    room = make_room(small_federation())

    def lie(site, question, answer):
        many = site == LIAR and question.head["do"] == "hello"
        return Packet({**answer.head, "nodes": 1 << 23}, answer.body) if many else answer

    with pytest.raises(ConfigError, match="site-3 counts 8388608 nodes: their keys need 2 GiB on"):
        room.run(room.order("fedgnn", rounds=1, set=SMALL), room.fleet(lie))
    make_room(small_federation(), "other").run(room.order("fedavg", rounds=1, set=SMALL))


@pytest.mark.parametrize("step", ["count", "announce", "note", "embed"])
def test_a_site_that_fails_before_twins_are_known_ends_no_run(step, make_room):
    """All sites have the same graph, so that every node of FedGNN has twins."""
    same = small_federation()
    room = make_room(replace(same, graphs=same.graphs[:1] * 4))
    fleet = room.fleet(tell(step, silent, first=-1))
    room.run(room.order("fedgnn", rounds=2, set=SMALL, epochs=1), fleet)
    assert [e["site"] for e in events(room) if e["event"] == "left out"] == [LIAR]


@pytest.mark.parametrize("phase", ["begin", "score"])
def test_a_site_that_returns_and_fails_each_time_waits_longer(phase, make_room):
    """It answers every ping, and costs a deadline for each return."""
    room, rounds, begun = make_room(small_federation()), 30, []
    fleet = room.fleet()
    fleet.returned.add(LIAR)

    def tamper(site, question, answer):
        head = question.head
        if site != LIAR or phase not in (head["do"], head.get("step")):
            return answer
        begun.append(head)
        return answer if len(begun) == 1 else None

    fleet.tamper = tamper
    room.run(room.order("fedavg", rounds=rounds, set=SMALL, epochs=1), fleet)
    assert len(begun) <= 10
    assert fleet.calls.count(("site-1", "train")) <= rounds + 10


SHAPES = {
    "empty": lambda leaf: leaf[:0],
    "a row": lambda leaf: leaf[:1],
    "longer": lambda leaf: torch.cat([leaf, leaf]),
    "more axes": lambda leaf: leaf[None],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("method", "settings", "step", "part"),
    [
        ("moon", {}, "train", "model"),
        ("scaffold", {"option": "I"}, "train", "control"),
        ("fedgnn", {}, "announce", "keys"),
    ],
)
def test_a_disclosed_field_of_another_shape_is_refused(
    method, settings, step, part, shape, make_room
):
    """Also in a round with only one site, and if the liar is the first of two."""
    change = SHAPES[shape]

    def lie(reply):
        return replace(reply, **{part: tree_map(change, getattr(reply, part))})

    for number, more in enumerate(({"fraction": 0.25, "rounds": 6}, {"rounds": 2})):
        room = make_room(small_federation(), f"room-{number}")
        order = room.order(method, set={**SMALL, **settings}, epochs=1, **more)
        room.run(order, room.fleet(tell(step, body(lie), first=-1)))
        assert [e["site"] for e in events(room) if e["event"] == "left out"] == [LIAR]
    room = make_room(small_federation((13, 9)), "pair")
    fleet = room.fleet(tell(step, body(lie), first=-1, liar="site-1"))
    room.run(room.order(method, set={**SMALL, **settings}, epochs=1, rounds=2, quorum=1), fleet)
    assert [e["site"] for e in events(room) if e["event"] == "left out"] == ["site-1"]


def test_a_site_that_sends_an_extreme_variance_spoils_no_other_model(make_room):
    """FedIIH compares all sites, so one of them could make the server's numbers NaN for all."""
    room = make_room(small_federation())
    lie = body(lambda reply: replace(reply, log_variance=torch.full_like(reply.mean, 1000.0)))
    order = room.order("fediih", rounds=ROUNDS, set={**SMALL, "js": "monte-carlo"})
    result = room.run(order, room.fleet(tell("train", lie)))
    assert result.seeds[0].history.rounds == ROUNDS
    assert not [e for e in events(room) if e["event"] == "left out"]
    norms = [e["norms"] for e in events(room) if e.get("round") == 1 and e.get("step") == "train"]
    assert norms[0]["log_variance"][LIAR] > 1000
    assert norms[0]["log_variance"]["site-1"] < 10


def test_adafgl_gets_back_a_site_that_was_lost_when_the_second_step_began(make_room):
    room = make_room(small_federation())
    fleet = room.fleet(
        lambda site, question, answer: None if site == LIAR and question.head.get("round") == 3
        and question.head["do"] == "step" else answer
    )  # fmt: skip
    fleet.returned = {LIAR}
    options = {"rounds": 6, "set": {**SMALL, "federated_rounds": 3}}
    room.run(room.order("adafgl", **options), fleet)
    seen = [(e["event"], e["round"]) for e in events(room) if e.get("site") == LIAR]
    assert seen == [("left out", 3), ("back", 4)]


def test_a_new_seed_does_not_forget_the_failed_returns(make_room):
    room, asked = make_room(small_federation()), []

    def lie(site, question, answer):
        if site != LIAR or question.head.get("step") != "train":
            return answer
        asked.append(question.head["round"])
        return None

    fleet = room.fleet(lie)
    fleet.returned = {LIAR}
    room.run(room.order("fedavg", rounds=3, seeds=6, set=SMALL, epochs=1), fleet)
    assert len(asked) <= 7  # of 18 rounds
