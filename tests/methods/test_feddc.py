"""FedDC: the card's numbers, the naive algorithm with drifts at the clients, and what crosses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from atoll.core.aggregate import average
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.optim import SGD, Adam
from atoll.core.tree import leaves, take, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config, resolve
from atoll.experiment.rounds import Experiment
from atoll.methods import FedAvg, FedDC, FedProx
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
H, A = (1.0, 3.0, 0.5), (1.0, -1.0, 2.0)
ETA, ALPHA, STEPS = 0.1, 0.1, 2
NET, GRAPH_NET = GCN(FEATURES, CLASSES, hidden=6), GraphGIN(FEATURES, CLASSES, hidden=5)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def scalar(count: int, **settings: Any) -> tuple[FedDC, Federation]:
    method = FedDC(Quadratic((0.5,)), SGD(lr=ETA), epochs=STEPS, alpha=ALPHA, **settings)
    graphs = [owner([h], [a], 2) for h, a in zip(H[:count], A[:count], strict=True)]
    return method, Federation(tuple(graphs), classes=2)


def play(
    method: Any, federation: Federation, engine: str, present: list[list[int]]
) -> Iterator[tuple[Any, Any]]:
    """The server's tree and the replies after each round."""
    simulation = Simulation(federation, method, engine=engine)
    server = method.init(simulation.clients(-1))
    for number, positions in enumerate(present):
        clients = replace(simulation.clients(number), positions=torch.tensor(positions))
        server = method.round(server, clients)
        yield server, clients.replies["train"]


@engines
@pytest.mark.parametrize(("variant", "third"), [("paper", -0.968724), ("authors", -1.011474)])
def test_golden(engine: str, variant: Any, third: float) -> None:
    rounds = list(play(*scalar(2, variant=variant), engine, [[0, 1]] * 3))
    expected = [
        ([0.5945, -0.2605], [0.0945, -0.7605], -0.166),
        ([-0.3514, -0.214748], [-0.0909, -0.809248], -0.733148),
    ]
    for (server, reply), (theta, h, w) in zip(rounds, expected, strict=False):
        assert reply.model["w"].flatten().tolist() == pytest.approx(theta, abs=1e-6)
        assert server.drift["w"].flatten().tolist() == pytest.approx(h, abs=1e-6)
        assert float(server.model["w"]) == pytest.approx(w, abs=1e-6)
    assert float(rounds[2][0].model["w"]) == pytest.approx(third, abs=1e-6)


def by_hand(variant: str, compat: str, present: list[list[int]]) -> list[float]:
    """The paper's g_i, or the code's s_i, and h_i, each kept by its own client."""
    count, w, path = 3, 0.5, []
    h, g, s = [0.0] * count, [0.0] * count, [0.0] * count
    for chosen in present:
        mean_g, mean_s, theta = sum(g) / count, sum(s) / count, {}
        heard_g = 0.0 if compat in ("no-server-term", "openfgl") else mean_g
        for i in chosen:
            theta[i] = w
            for _ in range(STEPS):
                slope = H[i] * (theta[i] - A[i]) + ALPHA * (theta[i] + h[i] - w)
                if variant == "paper":
                    slope += (g[i] - heard_g) / (ETA * STEPS)
                else:
                    slope += mean_s - s[i]
                theta[i] -= ETA * slope
        for i in chosen:
            update = theta[i] - w
            h[i] += g[i] if compat in ("lagging-drift", "openfgl") else update
            s[i] = s[i] - mean_s - update / (STEPS * ETA)
            g[i] = update
        own = sum(theta[i] for i in chosen) / len(chosen)
        drift = sum(h) / count if variant == "authors" else sum(h[i] for i in chosen) / len(chosen)
        w = own + drift
        path.append(w)
    return path


SOME = [[0, 1, 2], [0, 2], [1], [0, 1, 2], [1, 2]]


@engines
@pytest.mark.parametrize(
    ("variant", "compat"),
    [
        ("paper", "none"),
        ("authors", "none"),
        ("paper", "no-server-term"),
        ("paper", "lagging-drift"),
        ("paper", "openfgl"),
    ],
)
def test_the_server_follows_what_clients_would_keep(engine: str, variant: Any, compat: Any) -> None:
    method, federation = scalar(3, variant=variant, compat=compat)
    path = [float(s.model["w"]) for s, _ in play(method, federation, engine, SOME)]
    assert path == pytest.approx(by_hand(variant, compat, SOME), abs=1e-12)


def test_variants_and_faults_differ() -> None:
    ends = {
        (variant, compat): by_hand(variant, compat, SOME)[-1]
        for variant, compat in [("paper", "none"), ("authors", "none"), ("paper", "no-server-term"),
                                ("paper", "lagging-drift"), ("paper", "openfgl")]
    }  # fmt: skip
    assert len({round(end, 6) for end in ends.values()}) == len(ends)


# Reductions


@engines
@pytest.mark.parametrize(
    ("net", "make"), [(NET, small_federation), (GRAPH_NET, small_graph_federation)]
)
def test_the_first_round_trains_as_fedprox_and_hands_the_drift_in(
    engine: str, net: Any, make: Any
) -> None:
    optimizer = SGD(lr=0.1)
    ours = FedDC(net, optimizer, alpha=0.3)
    prox = FedProx(net, optimizer, mu=0.3, weight_by="uniform")
    (server, reply), *_ = play(ours, make(), engine, [[0, 1, 2, 3]])
    (mean, other), *_ = play(prox, make(), engine, [[0, 1, 2, 3]])
    assert all(map(torch.equal, leaves(reply.model), leaves(other.model)))
    start = ours.init(Simulation(make(), ours).clients(-1)).model
    # θ_i + h_i = θ_i + (θ_i - w): twice as far as the mean.
    for w, x, y in zip(*map(leaves, (server.model, start, mean)), strict=True):
        torch.testing.assert_close(w, 2 * y - x, rtol=1e-12, atol=1e-12)


def test_without_pull_the_first_round_trains_as_fedavg() -> None:
    (_, reply), *_ = play(FedDC(NET, SGD(lr=0.1), alpha=0.0), small_federation(), "fused", [[1, 2]])
    (_, other), *_ = play(FedAvg(NET, SGD(lr=0.1)), small_federation(), "fused", [[1, 2]])
    assert all(map(torch.equal, leaves(reply.model), leaves(other.model)))


# Weights, participation, steps, the wire


@pytest.mark.parametrize("by", ["nodes", "train", "uniform"])
@pytest.mark.parametrize("variant", ["paper", "authors"])
def test_participants_count_by_their_size(by: Any, variant: Any) -> None:
    method, federation = FedDC(NET, variant=variant, weight_by=by), small_federation()
    (server, reply), *_ = play(method, federation, "fused", [[0, 1, 2]])
    sizes = torch.stack([graph.size(by) for graph in federation.graphs[:3]])
    drift = average(take(server.drift, torch.arange(3)), weight=sizes)
    if variant == "authors":
        drift = average(server.drift)
    expected = tree_map(torch.add, average(reply.model, weight=sizes), drift)
    tree_map(torch.testing.assert_close, server.model, expected)


def test_moments_are_kept_or_reset() -> None:
    for keeping, age in (("keep", 6.0), ("reset", 3.0)):
        method = FedDC(NET, Adam(), optimizer_state=keeping)
        made = Experiment(method, small_federation(), rounds=2).run()
        states = made.simulation.engine.export_states()
        assert {float(state.moments.steps) for state in states} == {age}


@engines
def test_an_absent_clients_drift_waits(engine: str) -> None:
    (first, _), (second, _) = play(FedDC(NET), small_federation(), engine, [[0, 1, 2, 3], [1, 3]])
    for tree in ("drift", "slope"):
        before, after = getattr(first, tree), getattr(second, tree)
        for client in range(4):
            pairs = zip(leaves(take(before, client)), leaves(take(after, client)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs) == (client in (0, 2))


def test_a_slope_is_an_update_over_its_own_number_of_steps() -> None:
    method = FedDC(GRAPH_NET, SGD(lr=0.05), epochs=2)
    (server, reply), *_ = play(method, small_graph_federation(), "fused", [[0, 1, 2, 3]])
    assert reply.steps.tolist() == [2, 4, 4, 2]  # two clients train on batches of three
    start = method.init(Simulation(small_graph_federation(), method).clients(-1)).model
    for s, y, x in zip(*map(leaves, (server.slope, reply.model, start)), strict=True):
        for client, steps in enumerate((2, 4, 4, 2)):
            torch.testing.assert_close(s[client], (x - y[client]) / (steps * 0.05))


def test_a_client_uploads_its_model_alone() -> None:
    made = Experiment(FedDC(NET), small_federation(), rounds=1).run()
    floats = sum(leaf.numel() for leaf in leaves(made.server.model))
    seen = made.ledger.by_step()["train"]
    assert seen == {"messages": 4, "down": 4 * 8 * 2 * floats, "up": 4 * 8 * (floats + 2)}


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"variant": "authors"}, {"compat": "openfgl"}])
def test_contract_of_the_choices(settings: dict[str, Any]) -> None:
    check_method(lambda net: FedDC(net, **settings), rounds=2)


# Configuration


def test_the_preset_is_openfgls() -> None:
    config = resolve(make_config(method="feddc", set={"preset": "openfgl"}))[0]
    method = build_method(config, 5, 3)
    assert method.optimizer == Adam(lr=0.01, weight_decay=5e-4)
    assert (method.alpha, method.weight_by, method.compat) == (0.1, "nodes", "openfgl")


def test_a_negative_pull_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"alpha is -0.1; give a finite number that is not negative"
    ):
        FedDC(NET, alpha=-0.1)


def test_faults_belong_to_the_papers_form() -> None:
    with pytest.raises(ConfigError, match="faults of OpenFGL, which follows variant=paper"):
        FedDC(NET, variant="authors", compat="lagging-drift")
