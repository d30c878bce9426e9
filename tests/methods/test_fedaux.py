"""FedAux: the card's golden numbers, both forms of the kernel, a reduction, and its options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from atoll.core.method import Clients, Net, client_step
from atoll.core.optim import SGD
from atoll.core.random import make_key
from atoll.core.training import Mixtures, first_mixtures
from atoll.core.tree import Tree, leaves, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config, resolve
from atoll.experiment.rounds import Experiment
from atoll.methods import FedAux
from atoll.methods.fedaux import Update, scores, smoothed
from atoll.nn import GAT, GCN, GIN, MLP, SGC, ChebNet, GraphSAGE
from atoll.testing import (
    CLASSES,
    FEATURES,
    Case,
    check_engines,
    check_method,
    double_precision,
    small_federation,
)

engines = pytest.mark.parametrize("engine", ENGINES)
NET = GCN(FEATURES, CLASSES, hidden=6)
OWN = GCN(FEATURES, CLASSES, hidden=6, layers=3, head="linear", dropout=0.0)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def close(found: Tensor, expected: list[Any], atol: float = 2e-6) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=atol)


# The card's numbers

H, A = [[1.0, 0], [0.6, 0.8], [-0.5, 1]], [0.3, 0.4]
COSINE, MAXNORM = [0.6, 1.0, 0.447214], [0.268328, 0.447214, 0.223607]
Z = {
    ("cosine", 1.0): [[0.361540, 0.586285], [0.418640, 0.593586], [0.338642, 0.585696]],
    ("cosine", 10.0): [[0.366610, 0.599862], [0.367211, 0.599913], [0.366380, 0.599843]],
    ("maxnorm", 1.0): [[0.364773, 0.597607], [0.374312, 0.599790], [0.362379, 0.597099]],
}


@pytest.mark.parametrize(("kind", "expected"), [("cosine", COSINE), ("maxnorm", MAXNORM)])
def test_golden_scores(kind: str, expected: list[float]) -> None:
    found = scores(torch.tensor(H), torch.tensor(A), torch.ones(3), kind)
    close(found, expected)
    wider, real = torch.tensor([*H, [90.0, 0]]), torch.tensor([1.0, 1, 1, 0])
    padded = scores(wider, torch.tensor(A), real, kind)
    close(padded[:3], expected)


@pytest.mark.parametrize("series", [True, False])
@pytest.mark.parametrize(("kind", "sigma"), Z)
def test_golden_smoothing(kind: str, sigma: float, series: bool) -> None:
    score = torch.tensor(COSINE if kind == "cosine" else MAXNORM)
    found = smoothed(torch.tensor(H), score, torch.ones(3), sigma, series)
    close(found, Z[kind, sigma])
    # Padding does not count, however near it is.
    wider, further = torch.tensor([*H, [9.0, 9]]), torch.cat([score, score[:1]])
    found = smoothed(wider, further, torch.tensor([1.0, 1, 1, 0]), sigma, series)
    close(found[:3], Z[kind, sigma])


APV = [[1.0, 0.2, 0], [0.9, 0.3, 0.1], [-0.2, 1, 0.5]]
MODELS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_golden_mixing() -> None:
    alike = cosines(torch.tensor(APV))
    close(alike[[0, 0, 1], [1, 2, 2]], [0.986811, 0.0, 0.156904])
    close(torch.softmax(alike, -1)[0], [0.424669, 0.419104, 0.156227])
    weight = torch.softmax(10 * alike, -1)
    close(weight[[0, 2]], [[0.532913, 0.467063, 0.000024], [0.000045, 0.000218, 0.999737]])


@dataclass(frozen=True)
class Planted(FedAux):
    """Clients reply with values from their features: the vector and the model."""

    def init(self, clients: Clients) -> Mixtures:
        return first_mixtures({"apv": torch.zeros(3), "w": torch.zeros(2)}, clients)

    @client_step
    def train(self, graph, received, state, key):
        return Update({"apv": graph.x[0, :3], "w": graph.x[0, 3:]}), Private([], None)


@engines
def test_golden_server(engine: str) -> None:
    none, y = torch.zeros(2, 0, dtype=torch.long), torch.zeros(1).long()
    rows = [torch.tensor([[*a, *w]]) for a, w in zip(APV, MODELS, strict=True)]
    graphs = tuple(make_graph(x, none, y, train=torch.ones(1)) for x in rows)
    method = Planted(GCN(5, 2, hidden=3))
    simulation = Simulation(Federation(graphs, classes=2), method, engine=engine)
    server = method.round(method.init(simulation.clients(-1)), simulation.clients(0))
    expected = [[1.934223, 2.934223], [2.066192, 3.066192], [4.999383, 5.999383]]
    close(server.models["w"], expected)
    close(server.models["apv"][0], [0.953265, 0.246726, 0.046718])
    close(method.diagnostics(server)["similarity"][0], [1.0, 0.986811, 0.0])
    close(method.diagnostics(server)["mixing"][0], [0.532913, 0.467063, 0.000024])


def test_sizes_on_cora() -> None:
    method = FedAux(GCN(1433, 7, hidden=256, layers=3, head="linear"))
    model = method.first_model(make_key(0))
    assert sum(leaf.numel() for leaf in leaves(model)) == 436_743
    assert sum(mask.numel() for mask in first_masks(model)) == 435_968


# The kernel


@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0])
def test_the_series_is_the_kernel(sigma: float) -> None:
    score = torch.linspace(-1, 1, 41).requires_grad_()
    h = torch.randn(41, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = [smoothed(h, score, torch.ones(41), sigma, series) for series in (True, False)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-14)
    slopes = [torch.autograd.grad(z[:, 0].square().sum(), score)[0] for z in found]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-13)


def test_blocks_of_rows_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.Generator().manual_seed(0)
    h, score = (torch.randn(*shape, generator=noise) for shape in ((25, 4), (25,)))
    whole, slopes = [], []
    for rows in (7, 100):
        monkeypatch.setattr("atoll.methods.fedaux.BLOCK", rows)
        inputs = h.clone().requires_grad_(), score.clone().requires_grad_()
        z = smoothed(*inputs, torch.ones(25), 0.3, False)
        whole.append(z)
        slopes.append(torch.autograd.grad(z.square().sum(), inputs))
    torch.testing.assert_close(*whole)
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("kind", ["cosine", "maxnorm"])
def test_rows_and_vectors_of_zeros_have_a_finite_gradient(kind: str) -> None:
    for h, apv in ((torch.zeros(3, 2), torch.tensor(A)), (torch.tensor(H), torch.zeros(2))):
        inputs = h.requires_grad_(), apv.requires_grad_()
        found = scores(*inputs, torch.ones(3), kind)
        assert all(slope.isfinite().all() for slope in torch.autograd.grad(found.sum(), inputs))


# Training


def naive_logits(method: FedAux, model: Tree, graph: Any) -> Tensor:
    """The public code's network: two convolutions, one linear layer on [h ‖ z]."""
    h = torch.relu(OWN.embed(model["net"], graph))
    if method.score == "cosine":
        s = torch.cosine_similarity(h, model["apv"].unsqueeze(0), dim=-1)
    else:
        s = h @ model["apv"] / h.norm(dim=-1).max()
    kernel = torch.exp(-((s.unsqueeze(0) - s.unsqueeze(1)) ** 2) / method.sigma**2)
    z = kernel @ h / kernel.sum(1, keepdim=True)
    weight = torch.cat([model["net"][-1]["weight"], model["smooth"]])
    return torch.cat([h, z], dim=1) @ weight + model["net"][-1]["bias"]


@engines
@pytest.mark.parametrize("score", ["cosine", "maxnorm"])
def test_training_equals_stock_torch(engine: str, score: Any) -> None:
    method = FedAux(OWN, SGD(lr=0.5), epochs=4, score=score)
    simulation = Simulation(small_federation(), method, engine=engine)
    everyone = simulation.clients(0)
    start = method.init(simulation.clients(-1))
    method.round(start, everyone)
    states = simulation.engine.export_states()
    for number, graph in enumerate(small_federation().prepared(OWN.views).graphs):
        received = tree_map(lambda leaf, i=number: leaf[i], start.models)
        params = {"model": received, "masks": first_masks(received)}
        params = tree_map(lambda leaf: leaf.clone().requires_grad_(), params)
        stock = torch.optim.SGD(leaves(params), lr=0.5)
        for _ in range(4):
            stock.zero_grad()
            model = masked(params["model"], params["masks"])
            cross_entropy(naive_logits(method, model, graph), graph).backward()
            stock.step()
        mine = tree_map(lambda leaf, i=number: leaf[i], everyone.replies["train"].model)
        pairs = zip(leaves(mine), leaves(params["model"]), strict=True)
        kept = zip(states[number].masks, params["masks"], strict=True)
        for ours, one in (*pairs, *kept):
            torch.testing.assert_close(ours, one.detach(), rtol=1e-9, atol=1e-9)
        found = method.predict(graph, mine, states[number])
        expected = naive_logits(method, masked(params["model"], params["masks"]), graph)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)


def test_only_model_and_vector_cross() -> None:
    made = Experiment(FedAux(OWN), small_federation(), rounds=2).run()
    size = sum(leaf.numel() for leaf in leaves(FedAux(OWN).first_model(make_key(0))))
    table = made.ledger.by_step()["train"]
    assert table == {"messages": 8, "down": 8 * 8 * size, "up": 8 * 8 * size}


def test_without_sharpness_everybody_gets_the_mean() -> None:
    method = FedAux(NET, alpha=0.0)
    simulation = Simulation(small_federation(), method)
    everyone = simulation.clients(0)
    server = method.round(method.init(simulation.clients(-1)), everyone)
    mean = average(everyone.replies["train"].model)
    tree_map(lambda a, b: torch.testing.assert_close(a, b.expand_as(a)), server.models, mean)


def test_masks_can_be_left_out() -> None:
    made = Experiment(FedAux(NET, masks=False), small_federation(), rounds=2).run()
    assert all(state.masks == [] for state in made.simulation.engine.export_states())


# Networks and settings


@pytest.mark.parametrize(
    "net", [OWN, *(n(FEATURES, CLASSES, 8) for n in (GraphSAGE, GAT, MLP, ChebNet))]
)
def test_other_networks(net: Net) -> None:
    check_engines(Case(FedAux(net), small_federation(), rounds=2, fraction=0.5))


@dataclass(frozen=True)
class ByTheCode(FedAux):
    """The computation of the public code."""

    score: Any = "cosine"
    sigma: float = 10.0
    apv: Any = "uniform"


@pytest.mark.long
def test_contract_with_options() -> None:
    check_method(ByTheCode, rounds=2)


def test_the_first_vector_is_normal_or_uniform() -> None:
    normal, uniform = (
        FedAux(GCN(3, 2, hidden=4000), apv=kind).first_model(make_key(0))["apv"]
        for kind in ("normal", "uniform")
    )
    assert float(normal.std()) == pytest.approx(1, abs=0.05)
    assert float(normal.mean()) == pytest.approx(0, abs=0.05)
    assert (uniform > 0).all()
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("paper", ("maxnorm", 1.0, "normal")), ("reference", ("cosine", 10.0, "uniform"))],
)
def test_presets(preset: str, expected: tuple[object, ...]) -> None:
    config, _ = resolve(make_config(method="fedaux", set={"preset": preset}))
    method: Any = build_method(config, 1433, 7)
    assert (method.score, method.sigma, method.apv) == expected
    assert (method.net.layers, method.net.head, method.alpha) == (3, "linear", 10.0)


@pytest.mark.parametrize("net", [SGC(FEATURES, CLASSES), GIN(FEATURES, CLASSES)])
def test_networks_of_another_kind_are_refused(net: Net) -> None:
    with pytest.raises(ConfigError, match="use --set net=gcn"):
        FedAux(net)


def test_a_network_without_hidden_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="no hidden layer"):
        FedAux(GCN(FEATURES, CLASSES, layers=1))
