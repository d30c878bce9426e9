"""Inputs of `fuzz.packets`: readers of another party's bytes, real inputs, and mutations.

An input is a kind, a head (JSON, or the text of an order) and a body (`codec.encode`). Mutations
keep most of its structure.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import random
import shutil
import tomllib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from atoll.core.errors import AtollError
from atoll.core.message import ToAll
from atoll.core.random import make_key
from atoll.core.tree import take
from atoll.deploy.coordinator import Order, order_text, read_order
from atoll.deploy.policy import Policy
from atoll.deploy.site import Site
from atoll.deploy.site_data import SiteData, read_site_data, write_clients
from atoll.engines.clients import Simulation
from atoll.engines.codec import check_like, decode, encode, load_checkpoint
from atoll.engines.flare import from_shareable
from atoll.engines.fleet import PROTOCOL, Packet
from atoll.experiment.build import build_method
from atoll.experiment.config import config_text, make_config
from atoll.testing import small_federation

ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 65, 1 << 31, 1 << 63, -(1 << 63), 1 << 80, 0.5, 1e308),
    *("", "x" * 300, "../x", "/tmp/x", "\ud800", "\0", "-1", "1e400", "nan", "own", "net"),
    *([], {}, [0], [1] * 65, [0, 0], [1 << 62, 4], {"": ""}, {"a": {"b": 1}}, ["train", "score"]),
    *("method", "method.base", "evaluator", "train", "score", "F32", "I64", "F8_E4M3", "BOOL"),
    *("atoll.core.tree.Empty", "atoll.core.aggregate.Update", "builtins.eval", {"value": 1}),
    *({"tensor": ""}, {"record": "atoll.core.tree.Empty", "fields": {}}, {"dict": {"x": 3}}),
)
SMALL = (
    None,
    True,
    -1,
    0,
    1,
    3,
    0.5,
    -0.5,
    "",
    "x" * 300,
    "\0",
    "é",
    [],
    {},
    [1],
    {"a": 1},
    1 << 70,
)
"""Values for a configuration. None of them makes a model larger."""
SITE_INPUTS = 150  # inputs after which the site is replaced, because its audit log grows
MOST = 1 << 16  # largest size of a mutated input in bytes


class Case(NamedTuple):
    """One input."""

    kind: int  # an index of `Targets.all`
    head: bytes
    body: bytes

    def packed(self) -> bytes:
        return bytes([self.kind]) + len(self.head).to_bytes(4, "little") + self.head + self.body

    @staticmethod
    def unpacked(data: bytes) -> Case:
        size = int.from_bytes(data[1:5], "little")
        return Case(data[0] if data else 0, data[5 : 5 + size], data[5 + size :])


class Watched(Site):
    """A site that keeps errors of other types, which `answer` turns into replies."""

    foreign: Exception | None = None

    def _hello(self, packet: Packet) -> Packet:
        with self._watch():
            return super()._hello(packet)

    def _begin(self, packet: Packet) -> Packet:
        with self._watch():
            return super()._begin(packet)

    def _step(self, packet: Packet) -> Packet:
        with self._watch():
            return super()._step(packet)

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        try:
            yield
        except AtollError:
            raise
        except Exception as error:
            # A step is the method's code, which may fail in any way on a message of another shape.
            frames = traceback.extract_tb(error.__traceback__)
            inside = any(f.filename.endswith("core/method.py") for f in frames)
            self.foreign = None if inside else error
            raise


class Targets:
    """All functions that read bytes of another party, on a tiny site."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, 0
        federation = small_federation()
        self.data: SiteData = read_site_data(write_clients(federation, folder / "data")[0])
        self.options: dict[str, Any] = {
            "method": "fedavg",
            "rounds": 9,
            "seeds": 2,
            "set": {"hidden": 5},
        }
        config = make_config(**self.options)
        self.method = build_method(config, self.data.graph.num_features, self.data.classes)
        self.model = self.method.net.init(make_key(0))
        simulation = Simulation(federation, self.method, engine="serial")
        self.reply = take(simulation.clients(0).map(self.method.train, ToAll(self.model)), 0)
        self.all: tuple[Callable[[Case], object], ...] = (
            lambda case: from_shareable({"head": case.head.decode(errors="replace"), "body": b""}),
            self._decode,
            self._answer,
            self._answer,  # twice, because sites have the most to lose
            lambda case: read_order(case.head.decode(errors="replace")),
            self._load,
        )
        self.site = self._fresh()

    def try_one(self, case: Case) -> None:
        """Read one input, and raise every error except an `AtollError`."""
        with contextlib.suppress(AtollError):
            self.all[case.kind % len(self.all)](case)

    def seeds(self) -> list[Case]:
        """Return real inputs of every kind."""
        config = config_text(make_config(**self.options))
        dp = config_text(make_config(**self.options, dp="clip=1,noise=2"))
        hello = {"do": "hello", "version": PROTOCOL, "run": "r-0", "method": "fedavg"}
        step = {"do": "step", "run": "r-0", "owner": "method", "step": "train", "flags": {}}
        step |= {"round": 0, "attempt": "a", "state": -2, "key": 77}
        score = step | {"owner": "evaluator", "step": "score", "flags": {"with_train": False}}
        begin = {"do": "begin", "run": "r-1", "config": config}
        heads = [hello | {"rounds": 9, "dp": None}, begin, begin | {"config": dp}, step, score]
        heads += [hello | {"rounds": 9, "dp": {"clip": 1, "noise": 2.0}}, {"do": "ping"}]
        order = Order(run="r", config=config, sites=("a", "b"), quorum=1)
        bodies = [encode(self.model), encode(self.reply), encode({"a": [1, (2.0, None)]})]
        plain = [json.dumps(head).encode() for head in heads]
        orders = [order_text(order).encode()]
        found = [Case(0, head, b"") for head in plain]
        found += [Case(kind, b"", body) for body in bodies for kind in (1, 5)]
        found += [Case(2, head, body) for head in plain for body in bodies[:2]]
        return found + [Case(4, text, b"") for text in orders]

    def _decode(self, case: Case) -> None:
        tree = decode(case.body)
        for free in ({}, {"model": "declared"}):
            with contextlib.suppress(AtollError):
                check_like(tree, self.reply, free)

    def _load(self, case: Case) -> None:
        path = self.folder / "checkpoint.atoll"
        path.write_bytes(hashlib.sha256(case.body).digest() + case.body)
        load_checkpoint(path)

    def _answer(self, case: Case) -> None:
        packet = from_shareable({"head": case.head.decode(errors="replace"), "body": case.body})
        self.asked += 1
        if self.asked % SITE_INPUTS == 0:
            self.site = self._fresh()
        if self.site.job is None or self.site.job.run != "r-0":
            self._begin()  # after a refused begin, or one with a mutated configuration
        self.site.foreign = None
        self.site.answer(packet)
        if self.site.foreign is not None:
            raise self.site.foreign

    def _fresh(self) -> Watched:
        shutil.rmtree(self.folder / "site", ignore_errors=True)
        self.site = Watched(self.data, Policy(), self.folder / "site")
        self._begin()
        return self.site

    def _begin(self) -> None:
        config = config_text(make_config(**self.options))
        answer = self.site.answer(Packet({"do": "begin", "run": "r-0", "config": config}, b""))
        assert not answer.head, answer.head


def mutated(case: Case, chance: random.Random, others: list[Case]) -> Case:
    """Return the case with one to three changes, which keep most of its structure."""
    for _ in range(chance.randint(1, 3)):
        head, body = case.head, case.body
        match chance.randrange(8):
            case 0 | 1 | 2:
                head = _new_head(head, chance)
            case 3 | 4 | 5:
                body = _new_body(body, chance)
            case 6:
                head, body = _flipped(head, chance), _flipped(body, chance)
            case _:
                body = chance.choice(others).body
        case = Case(case.kind, head[:MOST], body[:MOST])
    return case


def _new_head(head: bytes, chance: random.Random) -> bytes:
    try:
        if head[:1] != b"{":  # an order in base64
            return base64.urlsafe_b64encode(_new_json(base64.urlsafe_b64decode(head), chance))
        plain = json.loads(head)
        if isinstance(plain.get("config"), str) and chance.random() < 0.7:
            plain["config"] = tomli_w.dumps(_changed(tomllib.loads(plain["config"]), chance, SMALL))
            return json.dumps(plain).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return _flipped(head, chance)
    return _new_json(head, chance)


def _new_json(text: bytes, chance: random.Random) -> bytes:
    try:
        return json.dumps(_changed(json.loads(text), chance, ODD)).encode()
    except (ValueError, RecursionError):
        return _flipped(text, chance)


def _new_body(body: bytes, chance: random.Random) -> bytes:
    """Return a safetensors file with another header and the matching length."""
    size = int.from_bytes(body[:8], "little")
    try:
        header = json.loads(body[8 : 8 + size])
        if chance.random() < 0.5:
            plan = _changed(json.loads(header["__metadata__"]["tree"]), chance, ODD)
            header["__metadata__"]["tree"] = json.dumps(plan)
        else:
            header = _changed(header, chance, ODD)
        if chance.random() < 0.2:  # an array of many dimensions and the same size
            array = header[chance.choice([name for name in header if name != "__metadata__"])]
            array["shape"] = array["shape"] + [1] * chance.randrange(100)
    except (ValueError, TypeError, LookupError, RecursionError, AttributeError):
        return _flipped(body, chance)
    try:
        text = json.dumps(header).encode()
    except RecursionError:  # many mutations nested it
        return body
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body[8 + size :]


def _flipped(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    place, size = chance.randrange(len(data)), chance.choice([0, 1, 1, 1, 4, len(data)])
    return data[:place] + chance.randbytes(chance.choice([0, 1, 1, 4])) + data[place + size :]


def _changed(value: Any, chance: random.Random, odd: tuple[Any, ...]) -> Any:
    """Return a JSON value with one place replaced, removed, repeated or nested."""
    if isinstance(value, dict | list) and value and chance.random() < 0.85:
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        key, inner = chance.choice(items)
        match chance.randrange(8):
            case 0:
                items = [pair for pair in items if pair[0] != key]
            case 1:
                items.append((chance.choice(("x", "", "é", "model.0", "r-1")), inner))
            case _:
                items = [(k, _changed(v, chance, odd) if k == key else v) for k, v in items]
        return dict(items) if isinstance(value, dict) else [inner for _, inner in items]
    if chance.random() < 0.02:
        for _ in range(chance.choice((3, 70, 500))):
            value = [value]
        return value
    return chance.choice(odd)
