"""FedTGP: the card's golden numbers, what the server learns, a reduction, and its options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.federation import Federation
from atoll.core.prototypes import nearness, pull
from atoll.core.tree import leaves, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import FedTGP, Local
from atoll.methods.fedtgp import contrast, learned, margin
from atoll.nn import GCN, GraphGIN
from atoll.testing import (
    CLASSES,
    FEATURES,
    check_method,
    double_precision,
    small_federation,
    small_graph_federation,
)
from tests.methods.test_fedproto import uneven_federation

engines = pytest.mark.parametrize("engine", ENGINES)
NET = GCN(FEATURES, CLASSES, hidden=6)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


# The card's numbers: two clients, of which the first has no class 2


def uploaded() -> tuple[Tensor, Tensor]:
    first, second = [[0.0, 0], [4, 0], [0, 0]], [[2.0, 0], [4, 2], [0, 6]]
    return torch.tensor([first, second]), torch.tensor([[1.0, 1, 0], [1, 1, 1]])


def global_prototypes() -> Tensor:
    return torch.tensor([[1.0, 0], [4, 1], [0, 5]])


@pytest.mark.parametrize(
    ("kind", "expected"), [("paper", 6.403124), ("code", 6.082763), ("openfgl", 0.790569)]
)
def test_golden_margins(kind: str, expected: float) -> None:
    assert float(margin(*uploaded(), kind)) == pytest.approx(expected, abs=1e-6)
    if kind != "openfgl":  # a fourth class that no client holds changes nothing
        prototypes, owned = uploaded()
        prototypes = torch.cat([prototypes, torch.zeros(2, 1, 2)], dim=1)
        owned = torch.cat([owned, torch.zeros(2, 1)], dim=1)
        assert float(margin(prototypes, owned, kind)) == pytest.approx(expected, abs=1e-6)


def test_one_class_alone_has_the_largest_margin() -> None:
    prototypes, owned = torch.ones(2, 3, 4), torch.tensor([[0.0, 1, 0], [0, 1, 0]])
    assert float(margin(prototypes, owned, "code").clamp(max=100.0)) == 100.0
    assert float(margin(prototypes, owned, "paper")) == 0.0


PER_PROTOTYPE = {
    0.0: [0.060470, 0.130886, 0.264658, 0.088174, 0.010648],
    6.082763: [3.343496, 4.131676, 4.896194, 3.723183, 1.738964],
    6.403124: [3.654131, 4.447627, 5.214505, 4.036901, 2.009965],
}
MEANS = {0.0: 0.110967, 6.082763: 3.566703, 6.403124: 3.872626}


@pytest.mark.parametrize("delta", MEANS)
def test_golden_contrast(delta: float) -> None:
    (prototypes, owned), given = uploaded(), torch.tensor(delta)
    found = contrast(prototypes, owned, global_prototypes(), given)
    assert float(found) == pytest.approx(MEANS[delta], abs=2e-6)
    places = owned.nonzero().tolist()
    for (client, number), expected in zip(places, PER_PROTOTYPE[delta], strict=True):
        alone = torch.zeros_like(owned)
        alone[client, number] = 1
        one = contrast(prototypes, alone, global_prototypes(), given)
        assert float(one) == pytest.approx(expected, abs=2e-6)


def test_golden_faults_of_openfgl() -> None:
    prototypes, owned = uploaded()
    every, delta = torch.ones_like(owned), margin(prototypes, owned, "openfgl")
    found = contrast(prototypes, every, global_prototypes(), delta)
    assert float(found) == pytest.approx(0.993168, abs=1e-6)


@pytest.mark.parametrize(("kind", "expected"), [("nodes", 0.5), ("classes", 1.5), ("means", 1.0)])
def test_golden_pull_and_inference(kind: str, expected: float) -> None:
    z, y = torch.tensor([[1.0, 1], [3, 1], [0, 4]]), torch.arange(3)
    found = pull(z, y, torch.ones(3), global_prototypes(), torch.ones(3), kind)
    assert float(found) == pytest.approx(expected)
    assert nearness(z, global_prototypes(), torch.ones(3)).argmax(-1).tolist() == [0, 1, 2]


# The server


def run(method: Any, federation: Federation, engine: str = "fused", **more: Any) -> Run:
    return Experiment(method, federation, engine=engine, **{"rounds": 3, **more}).run()


def test_a_prototype_that_is_met_has_a_finite_gradient() -> None:
    (prototypes, owned), met = uploaded(), torch.tensor([[0.0, 0], [4, 0], [0, 6]])
    met.requires_grad_()
    contrast(prototypes, owned, met, torch.tensor(1.0)).backward()
    assert met.grad is not None
    assert met.grad.isfinite().all()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_server_trains_as_stock_torch(optimizer: Any) -> None:
    method = FedTGP(NET, server_optimizer=optimizer, server_epochs=7, server_lr=0.05, tau=0.01)
    simulation = Simulation(small_federation(), method)
    server = method.init(simulation.clients(-1))
    for number in range(2):
        everyone = simulation.clients(number)
        before, server = server, method.round(server, everyone)
        reply = everyone.replies["train"]
        if number == 0:  # the first round also makes the network
            made = method.first_learner(6, everyone.key).params
            stock = tree_map(lambda leaf: leaf.clone().requires_grad_(), made)
            steps = torch.optim.SGD(leaves(stock), lr=0.05)
            if optimizer == "adam":
                steps = torch.optim.Adam(leaves(stock), lr=0.05, weight_decay=5e-4)
        one, two = stock["first"], stock["second"]
        for _ in range(7):
            steps.zero_grad()
            hidden = torch.relu(stock["vectors"] @ one["weight"] + one["bias"])
            made = hidden @ two["weight"] + two["bias"]
            own = torch.cdist(reply.prototypes.flatten(0, 1), made)
            own = own + 0.01 * torch.eye(CLASSES).repeat(len(reply.mass), 1)
            labels = torch.arange(CLASSES).repeat(len(reply.mass))
            torch.nn.functional.cross_entropy(-own, labels).backward()
            steps.step()
        for ours, leaf in zip(leaves(server.learner.params), leaves(stock), strict=True):
            torch.testing.assert_close(ours, leaf.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(server.prototypes, learned(server.learner.params))
        assert before.learner is None or not torch.equal(before.prototypes, server.prototypes)


def test_a_class_that_no_client_holds_is_never_predicted() -> None:
    made = run(FedTGP(NET), uneven_federation())
    assert made.server.known.tolist() == [1, 1, 0]
    graphs = uneven_federation().prepared(NET.views).graphs
    for graph, state in zip(graphs, made.simulation.engine.export_states(), strict=True):
        assert (made.experiment.method.predict(graph, made.server, state).argmax(-1) < 2).all()


def test_only_prototypes_and_flags_cross() -> None:
    method = FedTGP(NET)
    made = run(method, small_federation(), rounds=2)
    table = made.ledger.by_step()["train"]
    up, down = CLASSES * (6 + 1), CLASSES * (6 + 1)
    assert table["up"] == 8 * 8 * up
    assert table["down"] == 8 * (8 * 1) + 4 * 8 * down  # the seed; prototypes in the second round


# Reductions and options


@engines
@pytest.mark.parametrize(
    ("net", "make"),
    [(NET, small_federation), (GraphGIN(FEATURES, CLASSES, hidden=5), small_graph_federation)],
)
def test_without_pull_it_is_local(engine: str, net: Any, make: Any) -> None:
    ours = run(FedTGP(net, lam=0.0, inference="head"), make(), engine, fraction=0.75)
    local = run(Local(net), make(), engine, fraction=0.75)
    pairs = [made.simulation.engine.export_states() for made in (ours, local)]
    for one, other in zip(*pairs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or all(map(torch.equal, leaves(one.layers), leaves(other.model)))
    scores = [made.history.array("deployed", "loss", "val") for made in (ours, local)]
    assert scores[0].tolist() == [pytest.approx(row, nan_ok=True) for row in scores[1].tolist()]
    pulled = run(FedTGP(net), make(), engine, fraction=0.75).simulation.engine.export_states()
    assert not all(map(torch.equal, leaves(pulled), leaves(pairs[0])))


@dataclass(frozen=True)
class ByThePaper(FedTGP):
    """The paper's margin and regulariser."""

    margin: Any = "paper"
    pull: Any = "means"
    lam: float = 0.1


@dataclass(frozen=True)
class ByOpenFGL(FedTGP):
    """OpenFGL's server, its faults, and its head."""

    margin: Any = "openfgl"
    pull: Any = "classes"
    inference: Any = "head"
    server_optimizer: Any = "adam"
    compat: Any = "zero-prototypes"


@pytest.mark.long
@pytest.mark.parametrize("method", [ByThePaper, ByOpenFGL])
def test_contract_with_options(method: type[FedTGP]) -> None:
    check_method(method, rounds=2)
