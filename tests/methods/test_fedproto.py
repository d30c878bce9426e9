"""FedProto: the card's golden numbers, a naive reference, what it reduces to, and its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, View, make_graph, with_views
from atoll.core.losses import class_means, cross_entropy
from atoll.core.optim import SGD
from atoll.core.tree import Tree, leaves, take, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import FedAvg, FedProto, FedTAD, Local
from atoll.nn import GCN, SGC, GraphGIN
from atoll.testing import (
    CLASSES,
    FEATURES,
    check_method,
    double_precision,
    small_federation,
    small_graph_federation,
)

engines = pytest.mark.parametrize("engine", ENGINES)
both_tasks = pytest.mark.parametrize(
    ("net", "make"),
    [
        (GCN(FEATURES, CLASSES, hidden=6), small_federation),
        (GraphGIN(FEATURES, CLASSES, hidden=5), small_graph_federation),
    ],
)
NET = GCN(FEATURES, CLASSES, hidden=6)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


# The card's numbers


@dataclass(frozen=True)
class Plain:
    """A network whose embedding is the features, with three classes, one of them empty."""

    classes: int = 3
    views: ClassVar[Mapping[str, View]] = {}

    def init(self, key: Tensor) -> Tree:
        return {"w": torch.ones(2)}

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        return graph.x * params["w"]

    def logits(
        self, params: Tree, embedding: Tensor, graph: Graph, key: Tensor | None = None
    ) -> Tensor:
        return torch.cat([embedding, embedding[:, :1]], dim=1)

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        return self.logits(params, self.embed(params, graph, key), graph, key)


def owner(rows: dict[int, list[list[float]]]) -> Graph:
    """A client with these training nodes of each class."""
    x = torch.tensor([row for group in rows.values() for row in group])
    y = torch.tensor([c for c, group in rows.items() for _ in group])
    return make_graph(x, torch.zeros(2, 0, dtype=torch.int64), y, train=torch.ones(len(y)))


CARD = Federation(
    (
        owner({0: [[1.0, 0]], 1: [[1.0, 2], [-1, 2], [0, 1], [0, 3]]}),
        owner({0: [[3.0, 2], [2, 1], [4, 3]]}),
    ),
    classes=3,
)


@engines
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[2.0, 1], [0, 2]]),
        ({"aggregation": "counts"}, [[2.5, 1.5], [0, 2]]),
        ({"aggregation": "paper"}, [[1.25, 0.75], [0, 2]]),
        ({"compat": "diluted-prototypes"}, [[1.75, 0.75], [0, 1.25]]),
    ],
)
def test_golden_aggregation(engine: str, options: Any, expected: list[list[float]]) -> None:
    method = FedProto(Plain(), SGD(lr=0.0), **options)
    simulation = Simulation(CARD, method, engine=engine)
    everyone = simulation.clients(0)
    server = method.round(method.init(simulation.clients(-1)), everyone)
    assert server.prototypes.tolist() == [pytest.approx(row) for row in [*expected, [0, 0]]]
    # OpenFGL's mean has a zero vector even for the class that no client has.
    assert server.known.tolist() == [1, 1, 1 if "compat" in options else 0]
    # Only what the option needs crosses: flags, counts, a size.
    reply = everyone.replies["train"]
    counting = "aggregation" in options
    assert reply.mass.tolist() == ([[1, 4, 0], [3, 0, 0]] if counting else [[1, 1, 0], [1, 0, 0]])
    assert reply.model is None
    assert (reply.size is None) == ("compat" not in options)
    assert simulation.ledger.by_step()["train"]["up"] == 2 * 8 * (9 + ("compat" in options))


# Against a naive reference


def run(
    method: Any, federation: Federation | None = None, engine: str = "fused", **more: Any
) -> Run:
    federation = small_federation() if federation is None else federation
    return Experiment(method, federation, engine=engine, **{"rounds": 3, **more}).run()


def close(a: Tree, b: Tree) -> bool:
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(torch.allclose(one, other, rtol=1e-9, atol=1e-11) for one, other in pairs)


def naive_training(method: FedProto, graph: Graph, model: Tree, known: dict[int, Tensor]) -> Tree:
    """Plain steps on cross entropy and the authors' mean squared error."""

    def loss(params: Tree) -> Tensor:
        error = cross_entropy(method.net(params, graph), graph)
        if not known:
            return error
        chosen = graph.train > 0
        z, y = method.net.embed(params, graph)[chosen], graph.y[chosen]
        rows = zip(z, y.tolist(), strict=True)
        target = torch.stack([known.get(c, row.detach()) for row, c in rows])
        return error + method.lam * torch.nn.functional.mse_loss(z, target)

    for _ in range(method.epochs):
        slope = torch.func.grad(loss)(model)
        model = tree_map(lambda w, g: w - method.optimizer.lr * g, model, slope)
    return model


def without_class(graph: Graph, absent: int) -> Graph:
    return replace(graph, train=graph.train * (graph.y != absent))


def uneven_federation() -> Federation:
    """Only the first client has class 1, and no client has class 2."""
    graphs = [without_class(graph, 2) for graph in small_federation().graphs]
    return Federation((graphs[0], *(without_class(graph, 1) for graph in graphs[1:])), CLASSES)


@engines
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_it_is_the_authors_loop(engine: str, fraction: float) -> None:
    federation = uneven_federation()
    method = FedProto(replace(NET, dropout=0.0), SGD(lr=0.3), lam=2.0)
    made = run(method, federation, engine, rounds=8, fraction=fraction)
    graphs = federation.prepared(NET.views).graphs
    models = [NET.init(made.simulation.clients(-1).key) for _ in graphs]
    known: dict[int, Tensor] = {}
    visits: list[list[int]] = []
    for number in range(8):
        chosen = made.simulation.clients(number).sample(fraction).positions.tolist()
        visits.append(chosen)
        sent: dict[int, list[Tensor]] = {}
        for client in chosen:
            graph = graphs[client]
            models[client] = naive_training(method, graph, models[client], known)
            z = NET.embed(models[client], graph)
            for c in range(CLASSES):
                rows = z[(graph.train > 0) & (graph.y == c)]
                if len(rows):
                    sent.setdefault(c, []).append(rows.mean(0))
        known = {**known, **{c: torch.stack(rows).mean(0) for c, rows in sent.items()}}
    for client, state in enumerate(made.simulation.engine.export_states()):
        assert state is None or close(state.layers, models[client])
    assert made.server.known.tolist() == [float(c in known) for c in range(CLASSES)]
    for c, prototype in known.items():
        torch.testing.assert_close(made.server.prototypes[c], prototype)
    if fraction < 1:
        # The only owner of class 1 came late, when there was no prototype for it, and left again.
        assert [0 in chosen for chosen in visits] == [False] * 2 + [True] * 5 + [False]


# Reductions


@engines
@both_tasks
def test_without_pull_it_is_local(engine: str, net: Any, make: Any) -> None:
    ours = run(FedProto(net, lam=0.0), make(), engine, fraction=0.75)
    local = run(Local(net), make(), engine, fraction=0.75)
    pairs = [made.simulation.engine.export_states() for made in (ours, local)]
    for one, other in zip(*pairs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or all(map(torch.equal, leaves(one.layers), leaves(other.model)))
    pulled = run(FedProto(net), make(), engine, fraction=0.75)
    assert not close(pulled.server, ours.server)


@engines
@both_tasks
def test_with_weights_and_without_pull_it_is_fedavg(engine: str, net: Any, make: Any) -> None:
    ours = run(FedProto(net, lam=0.0, share_weights=True), make(), engine, fraction=0.75)
    plain = run(FedAvg(net), make(), engine, fraction=0.75)
    assert all(map(torch.equal, leaves(ours.server.start), leaves(plain.server)))
    for scored in ("deployed", "local"):
        found, expected = (made.history.array(scored, "loss", "val") for made in (ours, plain))
        assert found.tolist() == [pytest.approx(row, nan_ok=True) for row in expected.tolist()]


@pytest.mark.parametrize("by", ["nodes", "train", "uniform"])
def test_models_count_by_size_as_in_fedavg(by: Any) -> None:
    ours = run(FedProto(NET, share_weights=True, weight_by=by), rounds=1)
    plain = run(FedAvg(NET, weight_by=by), rounds=1)
    assert all(map(torch.equal, leaves(ours.server.start), leaves(plain.server)))


def test_the_first_round_is_plain() -> None:
    for rounds, alike in ((1, True), (2, False)):
        pulled, free = (run(FedProto(NET, lam=lam), rounds=rounds) for lam in (5.0, 0.0))
        assert close(pulled.server, free.server) is alike


def test_moments_are_kept_or_reset() -> None:
    for keeping, age in (("keep", 9.0), ("reset", 3.0)):
        states = run(FedProto(NET, optimizer_state=keeping)).simulation.engine.export_states()
        assert {float(state.moments.steps) for state in states} == {age}


# Predictions


def test_whose_model_is_scored() -> None:
    assert FedProto(NET).scored_as() == "personalised"
    assert FedProto(NET, share_weights=True).scored_as() == "global"


def test_the_nearest_prototype_by_the_clients_own_model() -> None:
    method = FedProto(NET, inference="prototype")
    federation = uneven_federation()
    made = run(method, federation)
    graphs, states = federation.prepared(NET.views).graphs, made.simulation.engine.export_states()
    for graph, state in zip(graphs, states, strict=True):
        guess = method.predict(graph, made.server, state).argmax(-1)
        distance = torch.cdist(NET.embed(state.layers, graph), made.server.prototypes)
        assert guess.tolist() == distance[:, :2].argmin(-1).tolist()  # no client has class 2
        head = replace(method, inference="head").predict(graph, made.server, state)
        assert torch.equal(head, NET(state.layers, graph))


def test_before_the_server_answers_a_client_has_its_own_prototypes() -> None:
    method, federation = FedProto(NET, inference="prototype"), uneven_federation()
    simulation = Simulation(federation, method)
    everyone = simulation.clients(0)
    method.round(method.init(simulation.clients(-1)), everyone)
    message = method.local(everyone.replies["train"])
    states = simulation.engine.export_states()
    for number, graph in enumerate(federation.prepared(NET.views).graphs):
        z = NET.embed(states[number].layers, graph)
        own, count = class_means(z, graph.y, graph.train, CLASSES)
        torch.testing.assert_close(message.prototypes[number], own)
        assert message.known[number].tolist() == (count > 0).tolist()
        guess = method.predict(graph, take(message, number), states[number]).argmax(-1)
        owned = count.nonzero().flatten()
        assert torch.equal(guess, owned[torch.cdist(z, own[owned]).argmin(-1)])


def test_graphs_are_never_given_a_class_that_the_client_does_not_have() -> None:
    method = FedProto(GraphGIN(FEATURES, CLASSES, hidden=5), inference="prototype")
    federation = small_graph_federation()
    made = run(method, federation)
    assert made.server.known.tolist() == [1, 1, 1]
    for position in (0, 3):  # two classes of three
        graph = with_views(federation.graphs[position], method.net.views)
        state = made.simulation.engine.export_states()[position]
        logits = graph.at_roots(method.predict(graph, made.server, state))
        assert logits.shape == (len(graph.at_roots(graph.y)), CLASSES)
        assert (logits[:, 2] < -1e29).all()


def test_a_plug_finds_the_model_where_there_is_one() -> None:
    for inference in ("head", "prototype"):
        with pytest.raises(ConfigError, match=r"uploads? no model"):
            run(FedTAD(NET, base=FedProto(NET, inference=inference)), rounds=1)  # type: ignore[arg-type]
    made = run(FedTAD(NET, base=FedProto(NET, share_weights=True)), rounds=1)
    alone = run(FedProto(NET, share_weights=True), rounds=1).server
    # It corrects the model and does not change the prototypes.
    assert torch.equal(made.server.base.prototypes, alone.prototypes)
    assert not close(made.server.base.start, alone.start)


# The contract with its options


@dataclass(frozen=True)
class ByThePaper(FedProto):
    """The paper's loss, aggregation and inference."""

    pull: Any = "prototypes"
    aggregation: Any = "paper"
    inference: Any = "prototype"


@dataclass(frozen=True)
class WithWeights(FedProto):
    """Weights shared, a loss per class, diluted prototypes, fresh optimizers."""

    share_weights: bool = True
    pull: Any = "classes"
    compat: Any = "diluted-prototypes"
    inference: Any = "prototype"
    optimizer_state: Any = "reset"


@pytest.mark.long
@pytest.mark.parametrize("method", [ByThePaper, WithWeights])
def test_contract_with_options(method: type[FedProto]) -> None:
    check_method(method, rounds=2)


@pytest.mark.parametrize("net", [SGC(FEATURES, CLASSES), GCN(FEATURES, CLASSES, layers=1)])
def test_networks_without_an_embedding(net: Any) -> None:
    with pytest.raises(ConfigError, match="no hidden layer"):
        FedProto(net)
