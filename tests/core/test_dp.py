"""Clipping and noise around a method: the data that may leave a client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.core.dp import Noised, clipped, keyed_noise
from atoll.core.errors import ConfigError
from atoll.core.message import ToAll
from atoll.core.method import Method, client_step
from atoll.core.random import make_key
from atoll.core.tree import leaves, norm, tree_map
from atoll.engines.clients import Simulation
from atoll.methods import METHODS, FedAvg
from atoll.nn import NETS
from atoll.testing import (
    CLASSES,
    FEATURES,
    Case,
    check_engines,
    check_method,
    double_precision,
    small_federation,
)


def method_of(name, **settings):
    cls = METHODS[name]
    net = NETS[(*cls.nets, "gcn")[0]](FEATURES, CLASSES, hidden=5, dropout=0.4)
    return cls(net=net, **settings)


ABLE = [name for name in METHODS if not method_of(name).why_not_private()]


def noised(name="fedavg", clip=0.5, noise=0.3, **settings):
    base = method_of(name, **settings)
    return Noised(net=base.net, base=base, clip=clip, noise=noise)


floats = st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=60, deadline=None)
@given(st.lists(floats, min_size=1, max_size=9), st.floats(1e-6, 1e6))
@example([3.38449161611322e38, 3.384492021761412e38], 0.25)
def test_no_update_is_longer_than_the_clip(numbers, clip):
    half = len(numbers) // 2
    update = {"a": torch.tensor(numbers[:half]), "b": [torch.tensor(numbers[half:])]}
    after = clipped(update, clip)
    length = torch.cat([leaf.double() for leaf in leaves(after)]).norm()
    assert length <= clip * (1 + 1e-6)


def test_a_short_update_stays_and_a_long_one_keeps_its_direction():
    update = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert torch.equal(clipped(update, 5.0)["a"], update["a"])
    assert torch.allclose(clipped(update, 1.0)["a"], torch.tensor([0.6, 0.0]))
    assert torch.allclose(clipped(update, 1.0)["b"], torch.tensor([0.8]))


def test_noise_has_the_variance_that_was_asked_for():
    update = {"a": torch.zeros(200, 300), "b": torch.zeros(40_000)}
    drawn = keyed_noise(update, make_key(3))
    numbers = torch.cat([leaf.flatten() for leaf in leaves(drawn)]).double()
    assert abs(numbers.mean()) < 4 / 100_000**0.5
    assert abs(numbers.var() - 1) < 4 * (2 / 100_000) ** 0.5
    assert abs((numbers**4).mean() - 3) < 4 * (96 / 100_000) ** 0.5
    other = keyed_noise(update, make_key(4))["b"].double()
    assert abs((drawn["b"].double() * other).mean()) < 4 / 200


def one_reply(method, key=7):
    graph = Simulation(small_federation(), method, engine="serial").engine.graphs[1]
    server = method.base.init(Simulation(small_federation(), method).clients(-1))
    with torch.no_grad():
        return method.train(graph, server, None, make_key(key))[0], server


def test_what_is_sent_is_the_clipped_update_and_noise_around_it():
    quiet, server = one_reply(noised(noise=0.0, clip=0.01))
    update = tree_map(torch.sub, quiet.model, server)
    assert norm(update) == pytest.approx(0.01, rel=1e-3)
    loud, _ = one_reply(noised(noise=2.0, clip=0.01))
    rest = torch.cat(
        [leaf.flatten() for leaf in leaves(tree_map(torch.sub, loud.model, quiet.model))]
    )
    assert rest.std() == pytest.approx(2.0 * 0.01, rel=0.25)
    bare = noised(noise=0.0, clip=1e6)
    free, server = one_reply(bare)
    graph = Simulation(small_federation(), bare, engine="serial").engine.graphs[1]
    with torch.no_grad():
        own = bare.base.train(graph, server, None, make_key(7))[0]
    for one, other in zip(leaves(free.model), leaves(own.model), strict=True):
        torch.testing.assert_close(one, other)


def test_an_update_that_is_not_finite_is_noise_alone_where_nobody_may_know():
    method = replace(noised(noise=2.0), hides_divergence=True)
    reply, server = one_reply(method)
    for bad in (float("nan"), float("inf")):
        lost = replace(reply, model=tree_map(lambda leaf, b=bad: leaf * 0 + b, reply.model))
        sent = method.release(lost, server, make_key(7))
        none = method.release(replace(reply, model=server), server, make_key(7))
        for one, other in zip(leaves(sent.model), leaves(none.model), strict=True):
            assert torch.equal(one, other)
        told = replace(method, hides_divergence=False).release(lost, server, make_key(7))
        assert not torch.isfinite(leaves(told.model)[0]).any()


def test_the_size_of_a_client_does_not_leave():
    reply, _ = one_reply(noised())
    assert float(reply.weight) == 1.0
    assert float(method_of("fedavg").weight_by == "nodes") == 1.0  # without, it would


def test_a_private_run_keeps_the_whole_contract():
    check_method(lambda net: Noised(net=net, base=FedAvg(net), clip=0.5, noise=0.3), rounds=2)


@pytest.mark.parametrize("name", [name for name in ABLE if name != "fedavg"])
def test_engines_agree_on_every_method_that_can_be_private(name):
    with double_precision():
        more = {"federated_rounds": 1, "personal_epochs": 1} if name == "adafgl" else {}
        check_engines(Case(noised(name, **more), small_federation((13, 9)), 2))


def test_no_method_loses_its_privacy():
    known = {
        "fedavg",
        "fedprox",
        "fedopt",
        "moon",
        "fedper",
        "adafgl",
        "fedath",
        "fedsage",
        "fgssl",
    }
    assert known <= {*ABLE}


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ABLE])
def test_other_methods_are_refused_with_their_reason(name):
    why = method_of(name).why_not_private()
    with pytest.raises(ConfigError, match="cannot be made differentially private") as error:
        noised(name)
    assert why in str(error.value)
    assert "does not say" not in why


def test_what_can_be_private_depends_on_the_settings():
    with pytest.raises(ConfigError, match="keep=best"):
        noised("adafgl", keep="best")


def test_a_method_that_shares_no_parameter_is_refused_before_its_first_round():
    net = NETS["sgc"](FEATURES, CLASSES)
    base = METHODS["fedper"](net=net)
    method = Noised(net=net, base=base, clip=1.0, noise=1.0)
    clients = Simulation(small_federation(), method, engine="serial").clients(-1)
    with pytest.raises(ConfigError, match="FedPer shares no parameter of this network"):
        method.init(clients)


def test_a_users_own_method_has_to_say_that_it_can():
    @dataclass(frozen=True)
    class Mine(FedAvg):
        not_private: ClassVar[str] = Method.not_private

    net = NETS["gcn"](FEATURES, CLASSES)
    with pytest.raises(ConfigError, match="does not declare that its clients send only one update"):
        Noised(net=net, base=Mine(net), clip=1.0, noise=1.0)


def test_a_method_that_claims_too_much_is_stopped():
    from atoll.methods import GCFL

    @dataclass(frozen=True)
    class Claims(GCFL):
        not_private: ClassVar[str] = ""

    net = NETS["gcn"](FEATURES, CLASSES)
    method = Noised(net=net, base=Claims(net), clip=1.0, noise=1.0)
    simulation = Simulation(small_federation(), method, engine="serial")
    server = method.init(simulation.clients(-1))
    with pytest.raises(ConfigError, match="its reply is not one update"):
        method.round(server, simulation.clients(0))

    @dataclass(frozen=True)
    class Tells(FedAvg):
        @client_step
        def train(self, graph, message, state, key):
            return {"nodes": int(graph.real.sum())}, state

    told = Noised(net=net, base=Tells(net), clip=1.0, noise=1.0)
    with pytest.raises(ConfigError, match="its reply is not one update"):
        told.train(simulation.engine.graphs[0], server, None, make_key(1))

    @dataclass(frozen=True)
    class Asks(FedAvg):
        def round(self, server, clients):
            clients.map(replace(self.train, name="peek"), ToAll(server))
            return super().round(server, clients)

    method = Noised(net=net, base=Asks(net), clip=1.0, noise=1.0)
    with pytest.raises(ConfigError, match="also answer step 'peek'"):
        method.round(method.init(simulation.clients(-1)), simulation.clients(0))


@pytest.mark.parametrize(("clip", "noise"), [(0.0, 1.0), (float("inf"), 1.0), (1.0, -1.0)])
def test_impossible_numbers_are_refused(clip, noise):
    with pytest.raises(ConfigError, match="give a finite number"):
        noised(clip=clip, noise=noise)


def test_a_clip_that_a_float_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match="at least 1e-30"):
        noised(clip=7.1e-45)
