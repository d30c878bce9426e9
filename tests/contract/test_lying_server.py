"""A server that lies to a site: whatever it sends, it gets no more than the owner allows.

Each behaviour is tried on a site with a strict policy. Afterwards the site's account holds exactly
the updates that were answered, its log has grown by short lines, and an honest run succeeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from atoll.core.aggregate import Update
from atoll.core.tree import leaves, tree_map
from atoll.deploy.audit import check_audit
from atoll.deploy.policy import Policy
from atoll.deploy.site import Site
from atoll.engines.codec import decode, encode
from atoll.engines.fleet import PROTOCOL, Packet
from atoll.experiment.config import config_text, make_config
from atoll.experiment.privacy import epsilon, release
from tests.deploy.private_site import CLIP, DP, NOISE, make_site, model_for

BUDGET, QUESTIONS = 12, 30
POLICY = Policy(
    methods=("fedavg",), steps=("train", "score"), rounds=9, noise=NOISE,
    epsilon=epsilon(BUDGET * release(NOISE), 1e-5) + 1e-6, epochs=5, layers=3, width=64,
    parameters=10_000, questions=QUESTIONS, message_bytes=1_000_000,
)  # fmt: skip
LINE = 2_500  # bytes of the longest line that a refused packet may leave in the log
LONG = "x" * 10_000_000
WEIRD = '\x00\n"\\\u20ac\U0001f600' * 1_000_000
PRIVATE = {"clip": CLIP, "noise": NOISE}
OPTIONS: dict[str, Any] = {"method": "fedavg", "rounds": 4, "dp": DP, "set": {"hidden": 5}}
NOTHING = object()  # a field that is left out


def settings(**change: Any) -> str:
    return config_text(make_config(**{**OPTIONS, **change}))


class Server:
    """Sends packets to one site, and remembers what came back."""

    def __init__(self, site: Site) -> None:
        self.site, self.model = site, model_for(site)
        self.sent, self.answers = 0, list[tuple[Packet, Packet]]()
        self.attempts = itertools.count()

    def say(self, head: dict[str, Any], body: bytes = b"") -> Packet:
        packet = Packet({k: v for k, v in head.items() if v is not NOTHING}, body)
        answer = self.site.answer(packet)
        self.answers.append((packet, answer))
        return answer

    def hello(self, **change: Any) -> Packet:
        head = {"do": "hello", "version": PROTOCOL, "atoll": "0.1.0", "run": "lie"}
        head |= {"method": "fedavg", "rounds": 4, "dp": PRIVATE}
        return self.say({**head, **change})

    def begin(self, **change: Any) -> Packet:
        return self.say({"do": "begin", "run": "lie-0", "config": settings(), **change})

    def ask(self, message: Any = None, body: bytes | None = None, **change: Any) -> Packet:
        head = {"do": "step", "run": "lie-0", "owner": "method", "step": "train", "flags": {}}
        head |= {"round": 0, "attempt": str(next(self.attempts)), "state": -2, "key": 7}
        whole = encode(self.model if message is None else message) if body is None else body
        return self.say({**head, **change}, whole)

    def deliver(self, **change: Any) -> Packet:
        head = {"do": "deliver", "run": "lie", "manifest": "{}", "signature": "AAAA"}
        return self.say({**head, "certificate": "none", **change}, b"x" * 1000)

    def score(self, **change: Any) -> Packet:
        return self.ask(owner="evaluator", step="score", **change)


@dataclass(frozen=True)
class Lie:
    """A behaviour, and what a site may give it: answers, and updates that are charged."""

    tell: Callable[[Server], object]
    answered: int = 0
    charged: int = 0
    broke: bool = False  # the budget is used up afterwards


def hello(**change: Any) -> Lie:
    return Lie(lambda server: server.hello(**change))


def begin(**change: Any) -> Lie:
    return Lie(lambda server: server.begin(**change))


def configured(**change: Any) -> Lie:
    return Lie(lambda server: server.begin(config=settings(**change)))


def asked(*messages: Any, answered: int = 0, charged: int = 0, **change: Any) -> Lie:
    """A question after an honest begin."""

    def tell(server: Server) -> None:
        server.begin()
        for message in messages or (None,):
            made = message(server.model) if callable(message) else message
            server.ask(made, **change)

    return Lie(tell, answered + 1, charged)


def several(tell: Callable[[Server], object], answered: int, charged: int, **more: bool) -> Lie:
    def whole(server: Server) -> None:
        server.begin()
        tell(server)

    return Lie(whole, answered + 1, charged, **more)


def interleaved(server: Server) -> None:
    server.begin(run="other-0")
    server.ask()  # of the first run, which the second one has replaced
    server.ask(run="other-0")
    server.begin()
    server.ask(run="other-0")
    server.ask()


def deep(levels: int) -> list[object]:
    nested: list[object] = []
    for _ in range(levels):
        nested = [nested]
    return nested


def odd_body(model: Any) -> bytes:
    return encode(model)[:-7]


LIES: dict[str, Lie] = {
    # Questions that do not exist
    "nothing": Lie(lambda s: s.say({})),
    "an unknown verb": Lie(lambda s: s.say({"do": "delete"})),
    "a long verb": Lie(lambda s: s.say({"do": LONG})),
    "a verb of strange letters": Lie(lambda s: s.say({"do": WEIRD})),
    "a list as a verb": Lie(lambda s: s.say({"do": ["step"]})),
    "a deep verb": Lie(lambda s: s.say({"do": deep(900)})),
    "a long ping": Lie(lambda s: s.say({"do": "ping", "more": LONG}, b"x" * 10_000_000), 1),
    # Hello
    "hello of another protocol": hello(version="9.9"),
    "hello with a long version": hello(version=LONG),
    "hello with a long name of a run": hello(run=LONG),
    "hello with a strange name of a run": hello(run=WEIRD),
    "hello with a path as a run": hello(run="../../tmp/x"),
    "hello with a long method": hello(method=LONG),
    "hello with another method": hello(method="fedprox"),
    "hello with code as a method": hello(method="/tmp/evil.py:Mine"),
    "hello with a list as a method": hello(method=["fedavg"]),
    "hello with a long version of Atoll": hello(atoll=LONG),
    "hello with too many rounds": hello(rounds=10**30),
    "hello with rounds as text": hello(rounds="4"),
    "hello without privacy": hello(dp=None),
    "hello without a word on privacy": hello(dp=NOTHING),
    "hello with little noise": hello(dp={**PRIVATE, "noise": 0.5}),
    "hello with huge noise": hello(dp={**PRIVATE, "noise": 1e155}),
    "hello with noise of the seed": hello(dp={**PRIVATE, "randomness": "seed"}),
    "hello that wants the scores": hello(dp={**PRIVATE, "scores": "told"}),
    "hello with a negative clip": hello(dp={**PRIVATE, "clip": -1.0}),
    "hello with a long key of privacy": hello(dp={LONG: 1.0}),
    "hello with privacy as text": hello(dp=LONG),
    # Begin
    "a long configuration": begin(config=settings() + "#" + LONG),
    "a configuration that is no TOML": begin(config="method = "),
    "a deep configuration": begin(config="set = " + "[" * 5_000 + "]" * 5_000),
    "a configuration with an unknown key": begin(config="shell = true\n" + settings()),
    "a configuration as bytes": begin(config=["method"]),
    "a configuration without a run": begin(run=NOTHING),
    "a run that is a folder": begin(run="../x"),
    "a run without privacy": configured(dp=None),
    "a run with little noise": configured(dp=f"clip={CLIP},noise={NOISE / 2}"),
    "a run with noise of the seed": configured(dp=f"{DP},randomness=seed"),
    "a run that wants the scores": configured(dp=f"{DP},scores=told"),
    "a run with another method": configured(method="fedprox"),
    "a run with code as a method": begin(config=settings().replace("fedavg", "/tmp/evil.py:Mine")),
    "a run with code as a base": configured(set={"base": "/tmp/evil.py:Mine"}),
    "too many rounds": configured(rounds=10),
    "too many epochs": configured(epochs=10**12),
    "too wide": configured(set={"hidden": 3 * 10**8}),
    "too deep": configured(set={"layers": 3 * 10**6}),
    "too many parameters": begin(config=settings(set={"hidden": 64, "layers": 3, "net": "gin"})),
    "more updates than the budget": configured(seeds=4),
    "another configuration under one name": several(
        lambda s: s.begin(config=settings(set={"hidden": 6})), 0, 0
    ),
    "begin twice": several(lambda s: [s.begin(), s.ask()], 2, 1),
    # Steps
    "a step before begin": Lie(lambda s: s.ask()),
    "a step of another run": asked(run="other-0"),
    "the step without noise": asked(step="own"),
    "the method inside": asked(owner="method.base"),
    "an attribute as a step": asked(step="__init__"),
    "a long step": asked(step=LONG),
    "a step of strange letters": asked(step=WEIRD),
    "a long owner": asked(owner=LONG),
    "an owner that is a list": asked(owner=["method"]),
    "flags of the method": asked(flags={"hides_divergence": False}),
    "flags of the evaluator that it has not": asked(
        owner="evaluator", step="score", flags={"method": True}
    ),
    "long flags": asked(flags={LONG: True}),
    "a negative round": asked(round=-2),
    "a round beyond the policy": asked(round=9),
    "a round beyond the run": asked(round=4),
    "a round as text": asked(round="0"),
    "a huge key": asked(key=1 << 63),
    "a key that is no whole number": asked(key=0.5),
    "a long attempt": asked(attempt=LONG),
    "a state that does not exist": asked(state=3),
    "a state before the first": asked(state=-3),
    "a step without a field": asked(state=NOTHING),
    # Messages
    "no message": asked(body=b""),
    "a cut message": Lie(lambda s: [s.begin(), s.ask(body=odd_body(s.model))], 1),
    "a message of noise": asked(body=b"\x08" + b"\0" * 7 + b"not json"),
    "a huge message": asked(body=b"x" * 1_000_001),
    "nan": asked(lambda model: tree_map(lambda leaf: leaf * float("nan"), model)),
    "other shapes": asked(lambda model: tree_map(lambda leaf: leaf[:1], model)),
    "other types": asked(lambda model: tree_map(lambda leaf: leaf.double(), model)),
    "the model in other places": asked(lambda model: [model], lambda model: {"model": model}),
    "the model in another record": asked(lambda model: Update(model, torch.ones(()))),
    "a deep message": asked(deep(60)),
    "numbers that overflow": asked(
        lambda model: tree_map(lambda leaf: leaf.sign() * 3e38, model), answered=1, charged=1
    ),
    # Deliveries
    "a model of a run that was not begun": Lie(lambda s: s.deliver()),
    "a delivery with a long manifest": Lie(lambda s: s.deliver(manifest=LONG)),
    "a delivery with a long certificate": Lie(lambda s: s.deliver(certificate=LONG)),
    "a delivery with a strange signature": several(lambda s: s.deliver(signature=WEIRD[:99]), 0, 0),
    "a delivery into another folder": several(lambda s: s.deliver(run="../x"), 0, 0),
    # Repetition: equal questions are one release, others are charged
    "one question three times": several(lambda s: [s.ask() for _ in range(3)], 3, 1),
    "one attempt with two questions": several(lambda s: [s.ask(attempt="a") for _ in "ab"], 2, 2),
    "one attempt that comes back": several(
        lambda s: [s.ask(attempt=name) for name in ("a", "b", "a")], 3, 1
    ),
    "three keys": several(lambda s: [s.ask(key=key) for key in range(3)], 3, 3),
    "two runs interleaved": Lie(lambda s: [s.begin(), interleaved(s)], 5, 2),
    "scores with every flag": several(
        lambda s: [s.score(flags={f: True}) for f in ("with_auc", "with_dropout", "with_train")],
        1, 0,
    ),
    "more questions than allowed": several(
        lambda s: [s.score() for _ in range(QUESTIONS + 5)], QUESTIONS, 0
    ),
    "more updates than it announced": several(
        lambda s: [s.ask(key=key) for key in range(BUDGET + 3)], BUDGET, BUDGET, broke=True
    ),
}  # fmt: skip


def honest(server: Server) -> None:
    """An honest run after the lie: it is answered, and charged once."""
    site = server.site
    before = len(site.account.releases)
    assert server.hello(run="honest").head["features"] == site.data.graph.num_features
    assert server.begin(run="honest-0").head == {}
    trained = server.ask(run="honest-0", round=1)
    assert trained.head == {}
    assert len(site.account.releases) == before + 1
    reply = decode(trained.body)
    assert float(reply.weight) == 1.0
    scored = decode(server.score(run="honest-0", round=1).body)
    assert not scored.confusion.any()


@pytest.mark.parametrize("name", LIES)
def test_no_lie_gets_more_than_the_policy_allows(name, tmp_path):
    lie, site = LIES[name], make_site(tmp_path, POLICY)
    server = Server(site)
    site.audit.note("start")
    size, outside = site.audit.path.stat().st_size, set(tmp_path.iterdir())
    lie.tell(server)
    kinds = [answer.head.get("failure", "") for _, answer in server.answers]
    assert set(kinds) <= {"", "bad", "refused"}
    assert kinds.count("") == lie.answered, [answer.head for _, answer in server.answers]
    for packet, answer in server.answers:
        assert len(answer.head.get("reason", "")) <= 400
        if packet.head.get("step") == "score" and not answer.head:
            # The same for every site: no count, no loss, and an area under the curve of -1.
            assert not any(bool(leaf.gt(0).any()) for leaf in leaves(decode(answer.body)))
    # Every answered update is charged, and nothing else is.
    charged = [event for event in site.audit.events(event="sent") if "release" in event]
    trained = [event for event in site.audit.events(event="sent") if event["step"] == "train"]
    assert charged == trained
    assert len({event["release"] for event in charged}) == len(site.account.releases)
    assert len(site.account.releases) == lie.charged
    assert epsilon(site.account.precision(), 1e-5) <= POLICY.epsilon
    # The log is whole, and a packet adds at most a short line.
    assert len(check_audit(site.audit.path)) == len(site.audit.events())
    assert site.audit.path.stat().st_size - size <= LINE * len(server.answers)
    assert set(tmp_path.iterdir()) == outside
    if lie.broke:
        assert "would make it" in server.begin(run="honest-0").head["reason"]
    else:
        honest(server)


def test_there_are_many_lies():
    assert len(LIES) >= 40
