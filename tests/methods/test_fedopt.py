"""FedOPT: the card's numbers, what it reduces to, and a server that remembers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atoll.core.aggregate import Adaptive, Moments
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.optim import SGD, Adam
from atoll.core.tree import Tree, leaves
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config, resolve
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import FedAvg, FedOpt
from atoll.methods.fedopt import Server
from atoll.nn import GCN, GraphGIN
from atoll.testing import (
    CLASSES,
    FEATURES,
    check_method,
    double_precision,
    small_federation,
    small_graph_federation,
)
from tests.methods.quadratic import Quadratic, owner

engines = pytest.mark.parametrize("engine", ENGINES)
NET, GRAPH_NET = GCN(FEATURES, CLASSES, hidden=6), GraphGIN(FEATURES, CLASSES, hidden=5)
UPDATES = [[0.1, -0.2], [0.05, 0.3], [-0.2, 0.1]]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def play(engine: str, **settings: Any) -> Server:
    """The card's three updates: one plain step of rate 1 jumps onto a = x + Δ."""
    method = FedOpt(Quadratic((0.0, 0.0)), SGD(lr=1.0), epochs=1, **settings)
    server: Any = None
    for number, update in enumerate(UPDATES):
        x = torch.zeros(2) if server is None else server.model["w"]
        # Two clients of different size whose weighted mean is the update.
        off = torch.tensor([0.03, -0.06])
        places = [x + torch.tensor(update) + 2 * off, x + torch.tensor(update) - off]
        graphs = [owner([1.0, 1.0], a.tolist(), n) for a, n in zip(places, (1, 2), strict=True)]
        simulation = Simulation(Federation(tuple(graphs), classes=2), method, engine=engine)
        server = method.init(simulation.clients(-1)) if server is None else server
        server = method.round(server, simulation.clients(number))
    return server


GOLDEN = {
    "adam": ([0.174469, -0.008259], [-0.0074, 0.0208], [0.000523730, 0.001384010]),
    "yogi": ([0.174101, -0.008629], [-0.0074, 0.0208], [0.000526, 0.001401]),
    "adagrad": ([0.056421, 0.010128], [-0.2, 0.1], [0.052501, 0.140001]),
}


@engines
@pytest.mark.parametrize("name", GOLDEN)
def test_golden(engine: str, name: Any) -> None:
    x, m, v = GOLDEN[name]
    server = play(engine, server_optimizer=name, server_lr=0.1, tau=1e-3)
    assert server.model["w"].tolist() == pytest.approx(x, abs=1e-6)
    assert server.mean["w"].tolist() == pytest.approx(m, abs=1e-9)
    assert server.square["w"].tolist() == pytest.approx(v, abs=1e-9)


@engines
def test_sgd_with_momentum(engine: str) -> None:
    server = play(engine, server_optimizer="sgd", server_lr=0.5, server_beta1=0.9)
    x = m = torch.zeros(2)
    for update in torch.tensor(UPDATES):
        m = 0.9 * m + 0.1 * update
        x = x + 0.5 * m
    assert server.square is None
    assert server.model["w"].tolist() == pytest.approx(x.tolist(), abs=1e-12)


def test_yogi_does_not_move_where_it_already_is() -> None:
    # sign(0) = 0: v stays where Δ² equals it.
    rule, v = Adaptive("yogi", tau=0.5), torch.tensor([0.25, 0.25, 0.25])
    _, after = rule.step(torch.tensor([0.5, -0.5, 0.0]), Moments(torch.zeros(3), v))
    assert torch.equal(after.square, v)


# Reductions


def run(method: Any, federation: Federation, engine: str = "fused", **more: Any) -> Run:
    return Experiment(method, federation, engine=engine, **{"rounds": 3, **more}).run()


def same(a: Tree, b: Tree) -> bool:
    return all(map(torch.equal, leaves(a), leaves(b)))


@engines
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(
    ("net", "make"), [(NET, small_federation), (GRAPH_NET, small_graph_federation)]
)
def test_plain_steps_of_one_are_fedavg_bit_for_bit(
    engine: str, net: Any, make: Any, fraction: float
) -> None:
    ours = run(FedOpt(net, SGD(lr=0.1), server_optimizer="sgd"), make(), engine, fraction=fraction)
    average = run(FedAvg(net, SGD(lr=0.1)), make(), engine, fraction=fraction)
    assert same(ours.server.model, average.server)


@pytest.mark.parametrize("keeping", ["keep", "reset"])
def test_moments_of_the_clients_as_in_fedavg(keeping: Any) -> None:
    settings = {"optimizer_state": keeping}
    ours = run(FedOpt(NET, Adam(), server_optimizer="sgd", **settings), small_federation())
    average = run(FedAvg(NET, Adam(), **settings), small_federation())
    assert same(ours.server.model, average.server)
    ages = {float(s.moments.steps) for s in ours.simulation.engine.export_states()}
    assert ages == ({9.0} if keeping == "keep" else {3.0})


@pytest.mark.parametrize("name", ["adam", "yogi", "adagrad"])
def test_a_huge_tau_makes_the_server_plain(name: Any) -> None:
    # √v + τ is 2τ where v stays τ², so that η_s = 2τ takes plain steps.
    tau = 1e6
    settings = {"server_lr": 2 * tau, "tau": tau, "server_beta1": 0.0, "server_beta2": 0.999999999}
    ours = run(FedOpt(NET, server_optimizer=name, **settings), small_federation())
    average = run(FedOpt(NET, server_optimizer="sgd"), small_federation())
    for one, other in zip(leaves(ours.server.model), leaves(average.server.model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_what_no_client_moves_stays_where_it_is() -> None:
    server = play("fused", server_optimizer="adam", server_lr=0.1)
    method = FedOpt(Quadratic((0.0, 0.0)), server_beta1=0.0)
    again = method.step(server, server.model)
    assert torch.equal(again.model["w"], server.model["w"])


@pytest.mark.long
def test_contract_of_the_others() -> None:
    check_method(lambda net: FedOpt(net, server_optimizer="yogi"), rounds=2)
    check_method(lambda net: FedOpt(net, server_optimizer="sgd", server_beta1=0.5), rounds=2)


# Configuration


def test_every_server_has_its_own_defaults_and_they_can_be_set() -> None:
    def built(**settings: Any) -> Any:
        return build_method(resolve(make_config(method="fedopt", set=settings))[0], 5, 3)

    assert built(server_optimizer="sgd").adaptive.rates == (1, 0)
    assert built().adaptive.rates == (0.03, 0.9)
    assert built(server_optimizer="adagrad").adaptive.rates == (0.1, 0)
    assert built(server_lr="0.5", server_beta1="0.25").adaptive.rates == (0.5, 0.25)
    assert built(lr="0.3").optimizer == SGD(0.3, 5e-4)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"server_optimizer": "adm"}, "unknown server_optimizer 'adm'; did you mean 'adam'"),
        ({"server_lr": 0.0}, "server_lr is 0.0; give a positive learning rate"),
        ({"tau": 0.0}, "tau is 0.0; give a positive number"),
        ({"server_beta1": 1.0}, "server_beta1 is 1.0; give a number from 0"),
        ({"server_beta2": -0.1}, "server_beta2 is -0.1; give a number from 0"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace(".", r"\.")):
        FedOpt(NET, **settings)


@engines
@pytest.mark.parametrize("optimizer", ["adam", "yogi", "adagrad"])
def test_fedavg_with_an_adaptive_server_is_fedopt(engine: str, optimizer: Any) -> None:
    federation, client = small_federation(), SGD(lr=0.5)
    rule = Adaptive(optimizer, lr=0.2, tau=1e-2)
    ours = run(FedAvg(NET, client, aggregate=rule), federation, engine).server
    settings: Any = {"server_optimizer": optimizer, "server_lr": 0.2, "tau": 1e-2}
    theirs = run(FedOpt(NET, client, **settings), federation, engine).server
    assert all(map(torch.equal, leaves(ours.model), leaves(theirs.model)))
    assert all(map(torch.equal, leaves(ours.rule.square), leaves(theirs.square)))
