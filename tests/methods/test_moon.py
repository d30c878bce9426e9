"""MOON: the card's golden numbers, a naive reference, what it reduces to, and its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from atoll.core.aggregate import average
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, View, make_graph, with_views
from atoll.core.losses import cross_entropy, unit
from atoll.core.minibatch import whole_graphs
from atoll.core.optim import SGD
from atoll.core.private_layers import Private
from atoll.core.random import make_key
from atoll.core.tree import Tree, leaves, stack, tree_map
from atoll.engines.base import ENGINES
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import MOON, FedAvg
from atoll.methods.moon import CONTRAST, Kept, Projected, contrast
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
NODE_NET, GRAPH_NET = GCN(FEATURES, CLASSES, hidden=6), GraphGIN(FEATURES, CLASSES, hidden=5)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


# The card's numbers

Z, ZG, ZP = [[1.0, 0, 1], [2, 1, 0]], [[1.0, 1, 0], [1, 0, 0]], [[0.0, 1, 1], [0, 1, 0]]


@dataclass(frozen=True)
class Table:
    """A network whose parameters are the embeddings themselves, without classes."""

    views: ClassVar[Mapping[str, View]] = {}

    def init(self, key: Tensor) -> Tree:
        return {"z": torch.zeros(2, 3)}

    def embed(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        return params["z"][graph.ids.long()]

    def logits(
        self, params: Tree, embedding: Tensor, graph: Graph, key: Tensor | None = None
    ) -> Tensor:
        return embedding[:, :2] * 0

    def __call__(self, params: Tree, graph: Graph, key: Tensor | None = None) -> Tensor:
        return self.logits(params, self.embed(params, graph, key), graph, key)


def table_graph(train: list[float]) -> Graph:
    none, y = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    return make_graph(torch.ones(2, 1), none, y, train=torch.tensor(train))


def term(method: MOON, train: list[float], z: Any = Z, g: Any = ZG, p: Any = ZP) -> float:
    """The contrastive part of the method's loss. The cross entropy of a table is log 2."""
    given = [{"z": torch.tensor(rows)} for rows in (z, g, p)]
    graph = method.with_contrast(table_graph(train), given[1], Kept(given[2], Private({}, None)))
    return float(method.loss(given[0], graph, None) - torch.tensor(2.0).log())


@pytest.mark.parametrize(
    ("train", "mu", "expected"),
    [
        ([1.0, 0.0], 1.0, 0.693147),
        ([0.0, 1.0], 1.0, 0.342768),
        ([1.0, 1.0], 1.0, 0.517958),
        ([1.0, 1.0], 5.0, 2.589788),
    ],
)
def test_golden(train: list[float], mu: float, expected: float) -> None:
    assert term(MOON(Table(), mu=mu, tau=0.5), train) == pytest.approx(expected, abs=1e-6)


def test_all_nodes_and_not_those_of_the_padding() -> None:
    method = MOON(Table(), nodes="all")
    assert term(method, [1.0, 0.0]) == pytest.approx(0.517958, abs=1e-6)
    apart = unit(torch.tensor(ZP)) - unit(torch.tensor(ZG))
    padded = contrast(torch.tensor(Z), apart, torch.tensor([0.0, 1.0]), 0.5)
    assert float(padded) == pytest.approx(0.342768, abs=1e-6)


def test_after_the_activation() -> None:
    signed = [[[1.0, -2, 1], [2, 1, -1]], [[1.0, 1, -3], [1, -1, 0]], [[-1.0, 1, 1], [-2, 1, 0]]]
    after = MOON(Table(), embedding="post-relu")
    assert term(after, [1.0, 1.0], *signed) == pytest.approx(0.517958, abs=1e-6)
    assert term(MOON(Table()), [1.0, 1.0], *signed) != pytest.approx(0.517958, abs=1e-2)


def test_a_row_of_zeros_has_a_finite_gradient() -> None:
    z = torch.zeros(2, 3, requires_grad=True)
    contrast(z, torch.tensor(Z), torch.ones(2), 0.5).backward()
    assert z.grad is not None
    assert 0 < float(z.grad.abs().max()) < 10


# Against a naive reference


def run(
    method: Any, federation: Federation | None = None, engine: str = "fused", **more: Any
) -> Run:
    federation = small_federation() if federation is None else federation
    return Experiment(method, federation, engine=engine, **{"rounds": 3, **more}).run()


def close(a: Tree, b: Tree) -> bool:
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(torch.allclose(one, other, rtol=1e-9, atol=1e-11) for one, other in pairs)


def naive_training(method: MOON, graph: Graph, server: Tree, previous: Tree) -> Tree:
    """Plain steps on the paper's loss, with three forwards in each."""

    def loss(params: Tree) -> Tensor:
        error = cross_entropy(method.net(params, graph), graph)
        if previous is None:
            return error
        z, g, p = (method.net.embed(one, graph) for one in (params, server, previous))
        alike = [torch.cosine_similarity(z, other) / method.tau for other in (g, p)]
        each = -torch.log_softmax(torch.stack(alike, dim=1), dim=1)[:, 0]
        return error + method.mu * each[graph.train > 0].mean()

    model = server
    for _ in range(method.epochs):
        slope = torch.func.grad(loss)(model)
        model = tree_map(lambda w, g: w - method.optimizer.lr * g, model, slope)
    return model


def naive(method: MOON, federation: Federation, made: Run, rounds: int) -> tuple[Tree, list[Tree]]:
    """The server and the previous model of every client after some rounds."""
    graphs = federation.prepared(method.net.views).graphs
    server = method.init(made.simulation.clients(-1))
    previous: list[Tree] = [None] * len(graphs)
    for number in range(rounds):
        everyone = made.simulation.clients(number)
        chosen = everyone.sample(made.experiment.fraction).positions.tolist()
        for client in chosen:
            previous[client] = naive_training(method, graphs[client], server, previous[client])
        sizes = torch.tensor([float(graphs[client].num_nodes) for client in chosen])
        server = average(stack([previous[client] for client in chosen]), weight=sizes)
    return server, previous


@engines
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_it_is_the_papers_loop(engine: str, fraction: float) -> None:
    federation = small_federation()
    method = MOON(replace(NODE_NET, dropout=0.0), SGD(lr=0.3), mu=2.0, tau=0.2)
    made = run(method, federation, engine, rounds=4, fraction=fraction)
    server, previous = naive(method, federation, made, 4)
    assert close(made.server, server)
    # A client keeps its model after its own last participation, however long ago.
    for state, model in zip(made.simulation.engine.export_states(), previous, strict=True):
        assert (state is None) == (model is None)
        assert state is None or close(state.previous, model)
    plain = run(replace(method, mu=0.0), federation, engine, rounds=4, fraction=fraction)
    assert not close(plain.server, server)


# Reductions


@engines
@pytest.mark.parametrize(
    ("net", "make"), [(NODE_NET, small_federation), (GRAPH_NET, small_graph_federation)]
)
def test_without_contrast_it_is_fedavg(engine: str, net: Any, make: Any) -> None:
    ours = run(MOON(net, mu=0.0), make(), engine, fraction=0.75)
    average_ = run(FedAvg(net), make(), engine, fraction=0.75)
    assert all(map(torch.equal, leaves(ours.server), leaves(average_.server)))
    assert ours.ledger.by_step()["train"] == average_.ledger.by_step()["train"]
    other = run(MOON(net, mu=1.0), make(), engine, fraction=0.75)
    assert not close(other.server, average_.server)


@pytest.mark.parametrize("keeping", ["keep", "reset"])
def test_a_first_visit_is_fedavgs(keeping: Any) -> None:
    for rounds, alike in ((1, True), (2, False)):
        ours = run(MOON(NODE_NET, mu=5.0, optimizer_state=keeping), rounds=rounds)
        plain = run(FedAvg(NODE_NET, optimizer_state=keeping), rounds=rounds)
        assert close(ours.server, plain.server) is alike
    (age,) = {float(s.own.moments.steps) for s in ours.simulation.engine.export_states()}
    assert age == (6.0 if keeping == "keep" else 3.0)


# Graphs and mini-batches


def test_a_mini_batch_is_contrasted_with_its_own_graphs() -> None:
    method = MOON(replace(GRAPH_NET, dropout=0.0))
    graph = with_views(small_graph_federation().graphs[1], method.net.views)
    now, received, before = (GRAPH_NET.init(make_key(seed)) for seed in range(3))
    layers = {name: received[name] for name in GRAPH_NET.private}
    state = Kept({"convolutions": before["convolutions"]}, Private(layers, None))
    common = {"convolutions": received["convolutions"]}
    roots = graph.train.nonzero().squeeze(1)[[2, 0]]
    cut_after = whole_graphs(method.with_contrast(graph, common, state), roots)
    cut_before = method.with_contrast(whole_graphs(graph, roots), common, state)
    assert cut_after.at_roots(cut_after.views[CONTRAST]).shape == (2, 5)  # type: ignore[arg-type]
    assert float(method.loss(now, cut_after, None)) == pytest.approx(
        float(method.loss(now, cut_before, None)), abs=1e-12
    )


# The head


@dataclass(frozen=True)
class Headed(MOON):
    """With a projection head, the activation, and all nodes."""

    head: int = 4
    embedding: Any = "post-relu"
    nodes: Any = "all"


@pytest.mark.long
def test_contract_with_a_head() -> None:
    check_method(Headed, rounds=2)


@pytest.mark.parametrize("net", [NODE_NET, GRAPH_NET])
def test_the_head_stands_before_the_last_layer_and_is_shared(net: Any) -> None:
    headed, h = Projected(net, 4), net.hidden
    params = headed.init(make_key(0))

    def count(tree: Tree) -> int:
        return sum(leaf.numel() for leaf in leaves(tree))

    assert count(params) == count(net.init(make_key(0))) + 2 * h * 4 + 4 + h
    graph = (small_federation() if net is NODE_NET else small_graph_federation()).graphs[0]
    graph = with_views(graph, net.views)
    assert headed.embed(params, graph).shape == net.embed(net.init(make_key(0)), graph).shape
    before = headed(params, graph)
    params["head"] = tree_map(lambda leaf: leaf * 2, params["head"])
    assert not torch.allclose(before, headed(params, graph))
    make = small_federation if net is NODE_NET else small_graph_federation
    assert "head" in run(MOON(net, head=4), make(), rounds=1).server


# What it refuses


@pytest.mark.parametrize(
    ("wrong", "words"), [({"tau": 0.0}, "tau is 0.0"), ({"head": -1}, "head is -1")]
)
def test_impossible_numbers(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MOON(NODE_NET, **wrong)


@pytest.mark.parametrize("net", [SGC(FEATURES, CLASSES), GCN(FEATURES, CLASSES, layers=1)])
def test_networks_without_an_embedding(net: Any) -> None:
    with pytest.raises(ConfigError, match="no hidden layer"):
        MOON(net)
