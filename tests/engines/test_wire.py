"""The wire: everything becomes bytes, and nothing undeclared leaves a client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.errors import StepError, WireError
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.core.message import Message, ToAll, ToEach
from atoll.core.method import client_step
from atoll.core.task import NODES
from atoll.core.tree import Empty, Tree, record
from atoll.deploy.local import environment
from atoll.engines.clients import Simulation
from atoll.engines.wire import Probe, make_probe
from atoll.methods import FedAvg
from atoll.nn import GraphGIN, nets_for
from atoll.testing import CLASSES, FEATURES, small_federation, small_graph_federation

NODE_NETS = nets_for(NODES.name)


@record
class Reply:
    value: Tree


@dataclass(frozen=True)
class Toy:
    """Steps that say too much, and one that declares it."""

    views: Any = field(default_factory=dict)

    @client_step
    def nodes(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply({"h": graph.real * 2}), None

    @client_step
    def items(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        parts = [graph.training, graph.held_out]  # without them, a harmless reply of their size
        return Reply([torch.zeros(27) if g is None else g.y.to(graph.real) for g in parts]), None

    @client_step
    def edges(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(graph.edge_weight), None

    @client_step
    def pairs(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(graph.real.outer(graph.real)), None

    @client_step(discloses={"value": "the test wants it"})
    def declared(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(graph.real * 2), None

    @client_step
    def sometimes(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(graph.real.sum() if graph.num_nodes == CLASSES + 5 else None), None

    @client_step
    def changeable(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        total = graph.real.sum()
        return Reply(total.double() if graph.num_nodes == 22 else total), None

    @client_step
    def echo(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(message), None

    @client_step
    def phased(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        if isinstance(message, list):
            return Reply({"all": graph.real}), None
        return Reply(None if isinstance(message, Empty) else message), None

    @client_step
    def grabbing(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        message += 1
        before = torch.zeros(2) if state is None else state["seen"]
        return Reply(message + before), {"seen": message}

    @client_step
    def odd(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(torch.float32), None

    @client_step
    def broken(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        raise KeyError("lost")


TOY = Toy()


def wire(federation: Federation | None = None) -> Simulation:
    return Simulation(federation or small_federation(), TOY, engine="wire")


def ask(simulation: Simulation, step: Any, message: Message | None = None, round: int = 0) -> Any:
    return simulation.clients(round).map(step, message or ToAll(Empty())).value


@pytest.mark.parametrize(
    ("step", "name", "shapes"),
    [
        (TOY.nodes, "value.h", r"\(8,\) or \(11,\)"),
        (TOY.edges, "value", r"\(32,\) or \(44,\)"),
        (TOY.pairs, "value", r"\(8, 8\) or \(11, 11\)"),
    ],
)
def test_an_undeclared_node_or_edge_axis_is_refused_in_a_clear_sentence(step, name, shapes):
    with pytest.raises(WireError) as caught:
        ask(wire(), step)
    assert str(caught.value).startswith(
        f"step '{step.name}' would send '{name}', whose size depends on the client's graph"
    )
    assert caught.match(shapes)
    assert str(caught.value).endswith("client_step(discloses={'value': '...'})")


def test_it_is_refused_even_if_all_clients_are_equally_large():
    graph = small_federation().graphs[0]
    with pytest.raises(WireError, match="would send"):
        ask(wire(Federation((graph, graph), CLASSES)), TOY.nodes)
    graph = small_graph_federation().graphs[0]
    # The probes have the parts of a real client, too.
    with pytest.raises(WireError, match="would send"):
        ask(wire(Federation((graph, graph), CLASSES)), TOY.items)


def test_a_declared_node_axis_may_leave():
    graph = small_federation().graphs[0]
    out = ask(wire(Federation((graph, graph), CLASSES)), TOY.declared)
    assert torch.equal(out, torch.full((2, 13), 2.0))


@pytest.mark.parametrize("engine", ["serial", "wire"])
def test_replies_of_different_size_cannot_be_stacked_and_the_error_says_where(engine):
    simulation = Simulation(small_federation(), TOY, engine=engine)
    with pytest.raises(StepError, match=r"client 1, step declared, round 5: .*\(17,\).*\(13,\)"):
        ask(simulation, TOY.declared, round=5)


def test_a_reply_whose_fields_come_and_go_is_refused():
    with pytest.raises(WireError, match=r"replies with \['value'\] or \[\], depending on"):
        ask(wire(), TOY.sometimes)


def test_serial_refuses_it_too_where_it_shows():
    graphs = small_federation((CLASSES + 5, CLASSES + 6))
    with pytest.raises(
        StepError, match=r"client 1, step sometimes, round 2: .* \[\] here and \['v"
    ):
        ask(Simulation(graphs, TOY, engine="serial"), TOY.sometimes, round=2)


def test_a_reply_that_is_not_what_the_probe_gave_is_refused():
    with pytest.raises(WireError, match=r"'value' is torch\.float64, declared torch\.float32"):
        ask(wire(), TOY.changeable)


def test_a_server_cannot_send_numbers_that_are_none():
    with pytest.raises(WireError, match="NaN or infinite"):
        ask(wire(), TOY.echo, ToAll(torch.tensor([1.0, torch.nan])))


def test_what_cannot_be_serialised_cannot_be_sent():
    with pytest.raises(WireError, match=r"a builtins\.set cannot be sent"):
        ask(wire(), TOY.echo, ToAll({1, 2}))
    with pytest.raises(WireError, match=r"a torch\.dtype cannot be sent"):
        ask(wire(), TOY.odd)


def test_an_error_in_a_step_names_client_step_and_round():
    with pytest.raises(
        StepError,
        match=r"client 0, step broken, round 3: KeyError in test_wire.py line \d+: 'lost'",
    ):
        ask(wire(), TOY.broken, round=3)


def test_nothing_is_shared_by_reference():
    simulation, model = wire(), torch.zeros(2)
    # The probes are shown the message once; they must not be able to change it either.
    first = ask(simulation, TOY.grabbing, ToAll(model))
    assert torch.equal(model, torch.zeros(2))
    assert torch.equal(first, torch.ones(4, 2))
    first += 100
    assert torch.equal(ask(simulation, TOY.grabbing, ToAll(model)), torch.full((4, 2), 2.0))


def test_states_are_kept_as_bytes_and_come_back_as_trees():
    simulation = wire()
    ask(simulation, TOY.grabbing, ToEach(torch.arange(8.0).reshape(4, 2)))
    assert all(isinstance(state, bytes) for state in simulation.engine.states)
    states = simulation.engine.export_states()
    assert [state["seen"].tolist() for state in states] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    other = wire()
    other.engine.import_states(states)
    assert torch.equal(other.engine.export_states()[2]["seen"], torch.tensor([5.0, 6.0]))


def test_a_step_is_tried_on_the_probes_once():
    probe = make_probe(small_federation(), {}, torch.zeros(1))
    calls = []
    step = replace(TOY.echo, function=lambda *args: (calls.append(1), Toy.echo.function(*args))[1])
    for _ in range(3):
        probe.template(step, torch.ones(2))
    assert len(calls) == 2


def test_a_step_may_reply_with_something_else_to_another_kind_of_message():
    simulation = wire()
    assert ask(simulation, TOY.phased, ToAll(torch.ones(2))).shape == (4, 2)
    assert ask(simulation, TOY.phased, ToAll(Empty())) is None
    # Every kind is tried on the probes: an innocent first reply does not vouch for the others.
    with pytest.raises(WireError, match=r"would send 'value\.all'"):
        ask(simulation, TOY.phased, ToAll([torch.ones(2)]))


def test_steps_that_follow_each_other_find_the_probes_states():
    probe = make_probe(small_federation(), {}, torch.zeros(1))
    probe.template(TOY.grabbing, torch.ones(2))
    assert all(state["seen"].shape == (2,) for state in probe.states)


@pytest.mark.parametrize("name", list(NODE_NETS))
def test_probes_suit_every_network_and_hold_every_class(name):
    method = FedAvg(NODE_NETS[name](FEATURES, CLASSES))
    probe: Probe = make_probe(small_federation(), dict(method.views), torch.zeros(1))
    small, large = probe.graphs
    assert small.num_nodes < large.num_nodes
    for graph in probe.graphs:
        assert set(graph.y[graph.train > 0].tolist()) == set(range(CLASSES))
        assert all(mask.any() for mask in (graph.train, graph.val, graph.test))
    simulation = Simulation(small_federation(), method, engine="wire")
    reply = probe.template(method.train, method.init(simulation.clients(-1)))
    assert reply.weight.shape == ()


def test_probes_of_a_federation_of_graphs_hold_every_class_and_share_no_own_layers():
    method = FedAvg(GraphGIN(FEATURES, CLASSES, hidden=4))
    federation = small_graph_federation()
    probe = make_probe(federation, dict(method.views), torch.zeros(1))
    small, large = probe.graphs
    assert len(small.roots) < len(large.roots)
    for graph in probe.graphs:
        assert graph.task.many_graphs
        assert set(graph.y[graph.train > 0].tolist()) == set(range(CLASSES))
        for mask in (graph.train, graph.val, graph.test):
            assert graph.at_roots(mask).sum() == mask.sum() > 0
    simulation = Simulation(federation, method, engine="wire")
    reply = probe.template(method.train, method.init(simulation.clients(-1)))
    assert set(reply.model) == {"convolutions"}


def test_one_thread_gives_the_bits_of_a_site(tmp_path, monkeypatch):
    """One thread, as in docs/federation.md, because more threads change the order of sums."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    data = ("--data", "lagoon:nodes=2000", "--clients", "2", "--rounds", "2", "--quiet")
    for engine, threads in {"serial": {"OMP_NUM_THREADS": "1"}, "wire": environment("t")}.items():
        options = (*data, "--engine", engine, "--out", str(tmp_path / engine))
        command = [sys.executable, "-m", "atoll", "run", "fedavg", *options]
        subprocess.run(command, env={**os.environ, **threads}, timeout=300, check=True)
    serial, wire = (
        json.loads((tmp_path / e / "result.json").read_text()) for e in ("serial", "wire")
    )
    assert serial["environment"]["threads"] == wire["environment"]["threads"] == "1"
    files = [(tmp_path / engine / "metrics.csv").read_bytes() for engine in ("serial", "wire")]
    assert files[0] == files[1]
