"""FedPer: the card's numbers, FedAvg and Local as its two ends, and layers that never leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, View, make_graph
from atoll.core.optim import SGD
from atoll.core.random import make_key
from atoll.core.tree import Tree, leaves, named_leaves
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import FedAvg, FedPer, FedTAD, Local
from atoll.methods.fedper import cut, rejoin
from atoll.nn import GCN, NETS, DisenGCN, GraphGIN
from atoll.testing import (
    CLASSES,
    FEATURES,
    check_method,
    double_precision,
    small_federation,
    small_graph_federation,
)

engines = pytest.mark.parametrize("engine", ENGINES)
NET, GRAPH_NET = GCN(FEATURES, CLASSES, hidden=6), GraphGIN(FEATURES, CLASSES, hidden=5)
DISEN = DisenGCN(FEATURES, CLASSES, hidden=4)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def run(method: Any, federation: Federation, engine: str = "fused", **more: Any) -> Run:
    return Experiment(method, federation, engine=engine, **{"rounds": 3, **more}).run()


def same(a: Tree, b: Tree) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


# The card's numbers


@dataclass(frozen=True)
class TwoLayers:
    """Cross entropy 1 + ‖(base, head) - x‖²/2: one plain step of rate 1 jumps onto x."""

    views: ClassVar[Mapping[str, View]] = {}

    def init(self, key: Tensor) -> Tree:
        return [{"w": torch.zeros(2)}, {"w": torch.zeros(1)}]

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        w = torch.cat([layer["w"] for layer in params])
        q = 1 + (w - graph.x).square().sum(-1) / 2
        return torch.stack([torch.zeros_like(q), torch.log(torch.expm1(q))], dim=-1)


def wants(place: list[float], nodes: int) -> Graph:
    none, labels = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(nodes, dtype=torch.int64)
    return make_graph(torch.tensor([place] * nodes), none, labels, train=torch.ones(nodes))


@engines
def test_golden(engine: str) -> None:
    method = FedPer(TwoLayers(), SGD(lr=1.0), epochs=1)
    federation = Federation((wants([1.0, 2.0, 1.0], 1), wants([3.0, 6.0, -1.0], 3)), classes=2)
    simulation = Simulation(federation, method, engine=engine)
    server = method.round(method.init(simulation.clients(-1)), simulation.clients(0))
    assert [layer["w"].tolist() for layer in server] == [pytest.approx([2.5, 5.0])]
    heads = [state.personal[0]["w"].tolist() for state in simulation.engine.export_states()]
    assert heads == [pytest.approx([1.0]), pytest.approx([-1.0])]


def test_sizes_of_the_card() -> None:
    net = GCN(1433, 7, hidden=64)
    base, head = cut(net.init(make_key(0)), 1)
    counts = [sum(leaf.numel() for leaf in leaves(part)) for part in (base, head)]
    assert counts == [91_776, 92_231 - 91_776]


# Its two ends


@engines
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(
    ("net", "make", "personal"),
    [
        (NET, small_federation, 0),
        (DISEN, small_federation, 0),
        (GRAPH_NET, small_graph_federation, 0),
        (GRAPH_NET, small_graph_federation, 1),  # its private layers are the personal ones
    ],
)
def test_without_personal_layers_it_is_fedavg(
    engine: str, net: Any, make: Any, personal: int, fraction: float
) -> None:
    ours = run(FedPer(net, personal=personal), make(), engine, rounds=2, fraction=fraction)
    average = run(FedAvg(net), make(), engine, rounds=2, fraction=fraction)
    assert same(ours.server, average.server)


@dataclass(frozen=True)
class SameGCN(GCN):
    """A network with the same first draw at every client."""

    def init(self, key: Tensor) -> Tree:
        return GCN.init(self, make_key(7))


@dataclass(frozen=True)
class SameGIN(GraphGIN):
    """A network with the same first draw at every client."""

    def init(self, key: Tensor) -> Tree:
        return GraphGIN.init(self, make_key(7))


@engines
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(
    ("net", "make", "personal"),
    [
        (SameGCN(FEATURES, CLASSES, hidden=6), small_federation, 2),
        (SameGIN(FEATURES, CLASSES, hidden=5), small_graph_federation, 4),
    ],
)
def test_with_personal_layers_alone_it_is_local(
    engine: str, net: Any, make: Any, personal: int, fraction: float
) -> None:
    # Local starts from a common model; here the clients draw theirs, so the draw is made common.
    ours = run(FedPer(net, personal=personal), make(), engine, rounds=2, fraction=fraction)
    alone = run(Local(net), make(), engine, rounds=2, fraction=fraction)
    assert leaves(ours.server) == []
    states = (made.simulation.engine.export_states() for made in (ours, alone))
    for state, other in zip(*states, strict=True):
        if other is None:
            assert state is None
            continue
        whole = rejoin(cut(other.model, 0)[1], state.personal)  # an empty base
        whole = {**whole, **state.own.layers} if isinstance(whole, dict) else whole
        assert [n for n, _ in named_leaves(whole)] == [n for n, _ in named_leaves(other.model)]
        assert same(whole, other.model)


# Layers that never leave


@pytest.mark.parametrize(
    ("net", "make", "personal", "names"),
    [
        (NET, small_federation, 1, {"0.weight", "0.bias"}),
        (replace(NET, layers=3), small_federation, 2, {"0.weight", "0.bias"}),
        (DISEN, small_federation, 1, {"encoder.weight", "encoder.bias"}),
        (
            GRAPH_NET,
            small_graph_federation,
            3,
            {
                f"convolutions.0.{part}.{n}"
                for part in ("inner", "outer")
                for n in ("weight", "bias")
            },
        ),
    ],
)
def test_only_the_base_crosses(net: Any, make: Any, personal: int, names: set[str]) -> None:
    made = run(FedPer(net, personal=personal), make(), rounds=1)
    assert {name for name, _ in named_leaves(made.server)} == names
    floats = sum(leaf.numel() for leaf in leaves(made.server))
    seen = made.ledger.by_step()["train"]
    assert seen == {"messages": 4, "down": 4 * 8 * floats, "up": 4 * 8 * (floats + 1)}


@engines
def test_everybody_draws_personal_layers_once_and_keeps_them(engine: str) -> None:
    # A rate of zero leaves every draw as it was.
    heads = [
        [s.personal for s in run(method, small_federation(), engine, rounds=n)
         .simulation.engine.export_states()]
        for method in [FedPer(NET, SGD(lr=0.0))] for n in (1, 3)
    ]  # fmt: skip
    for first, later in zip(*heads, strict=True):
        assert same(first, later)
    draws = [head[0]["weight"] for head in heads[0]]
    assert not any(torch.equal(draws[0], other) for other in draws[1:])


@engines
def test_an_absent_clients_layers_wait(engine: str) -> None:
    method = FedPer(NET)
    simulation = Simulation(small_federation(), method, engine=engine)
    server = method.round(method.init(simulation.clients(-1)), simulation.clients(0))
    before = simulation.engine.export_states()
    some = replace(simulation.clients(1), positions=torch.tensor([1, 3]))
    method.round(server, some)
    after = simulation.engine.export_states()
    assert [same(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True, False]


def test_moments_are_kept_or_reset() -> None:
    ages = [
        {
            float(state.own.moments.steps)
            for state in run(
                FedPer(NET, optimizer_state=keeping), small_federation()
            ).simulation.engine.export_states()
        }
        for keeping in ("keep", "reset")
    ]
    assert ages == [{9.0}, {3.0}]


def test_clients_predict_with_their_own_layers() -> None:
    method = FedPer(NET)
    made = run(method, small_federation())
    states = made.simulation.engine.export_states()
    graph = made.simulation.engine.graphs[0]
    own, others = (method.predict(graph, made.server, states[i]) for i in (0, 1))
    assert not torch.allclose(own, others)
    whole = [*made.server, *states[0].personal]
    assert torch.equal(own, NET(whole, graph))


@pytest.mark.parametrize("name", NETS)
def test_what_is_cut_can_be_rejoined(name: str) -> None:
    net: Any = NETS[name](FEATURES, CLASSES)
    params = net.init(make_key(0))
    for count in range(len(params) + 1):
        first, last = cut(params, count)
        assert len(last) == count
        assert rejoin(first, last) == params


@pytest.mark.long
def test_contract_of_more_personal_layers() -> None:
    @dataclass(frozen=True)
    class Two(FedPer):
        """Of a GCN all, of a GIN one convolution, too."""

        personal: int = 2

    check_method(Two, rounds=2)


# Configuration


def test_fedtad_needs_whole_models() -> None:
    with pytest.raises(ConfigError, match="distils whole models, and FedPer uploads only their"):
        run(FedTAD(NET, base=FedPer(NET)), small_federation())


def test_a_negative_number_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"personal is -1; give 0 or more .*number of layers"):
        FedPer(NET, personal=-1)


@pytest.mark.parametrize(
    ("net", "make", "personal", "asked", "there"),
    [
        (NET, small_federation, 3, 3, 2),
        (DISEN, small_federation, 4, 4, 2),
        (GRAPH_NET, small_graph_federation, 5, 4, 3),
    ],
)
def test_more_layers_than_there_are_are_refused(
    net: Any, make: Any, personal: int, asked: int, there: int
) -> None:
    problem = f"{asked} layers cannot be personal, because only {there} are shared"
    with pytest.raises(ConfigError, match=problem):
        run(FedPer(net, personal=personal), make())
