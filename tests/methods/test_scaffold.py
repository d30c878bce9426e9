"""SCAFFOLD: the card's numbers, reductions, and consistent control variates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from atoll.core.batching import Graphs
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.fit import fit, num_steps
from atoll.core.graph import Graph
from atoll.core.losses import cross_entropy
from atoll.core.optim import SGD, Adam
from atoll.core.private_layers import join_parts
from atoll.core.random import make_key
from atoll.core.tree import Tree, leaves, stack, tree_map
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.engines.prepare import prepared
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config, resolve
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import FedAvg, Scaffold
from atoll.nn import GCN, GraphGIN
from atoll.present.catalogue import method_page
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
NODE_NET, GRAPH_NET = GCN(FEATURES, CLASSES, hidden=6), GraphGIN(FEATURES, CLASSES, hidden=5)
H, A = (1.0, 3.0), (1.0, -1.0)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def scalar_clients() -> Federation:
    return Federation(tuple(owner([h], [a], 2) for h, a in zip(H, A, strict=True)), classes=2)


def play(method: Any, engine: str, present: list[list[int]]) -> Iterator[tuple[float, ...]]:
    """x, c and all c_i after each round."""
    simulation = Simulation(scalar_clients(), method, engine=engine)
    server = method.init(simulation.clients(-1))
    for number, positions in enumerate(present):
        clients = replace(simulation.clients(number), positions=torch.tensor(positions))
        server = method.round(server, clients)
        controls = [float(s.control["w"]) for s in simulation.engine.export_states()]
        yield float(server.model["w"]), float(server.control["w"]), *controls


def run(method: Any, federation: Federation, engine: str = "fused", **more: Any) -> Run:
    return Experiment(method, federation, engine=engine, **{"rounds": 4, **more}).run()


def same(a: Tree, b: Tree) -> bool:
    return all(map(torch.equal, leaves(a), leaves(b)))


# The card's numbers


@engines
def test_golden(engine: str) -> None:
    method = Scaffold(Quadratic((0.5,)), SGD(lr=0.1), epochs=2)
    rounds = list(play(method, engine, [[0, 1], [0, 1], [0]]))
    assert rounds[0] == pytest.approx((0.165, 1.675, -0.475, 3.825), abs=1e-9)
    assert rounds[1] == pytest.approx((-0.07425, 1.19625, -0.90075, 3.29325), abs=1e-9)
    assert rounds[2] == pytest.approx((-0.2685725, 1.083931, -1.1253875, 3.29325), abs=1e-6)


@engines
def test_replaced_controls_forget_absent_clients(engine: str) -> None:
    method = Scaffold(Quadratic((0.5,)), SGD(lr=0.1), epochs=2, compat="replace-controls")
    rounds = list(play(method, engine, [[0, 1], [0, 1], [0]]))
    # While all take part nothing is wrong.
    assert rounds[1] == pytest.approx((-0.07425, 1.19625, -0.90075, 3.29325), abs=1e-9)
    assert rounds[2] == pytest.approx((-0.2685725, -1.1253875, -1.1253875, 3.29325), abs=1e-6)


@engines
def test_option_one_keeps_the_gradient_at_the_received_model(engine: str) -> None:
    method = Scaffold(Quadratic((0.5,)), SGD(lr=0.1), epochs=2, option="I")
    x = 0.5
    for x_next, c, *controls in play(method, engine, [[0, 1]] * 3):
        slopes = [h * (x - a) for h, a in zip(H, A, strict=True)]
        assert controls == pytest.approx(slopes)
        assert c == pytest.approx(sum(slopes) / 2)
        x = x_next
    assert x != pytest.approx(0.5, abs=0.1)


@engines
def test_option_one_reads_private_layers_as_they_were_before_training(engine: str) -> None:
    net = replace(GRAPH_NET, dropout=0.0)
    method = Scaffold(net, SGD(lr=0.1), option="I")
    simulation = Simulation(small_graph_federation(), method, engine=engine)
    server = method.round(method.init(simulation.clients(-1)), simulation.clients(0))
    before = simulation.engine.export_states()
    method.round(server, simulation.clients(1))
    after = simulation.engine.export_states()
    graphs = small_graph_federation().prepared(net.views).graphs
    for graph, old, new in zip(graphs, before, after, strict=True):

        def loss(common: Tree, own: Tree, graph: Graph = graph) -> Tensor:
            return cross_entropy(net(join_parts(common, own), graph), graph)

        slope = torch.func.grad(loss)(server.model, old.own.layers)
        tree_map(torch.testing.assert_close, new.control, slope)


def by_hand(lr: float, steps: int, rounds: int) -> float:
    """Two scalar clients with torch's Adam, the correction added to the gradient."""
    x, c, controls = torch.tensor(0.5), torch.tensor(0.0), [torch.tensor(0.0)] * 2
    models = [x.clone().requires_grad_() for _ in controls]
    optimizers = [torch.optim.Adam([m], lr=lr, weight_decay=5e-4) for m in models]
    for _ in range(rounds):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.data = x.clone()
            for _ in range(steps):
                model.grad = (H[i] * (model - A[i]) + c - controls[i]).detach()
                optimizer.step()
            controls[i] = controls[i] - c + (x - model.detach()) / (steps * lr)
        x = torch.stack([m.detach() for m in models]).mean()
        c = torch.stack(controls).mean()
    return float(x)


@engines
def test_with_adam_the_correction_is_preconditioned(engine: str) -> None:
    method = Scaffold(Quadratic((0.5,)), Adam(lr=0.05), epochs=3)
    *_, (x, *_) = play(method, engine, [[0, 1]] * 4)
    assert x == pytest.approx(by_hand(lr=0.05, steps=3, rounds=4), abs=1e-9)


def test_it_finds_the_optimum_that_fedavg_misses() -> None:
    best = sum(h * a for h, a in zip(H, A, strict=True)) / sum(H)
    method = Scaffold(Quadratic((0.5,)), SGD(lr=0.1), epochs=10)
    *_, (x, *_) = play(method, "serial", [[0, 1]] * 30)
    assert x == pytest.approx(best, abs=1e-4)
    average = run(FedAvg(Quadratic((0.5,)), SGD(lr=0.1), 10), scalar_clients(), rounds=10)
    assert abs(float(average.server["w"]) - best) > 0.1


# Reductions


@engines
@pytest.mark.parametrize("optimizer", [SGD(lr=0.3, weight_decay=0.01), Adam()])
def test_one_client_alone_needs_no_correction(engine: str, optimizer: Any) -> None:
    alone = small_federation((13,))
    ours = run(Scaffold(NODE_NET, optimizer), alone, engine)
    average = run(FedAvg(NODE_NET, optimizer), alone, engine)
    assert same(ours.server.model, average.server)


@engines
@pytest.mark.parametrize("by", ["nodes", "train", "uniform"])
def test_the_first_round_is_fedavg(engine: str, by: Any) -> None:
    federation = small_graph_federation()
    ours = run(Scaffold(GRAPH_NET, SGD(lr=0.1), weight_by=by), federation, engine, rounds=1)
    average = run(FedAvg(GRAPH_NET, SGD(lr=0.1), weight_by=by), federation, engine, rounds=1)
    assert same(ours.server.model, average.server)
    later = run(Scaffold(GRAPH_NET, SGD(lr=0.1), weight_by=by), federation, engine, rounds=2)
    plain = run(FedAvg(GRAPH_NET, SGD(lr=0.1), weight_by=by), federation, engine, rounds=2)
    assert not same(later.server.model, plain.server)


def test_the_server_goes_as_far_as_it_is_told() -> None:
    start, whole, half = (
        run(Scaffold(NODE_NET, eta_g=eta_g), small_federation(), rounds=1).server.model
        for eta_g in (1e-300, 1.0, 0.5)
    )
    for x, y, between in zip(leaves(start), leaves(whole), leaves(half), strict=True):
        torch.testing.assert_close(between, (x + y) / 2, rtol=1e-12, atol=1e-12)


# Partial participation and steps


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize(
    ("net", "make"), [(NODE_NET, small_federation), (GRAPH_NET, small_graph_federation)]
)
def test_the_servers_control_is_the_mean_of_all(option: Any, net: Any, make: Any) -> None:
    def gap(method: Scaffold, fraction: float = 0.5) -> float:
        made = run(method, make(), rounds=6, fraction=fraction)
        zero = method.init(made.simulation.clients(-1)).control
        states = made.simulation.engine.export_states()
        every = stack([zero if state is None else state.control for state in states])
        pairs = zip(leaves(made.server.control), leaves(every), strict=True)
        return max(float((c - each.mean(0)).abs().max()) for c, each in pairs)

    # Clients differ in size: models are weighted by it, controls are not.
    method = Scaffold(net, SGD(lr=0.05), option=option, weight_by="nodes")
    assert gap(method) < 1e-12
    replaced = replace(method, compat="replace-controls")
    assert gap(replaced) > 1e-3
    assert gap(replaced, fraction=1.0) < 1e-12


def test_an_absent_clients_control_waits() -> None:
    method = Scaffold(Quadratic((0.5,)), SGD(lr=0.1), epochs=2)
    (_, _, _, first), (_, _, _, second) = play(method, "fused", [[0, 1], [0]])
    assert first == second != 0


def test_moments_are_kept_or_reset() -> None:
    for keeping, age in (("keep", 6.0), ("reset", 3.0)):
        made = run(
            Scaffold(NODE_NET, Adam(), optimizer_state=keeping), small_federation(), rounds=2
        )
        states = made.simulation.engine.export_states()
        assert {float(state.own.moments.steps) for state in states} == {age}


def test_steps_are_counted_as_they_are_taken() -> None:
    for graph in prepared(small_graph_federation().graphs, GRAPH_NET.views, batching=Graphs(3)):
        taken = []

        def watch(grads: Tree, params: Tree, taken: list[int] = taken) -> Tree:
            taken.append(1)
            return grads

        def loss(params: Tree, graph: Graph, key: Tensor) -> Tensor:
            return params["w"].sum()

        fit(loss, {"w": torch.zeros(2)}, SGD(), None, 3, make_key(0), graph, watch)
        assert float(num_steps(graph, 3)) == len(taken)


@engines
def test_every_client_has_its_own_number_of_steps(engine: str) -> None:
    federation, method = small_graph_federation(), Scaffold(GRAPH_NET, SGD(lr=0.05), epochs=2)
    simulation = Simulation(federation, method, engine=engine)
    everyone = simulation.clients(0)
    start = method.init(simulation.clients(-1))
    method.round(start, everyone)
    reply = everyone.replies["train"]
    assert reply.steps.tolist() == [2, 4, 4, 2]  # two clients train on batches of three
    # From nothing, c_i is the mean gradient: the distance over K η.
    for client, state in enumerate(simulation.engine.export_states()):
        for c, y, x in zip(*map(leaves, (state.control, reply.model, start.model)), strict=True):
            torch.testing.assert_close(c, (x - y[client]) / (float(reply.steps[client]) * 0.05))


# What crosses


@pytest.mark.parametrize(
    ("settings", "up"), [({}, 1), ({"option": "I"}, 2), ({"compat": "replace-controls"}, 2)]
)
def test_what_the_server_can_rebuild_is_not_sent(settings: dict[str, Any], up: int) -> None:
    made = run(Scaffold(NODE_NET, **settings), small_federation(), rounds=1)
    floats = sum(leaf.numel() for leaf in leaves(made.server.model))
    seen = made.ledger.by_step()["train"]
    assert seen == {"messages": 4, "down": 4 * 8 * 2 * floats, "up": 4 * 8 * (up * floats + 2)}


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"option": "I"}, {"compat": "replace-controls"}])
def test_contract_of_the_choices(settings: dict[str, Any]) -> None:
    check_method(lambda net: Scaffold(net, **settings), rounds=2)


# Configuration


def built(task: str = "node", **settings: Any) -> Any:
    data = {"node": "lagoon", "graph": "MUTAG"}[task]
    config = resolve(make_config(method="scaffold", data=data, set=settings))[0]
    return build_method(config, 5, 3, task)


def test_its_own_rates() -> None:
    assert built().optimizer == built(optimizer="sgd").optimizer == SGD(0.5, 5e-4)
    assert built(lr=0.2).optimizer == SGD(0.2, 5e-4)
    assert built("graph").optimizer == SGD(0.01, 5e-4)
    assert built("graph", lr=0.2).optimizer == SGD(0.2, 5e-4)


def test_its_page_names_the_optimizer_that_it_uses() -> None:
    console = Console(width=100)
    with console.capture() as page:
        console.print(method_page("scaffold"))
    rows = [line.split() for line in page.get().splitlines()]
    assert ["optimizer", "sgd"] in [row[:2] for row in rows]
    assert ["lr", "0.5", "size", "of", "a", "step"] in [row[:6] for row in rows]
    assert ["lr", "0.01", "where", "graphs", "are", "classified"] in [row[:6] for row in rows]


def test_the_preset_is_openfgls() -> None:
    method = built(preset="openfgl")
    assert method.optimizer == Adam(lr=0.01, weight_decay=5e-4)
    assert (method.weight_by, method.compat, method.option) == ("nodes", "replace-controls", "II")


@pytest.mark.parametrize("eta_g", [0.0, -1.0])
def test_a_server_that_stands_still_is_refused(eta_g: float) -> None:
    with pytest.raises(
        ConfigError, match=r"eta_g is .*; give a positive number .*rate of the server"
    ):
        Scaffold(NODE_NET, eta_g=eta_g)
