"""FED-PUB: the card's golden numbers on every engine, masks, regularisers and the random graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.aggregate import average, cosines
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import make_graph
from atoll.core.losses import cross_entropy
from atoll.core.masks import Private, first_masks, masked
from atoll.core.method import Net, client_step
from atoll.core.optim import SGD
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree, leaves, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config, resolve
from atoll.experiment.rounds import Experiment
from atoll.methods import FedPUB
from atoll.methods.fedpub import Update, mean_embedding, proxy_graph
from atoll.nn import GAT, GCN, GIN, MLP, SGC, GraphSAGE
from atoll.testing import CLASSES, FEATURES, Case, check_engines, double_precision, small_federation

engines = pytest.mark.parametrize("engine", ENGINES)
NET = GCN(FEATURES, CLASSES, hidden=6)
QUIET = GCN(FEATURES, CLASSES, hidden=6, dropout=0.0)
OWN = GCN(FEATURES, CLASSES, hidden=6, layers=3, head="linear")


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


# The card's numbers

Q = [[1, 0, 1], [1, 0.2, 0.8], [-1, 1, 0]]
MODELS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
FIRST, LAST = [0.510599, 0.483729, 0.005672], [0.010843, 0.013121, 0.976036]


@dataclass(frozen=True)
class TwoWeights:
    """Two parameters that belong to no client's model."""

    features: int = 5
    classes: int = 2

    @property
    def views(self) -> dict[str, Any]:
        return {}

    def init(self, key: Tensor) -> Tree:
        return {"w": torch.tensor([7.0, 7.0])}

    def __call__(self, params: Tree, graph: Any, key: Tensor | None = None) -> Tensor:
        return graph.x[:, :2] * params["w"]

    def embed(self, params: Tree, graph: Any, key: Tensor | None = None) -> Tensor:
        return graph.x

    def logits(self, params: Tree, embedding: Tensor, graph: Any, key: Any = None) -> Tensor:
        return embedding[:, :2] * params["w"]


@dataclass(frozen=True)
class Planted(FedPUB):
    """Clients reply with values from their features: q and the model."""

    @client_step
    def train(self, graph, received, state, key):
        return Update({"w": graph.x[0, 3:]}, graph.x[0, :3]), Private([], None)


def planted() -> Federation:
    none, y = torch.zeros(2, 0, dtype=torch.long), torch.zeros(1).long()
    rows = [torch.tensor([[*q, *w]]) for q, w in zip(Q, MODELS, strict=True)]
    return Federation(tuple(make_graph(x, none, y, train=torch.ones(1)) for x in rows), classes=2)


def close(found: Tensor, expected: list[Any]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-6)


@engines
def test_server(engine: str) -> None:
    method = Planted(TwoWeights(), tau=3.0)
    simulation = Simulation(planted(), method, engine=engine)
    server = method.round(method.init(simulation.clients(-1)), simulation.clients(0))
    close(server.similarity[0], [1.0, 0.981981, -0.5])
    close(server.models["w"][0], [1.990147, 2.990147])
    close(server.models["w"][2], [4.930387, 5.930387])


@pytest.mark.parametrize(
    ("tau", "row", "expected"),
    [(3.0, 0, FIRST), (3.0, 2, LAST), (10.0, 0, [0.544927, 0.455073, 0.0])],
)
def test_who_listens_to_whom(tau: float, row: int, expected: list[float]) -> None:
    # Models that are unit vectors come out as the weights themselves.
    method = Planted(TwoWeights(), tau=tau)
    one_hot = Federation(
        tuple(
            replace(graph, x=torch.cat([graph.x[:, :3], torch.eye(3)[i : i + 1]], dim=1))
            for i, graph in enumerate(planted().graphs)
        ),
        classes=2,
    )
    simulation = Simulation(one_hot, method)
    start = method.init(simulation.clients(-1))
    start = replace(start, models={"w": torch.zeros(3, 3)})
    close(method.round(start, simulation.clients(0)).models["w"][row], expected)


def penalty(method: FedPUB, params: Tree, anchor: Tree) -> Tensor:
    """λ1 ‖μ‖_1 + λ2 ‖θ - θ̄‖², or the norms themselves, to be differentiated by autograd."""
    away = [a - b for a, b in zip(leaves(params["model"]), leaves(anchor), strict=True)]
    far = [d.square().sum() if method.proximal == "squared" else d.norm() for d in away]
    sparse = torch.stack([mask.abs().sum() for mask in params["masks"]]).sum()
    return method.lam_mask * sparse + method.lam_prox * torch.stack(far).sum()


@pytest.mark.parametrize("proximal", ["squared", "norm"])
def test_regularisers_are_the_gradients_of_what_they_say(proximal: Any) -> None:
    method = FedPUB(NET, proximal=proximal)
    params = {
        "model": {"w": torch.tensor([[1.0, -2, 3]]), "b": torch.tensor([0.5])},
        "masks": [torch.tensor([[1.0, 5e-4, -0.5]])],
    }
    anchor = {"w": torch.tensor([[0.5, 1.0, 3.0]]), "b": torch.tensor([0.0])}
    assert float(penalty(method, params, params["model"])) == pytest.approx(0.0015005)
    slope = torch.func.grad(lambda p: penalty(method, p, anchor))(params)
    found = method.regularised(anchor, tree_map(torch.zeros_like, params), params)
    for ours, one in zip(leaves(found), leaves(slope), strict=True):
        torch.testing.assert_close(ours, one)
    # At the anchor, where the norm has no gradient, nothing pulls.
    still = method.regularised(params["model"], tree_map(torch.zeros_like, params), params)
    assert not still["model"]["w"].any()


def test_sizes_on_cora() -> None:
    own = GCN(1433, 7, hidden=128, layers=3, head="linear").init(make_key(0))
    assert sum(leaf.numel() for leaf in leaves(own)) == 200_967
    assert sum(leaf.numel() for leaf in first_masks(own)) == 200_704


# Training


@engines
@pytest.mark.parametrize("regularizers", ["on", "off"])
def test_training_equals_stock_torch(engine: str, regularizers: Any) -> None:
    method = FedPUB(
        QUIET, SGD(lr=0.5), epochs=4, regularizers=regularizers, lam_mask=0.02, lam_prox=0.3
    )
    simulation = Simulation(small_federation(), method, engine=engine)
    start = method.init(simulation.clients(-1))
    everyone = simulation.clients(0)
    method.round(start, everyone)
    states = simulation.engine.export_states()
    for number, graph in enumerate(small_federation().prepared(QUIET.views).graphs):
        anchor = QUIET.init(simulation.clients(-1).key)
        params = {"model": anchor, "masks": first_masks(anchor)}
        params = tree_map(lambda leaf: leaf.clone().requires_grad_(), params)
        stock = torch.optim.SGD(leaves(params), lr=0.5)
        for _ in range(4):
            stock.zero_grad()
            error = cross_entropy(QUIET(masked(params["model"], params["masks"]), graph), graph)
            more = penalty(method, params, anchor) if regularizers == "on" else 0.0
            (error + more).backward()
            stock.step()
        mine = tree_map(lambda leaf, i=number: leaf[i], everyone.replies["train"].model)
        for ours, one in zip(leaves(mine), leaves(params["model"]), strict=True):
            torch.testing.assert_close(ours, one.detach(), rtol=1e-9, atol=1e-9)
        for ours, one in zip(states[number].masks, params["masks"], strict=True):
            torch.testing.assert_close(ours, one.detach(), rtol=1e-9, atol=1e-9)


def test_masks_stay_at_home_and_the_random_graph_is_not_sent() -> None:
    made = Experiment(FedPUB(OWN), small_federation(), rounds=2).run()
    size = sum(leaf.numel() for leaf in leaves(OWN.init(make_key(0))))
    table = made.ledger.by_step()["train"]
    assert table == {"messages": 8, "down": 8 * 8 * size, "up": 8 * 8 * (size + OWN.hidden)}


def test_small_masks_are_zero_in_predictions_only() -> None:
    method = FedPUB(QUIET, lam_mask=0.5)
    (graph,) = small_federation((13,)).prepared(QUIET.views).graphs
    model = QUIET.init(make_key(1))
    tiny = Private([0.4 * mask for mask in first_masks(model)], None)
    biases = tree_map(lambda leaf: leaf if leaf.dim() == 1 else leaf * 0, model)
    assert torch.equal(method.predict(graph, model, tiny), QUIET(biases, graph))
    assert torch.equal(method.predict(graph, model, None), QUIET(model, graph))
    assert not torch.allclose(QUIET(masked(model, tiny.masks), graph), QUIET(biases, graph))


# The random graph


def test_random_graph() -> None:
    proxy = proxy_graph(NET, 0, torch.float64, torch.device("cpu"))
    source, target = proxy.edges
    assert proxy.num_nodes == 500
    assert proxy.x.shape == (500, FEATURES)
    assert torch.equal(source // 100, target // 100)
    assert not bool((source == target).any())
    place = set(zip(source.tolist(), target.tolist(), strict=True))
    assert len(place) == len(source)
    assert place == {(b, a) for a, b in place}
    # 5 * 4950 pairs with probability 0.1: 2475 edges, standard deviation 47.
    assert abs(len(source) / 2 - 2475) < 5 * 47
    assert abs(float(proxy.x.mean())) < 5 / (500 * FEATURES) ** 0.5
    assert float(proxy.x.std()) == pytest.approx(1, abs=0.05)
    other = proxy_graph(NET, 1, torch.float64, torch.device("cpu"))
    assert not torch.equal(other.x, proxy.x)
    assert other.edges.shape != proxy.edges.shape or not torch.equal(other.edges, proxy.edges)


@pytest.mark.parametrize(
    "net", [NET, OWN, GCN(FEATURES, CLASSES, hidden=6, layers=4), GraphSAGE(FEATURES, CLASSES)]
)
def test_mean_embedding_is_the_mean_of_the_embeddings(net: Net) -> None:
    proxy = proxy_graph(net, 3, torch.float64, torch.device("cpu"))
    params = net.init(fold(make_key(2), "test"))
    params = tree_map(lambda leaf: leaf + 0.1, params)  # biases start at zero
    plain = net.embed(params, proxy).mean(0)  # type: ignore[attr-defined]
    torch.testing.assert_close(mean_embedding(net, params, proxy), plain, rtol=1e-12, atol=1e-13)


@engines
def test_uploaded_embeddings_are_those_of_the_masked_model(engine: str) -> None:
    method = FedPUB(OWN, lam_mask=0.9, epochs=3, proxy_seed=4)
    simulation = Simulation(small_federation(), method, engine=engine)
    everyone = simulation.clients(0)
    method.round(method.init(simulation.clients(-1)), everyone)
    reply = everyone.replies["train"]
    proxy = proxy_graph(OWN, 4, torch.float64, torch.device("cpu"))
    for number, state in enumerate(simulation.engine.export_states()):
        model = tree_map(lambda leaf, i=number: leaf[i], reply.model)
        assert any(bool((mask < 0.98).any()) for mask in state.masks)
        plain = OWN.embed(masked(model, state.masks, 0.9), proxy).mean(0)
        torch.testing.assert_close(reply.embedding[number], plain, rtol=1e-9, atol=1e-9)


def test_a_random_graph_made_inside_a_program_of_many_clients_serves_everybody() -> None:
    proxy_graph.cache_clear()
    runs = [
        Experiment(FedPUB(OWN), small_federation(), rounds=2, engine=engine).run().server.models
        for engine in ("fused", "serial")
    ]
    for one, other in zip(*map(leaves, runs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


# Who gets what


def test_without_temperature_everybody_gets_the_mean() -> None:
    method = FedPUB(NET, tau=0.0)
    simulation = Simulation(small_federation(), method)
    everyone = simulation.clients(0)
    server = method.round(method.init(simulation.clients(-1)), everyone)
    mean = average(everyone.replies["train"].model)
    tree_map(lambda a, b: torch.testing.assert_close(a, b.expand_as(a)), server.models, mean)


def test_the_absent_wait_and_newcomers_get_the_mean() -> None:
    method = Planted(TwoWeights(), tau=3.0)
    simulation = Simulation(planted(), method)
    server = method.init(simulation.clients(-1))
    some = replace(simulation.clients(0), positions=torch.tensor([0, 1]))
    server = method.round(server, some)
    assert server.seen.tolist() == [True, True, False]
    assert server.models["w"][2].tolist() == [2.0, 3.0]
    kept = server.models["w"][0].clone()
    server = method.round(server, replace(some, positions=torch.tensor([2])))
    assert server.seen.tolist() == [True, True, True]
    assert torch.equal(server.models["w"][0], kept)
    assert server.models["w"][2].tolist() == [5.0, 6.0]
    close(server.similarity[0, :2], [1.0, 0.981981])
    assert server.similarity[0, 2].isnan(), "these two have not met"


def test_embeddings_of_zero_are_like_themselves_alone() -> None:
    found = cosines(torch.tensor([[0.0, 0.0], [3.0, 4.0], [4.0, 3.0]]))
    assert torch.allclose(found, torch.tensor([[1, 0, 0], [0, 1, 0.96], [0, 0.96, 1]]))


# Networks and settings


@pytest.mark.parametrize(
    "net", [OWN, *(n(FEATURES, CLASSES, 8) for n in (GraphSAGE, GAT, MLP, GIN))]
)
def test_other_networks(net: Net) -> None:
    check_engines(Case(FedPUB(net), small_federation(), rounds=2, fraction=0.5))


@pytest.mark.parametrize(("preset", "switch"), [("paper", "on"), ("reference", "off")])
def test_presets(preset: str, switch: str) -> None:
    config, _ = resolve(make_config(method="fedpub", set={"preset": preset}))
    method = build_method(config, 1433, 7)
    assert method.net == GCN(1433, 7, hidden=128, layers=3, head="linear")
    assert (method.tau, method.regularizers) == (3.0, switch)  # type: ignore[attr-defined]


@pytest.mark.parametrize("net", [SGC(FEATURES, CLASSES), GCN(FEATURES, CLASSES, layers=1)])
def test_networks_without_hidden_layer_are_refused(net: Net) -> None:
    with pytest.raises(ConfigError, match="no hidden layer"):
        FedPUB(net)


@pytest.mark.parametrize("name", ["lam_mask", "lam_prox"])
def test_negative_penalties_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1"):
        FedPUB(NET, **{name: -1.0})  # type: ignore[arg-type]
