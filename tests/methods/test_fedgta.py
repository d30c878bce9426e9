"""FedGTA: the card's golden numbers on every engine, reductions, and isolated clients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.aggregate import average, cosines
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, View, make_graph
from atoll.core.method import Net, client_step
from atoll.core.optim import SGD, Adam
from atoll.core.tree import Tree, leaves, take, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config, resolve
from atoll.experiment.rounds import Experiment
from atoll.methods import FedGTA, Local
from atoll.methods.fedgta import Update, personal_weights
from atoll.nn import GAMLP, GCN, NETS
from atoll.testing import CLASSES, FEATURES, check_method, double_precision, small_federation

engines = pytest.mark.parametrize("engine", ENGINES)
NET = GCN(FEATURES, CLASSES, hidden=6)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


@dataclass(frozen=True)
class Given:
    """A network that predicts the probabilities in the features."""

    classes: int = 2

    @property
    def views(self) -> Mapping[str, View]:
        return {}

    def init(self, key: Tensor) -> Tree:
        return {"w": torch.ones(1)}

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        # Padding has no probabilities; a node's logits must be finite all the same.
        return params["w"] * torch.log(graph.x.clamp(min=1e-9))


SOFT = [[0.7, 0.3], [0.6, 0.4], [0.2, 0.8], [0.5, 0.5]]
STAR = torch.tensor([[0, 1, 1, 2, 1, 3], [1, 0, 2, 1, 3, 1]])
AUTHORS = [[2.210708, 0.180257], [0.932288, 0.798956], [0.211685, 2.179280], [0.545181, 0.513753]]
PAPER = [[0.816665, 0.118245], [0.635703, 0.502372], [0.149673, 0.785237], [0.483169, 0.451741]]
HYBRID = [0.510285, 0.489715, 0.385577, 0.365007, 0, 0, 0.125187, 0.125187]


def star(edges: Tensor = STAR) -> Graph:
    """The card's graph: training nodes 0 (class 0) and 2 (class 1)."""
    y, train = torch.tensor([0, 0, 1, 0]), torch.tensor([1.0, 0, 1, 0])
    return make_graph(torch.tensor(SOFT), edges, y, train=train)


def path() -> Graph:
    """Three nodes, the first of them labelled."""
    edges, soft = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), torch.tensor(SOFT)[:3]
    return make_graph(soft, edges, torch.zeros(3).long(), train=torch.tensor([1.0, 0, 0]))


def replies(method: FedGTA, graphs: list[Graph], engine: str = "serial") -> Any:
    """The uploads of the clients in the first round."""
    simulation = Simulation(Federation(tuple(graphs), classes=2), method, engine=engine)
    everyone = simulation.clients(0)
    method.round(method.init(simulation.clients(-1)), everyone)
    return everyone.replies["train"]


def walked(graph: Graph, **options: Any) -> Tensor:
    """Y after the last step of the propagation."""
    method = FedGTA(Given(), **options)
    (graph,) = Federation((graph,), 2).prepared(method.views).graphs
    truth = torch.nn.functional.one_hot(graph.y, 2).double()
    return method.propagated(graph.x, truth, graph)[-1]


# The card's numbers


@engines
def test_confidence_and_moments(engine: str) -> None:
    # A path beside the star: padding and other clients must not show.
    method = FedGTA(Given(), SGD(lr=0.0), order=2)
    reply = replies(method, [star(), path()], engine)
    assert float(reply.confidence[0]) == pytest.approx(1.641982, abs=1e-6)
    assert reply.moments[0].tolist() == pytest.approx(HYBRID, abs=1e-6)


@pytest.mark.parametrize(("propagation", "expected"), [("authors", AUTHORS), ("paper", PAPER)])
def test_propagation(propagation: Any, expected: list[list[float]]) -> None:
    found = walked(star(), propagation=propagation)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-6)


def test_alpha_weighs_the_neighbours_in_the_code_and_the_start_in_the_paper() -> None:
    assert torch.allclose(walked(star(), propagation="paper", alpha=0.0, steps=1), walked_once())
    train = torch.tensor([1.0, 0, 1, 0]).unsqueeze(-1)
    start = torch.tensor([[1, 0], [0.6, 0.4], [0, 1], [0.5, 0.5]])
    found = walked(star(), propagation="authors", alpha=1.0, steps=1)
    assert torch.allclose(found, walked_once() + train * start)


def walked_once() -> Tensor:
    """Â Y⁰ of the star, by hand."""
    a = torch.eye(4)
    a[STAR[0], STAR[1]] = 1
    scale = a.sum(1).rsqrt()
    start = torch.tensor([[1, 0], [0.6, 0.4], [0, 1], [0.5, 0.5]])
    return (scale.unsqueeze(1) * a * scale) @ start


def test_openfgl_starts_from_soft_training_rows_and_has_no_self_loops() -> None:
    # Two hops away nothing has arrived after one step; three steps by hand: A = 1/sqrt(2) each.
    once = walked(path(), propagation="openfgl", steps=1)
    r = 2**-0.5
    expected = [[0.35, 0.15], [0.5 * r * 0.7, 0.5 * r * 0.3], [0, 0]]
    torch.testing.assert_close(once, torch.tensor(expected))
    big = replace(path(), x=torch.tensor([[9.0, -1], [0, 0], [0, 0]]))
    assert walked(big, propagation="openfgl", steps=1).tolist()[0] == [1.0, 0.0]


def test_alpha_weighs_the_neighbours_in_openfgl() -> None:
    # A quarter from the neighbours, three quarters from the start.
    r = 2**-0.5
    expected = [[0.75 * 0.7, 0.75 * 0.3], [0.25 * r * 0.7, 0.25 * r * 0.3], [0, 0]]
    found = walked(path(), propagation="openfgl", steps=1, alpha=0.25)
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("temperature", [1.0, 20.0])
def test_temperature_flattens_what_confidence_is_read_from(temperature: float) -> None:
    q = (torch.tensor(AUTHORS) / temperature).softmax(-1)
    q[[0, 2]] = torch.eye(2)
    sure = (1 / math.e + torch.xlogy(q, q)).sum(-1)
    reply = replies(FedGTA(Given(), SGD(lr=0.0), order=2, temperature=temperature), [star()])
    degree = torch.tensor([1.0, 3, 1, 1])
    assert float(reply.confidence[0]) == pytest.approx(float(degree @ sure), abs=1e-6)
    assert reply.moments[0].tolist() == pytest.approx(HYBRID, abs=1e-6)


@engines
@pytest.mark.parametrize(
    ("moments", "expected"), [("origin", HYBRID[:4]), ("central", HYBRID[4:]), ("hybrid", HYBRID)]
)
def test_kinds_of_moments(engine: str, moments: Any, expected: list[float]) -> None:
    method = FedGTA(Given(), SGD(lr=0.0), order=2, moments=moments)
    found = replies(method, [star(), star()], engine).moments
    assert found.tolist() == [pytest.approx(expected, abs=1e-6)] * 2


def test_all_steps_of_the_propagation_can_be_described() -> None:
    method = FedGTA(Given(), SGD(lr=0.0), order=2, moments_of="all", steps=3)
    found = replies(method, [star()]).moments[0].reshape(3, 8)
    for number, row in enumerate(found, start=1):
        last = replies(replace(method, moments_of="last", steps=number), [star()]).moments[0]
        assert torch.allclose(row, last)


MOMENTS = [[1, 0.2, 0.1], [0.9, 0.25, 0.1], [0.1, 0.9, 0.5]]
MODELS = [[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]


@dataclass(frozen=True)
class Planted(FedGTA):
    """Clients reply with values from their features: moments, confidence, model."""

    @client_step
    def train(self, graph, received, state, key):
        row = graph.x[0]
        return Update({"w": row[4:6]}, row[3], row[:3]), state


@dataclass(frozen=True)
class TwoWeights(Given):
    """Two parameters that belong to no client's model."""

    def init(self, key: Tensor) -> Tree:
        return {"w": torch.tensor([7.0, 7.0])}


def planted(confidence: tuple[float, ...] = (2.0, 1.0, 4.0)) -> Federation:
    rows = zip(MOMENTS, confidence, MODELS, strict=True)
    none, y = torch.zeros(2, 0, dtype=torch.long), torch.zeros(1).long()
    graphs = [
        make_graph(torch.tensor([[*m, h, *w]]), none, y, train=torch.ones(1)) for m, h, w in rows
    ]
    return Federation(tuple(graphs), classes=2)


@engines
def test_server(engine: str) -> None:
    method = Planted(TwoWeights())
    simulation = Simulation(planted(), method, engine=engine)
    server = method.round(method.init(simulation.clients(-1)), simulation.clients(0))
    third = 1 / 3
    expected = torch.tensor([[2 * third, third], [2 * third, third], [2, 2]])
    torch.testing.assert_close(server.models["w"], expected)
    assert float(server.similarity[0, 1]) == pytest.approx(0.96 / (1.05 * 0.8825) ** 0.5)


def test_sets_are_formed_among_participants_and_the_absent_wait() -> None:
    method = Planted(TwoWeights())
    simulation = Simulation(planted(), method)
    server = method.init(simulation.clients(-1))
    some = replace(simulation.clients(0), positions=torch.tensor([1, 2]))
    server = method.round(server, some)
    assert server.models["w"].tolist() == [[7.0, 7.0], [0.0, 1.0], [2.0, 2.0]]
    assert server.similarity[0].isnan().all(), "it has not met anybody"
    # The absent one comes back: it meets the others at its own place.
    server = method.round(server, replace(some, positions=torch.tensor([0, 1])))
    third = 1 / 3
    expected = torch.tensor([[2 * third, third], [2 * third, third], [2, 2]])
    torch.testing.assert_close(server.models["w"], expected)


def test_who_is_sure_of_nothing_counts_nothing_and_stays_alone() -> None:
    method = Planted(TwoWeights())
    simulation = Simulation(planted((2.0, 1.0, 0.0)), method)
    server = method.round(method.init(simulation.clients(-1)), simulation.clients(0))
    assert server.models["w"][2].tolist() == [2.0, 2.0]
    everyone = personal_weights(torch.ones(2, 2), torch.tensor([0.0, 3.0]), 0.5)
    assert everyone.tolist() == [[0.0, 1.0], [0.0, 1.0]]


def test_a_client_without_edges_has_no_confidence() -> None:
    none = torch.zeros(2, 0, dtype=torch.long)
    reply = replies(FedGTA(Given(), SGD(lr=0.0)), [star(none), star()])
    assert reply.confidence[0] == 0
    assert reply.confidence[1] > 0


def test_cosine_of_zero_rows() -> None:
    found = cosines(torch.tensor([[0.0, 0.0], [3.0, 4.0], [4.0, 3.0]]))
    assert torch.allclose(found, torch.tensor([[1, 0, 0], [0, 1, 0.96], [0, 0.96, 1]]))


# What it reduces to


@engines
def test_with_nobody_alike_it_is_local_training(engine: str) -> None:
    gta = Experiment(FedGTA(NET, threshold=2.0), small_federation(), rounds=3, engine=engine).run()
    alone = Experiment(Local(NET), small_federation(), rounds=3, engine=engine).run()
    for number, state in enumerate(alone.simulation.engine.export_states()):
        mine = take(gta.server.models, number)
        assert all(map(torch.equal, leaves(mine), leaves(state.model)))


def test_with_everybody_alike_it_is_one_average_by_confidence() -> None:
    method = FedGTA(NET, threshold=-2.0)
    simulation = Simulation(small_federation(), method)
    everyone = simulation.clients(0)
    server = method.round(method.init(simulation.clients(-1)), everyone)
    reply = everyone.replies["train"]
    mean = average(reply.model, reply.confidence)
    tree_map(lambda a, b: torch.testing.assert_close(a, b.expand_as(a)), server.models, mean)


def test_the_public_codes_network_agrees_on_all_engines() -> None:
    """Its fault depends on the numbering of nodes, so that the whole contract cannot hold."""
    settings = FedGTA.presets["reference"]
    config, _ = resolve(make_config(method="fedgta", set={"preset": "reference"}))
    assert type(build_method(config).net) is NETS[str(settings["net"])] is GAMLP
    net = GAMLP(FEATURES, CLASSES, hidden=6, dropout=0.4, hop_weights="sgl")
    right, *runs = (
        Experiment(FedGTA(made), small_federation(), rounds=3, engine=engine).run()
        for made, engine in (
            (replace(net, hop_weights="nodes"), "serial"), *((net, engine) for engine in ENGINES)
        )
    )  # fmt: skip
    first, *others = (leaves(run.server.models) for run in runs)
    for other in others:
        for one, same in zip(first, other, strict=True):
            torch.testing.assert_close(one, same, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(first[0], leaves(right.server.models)[0])


@pytest.mark.long
@pytest.mark.parametrize("name", ["gamlp", "chebnet"])
def test_contract_with_the_networks_of_fedgta_and_adafgl(name: str) -> None:
    def make(net: Net) -> FedGTA:
        return FedGTA(net)

    make.nets = (name,)  # type: ignore[attr-defined]
    check_method(make, rounds=2)


def test_moments_of_the_optimizer_can_be_reset() -> None:
    def ages(**options: Any) -> set[float]:
        made = Experiment(FedGTA(NET, Adam(), **options), small_federation(), rounds=2).run()
        return {float(state.steps) for state in made.simulation.engine.export_states()}

    assert (ages(), ages(optimizer_state="reset")) == ({6.0}, {3.0})


@pytest.mark.long
@pytest.mark.parametrize("propagation", ["paper", "openfgl"])
def test_contract_of_the_other_propagations(propagation: Any) -> None:
    check_method(lambda net: FedGTA(net, propagation=propagation, moments_of="all"), rounds=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"order": 0}, "order is 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"alpha": -0.1}, "alpha is -0.1"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedGTA(NET, **options)
