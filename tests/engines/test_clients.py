"""Rounds, participants and keys. A diverged run names client, step and round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.core.batching import WHOLE, Graphs
from atoll.core.errors import AtollError, ConfigError, StepError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph
from atoll.core.message import ToAll, ToEach
from atoll.core.method import client_step
from atoll.core.optim import SGD, Adam
from atoll.core.random import make_key
from atoll.core.tree import Empty, Tree, num_bytes, record
from atoll.data.divide import federate
from atoll.data.synthetic import Archipelago, make_lagoon
from atoll.engines.base import ENGINES
from atoll.engines.clients import Simulation
from atoll.engines.fused import Fused
from atoll.engines.stacking import MOST_NODES, make_buckets, outline
from atoll.experiment.rounds import Experiment
from atoll.methods import METHODS, FedAvg, Local
from atoll.nn import GCN, NETS, GraphGIN
from atoll.testing import CLASSES, FEATURES, small_federation, small_graph_federation

engines = pytest.mark.parametrize("engine", ENGINES)


@record
class Reply:
    value: Tree


@dataclass(frozen=True)
class Toy:
    views: Any = field(default_factory=dict)

    @client_step
    def tell_key(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(key + 0 * graph.y.sum()), state

    @client_step
    def other_step(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply(key + 0 * graph.y.sum()), state

    @client_step
    def divide(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Reply({"a": message * 0 + 1, "b": 1 / message}), state

    @client_step
    def hide(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> Any:
        return Empty(), {"kept": 1 / message}


TOY = Toy()


def crowd(size: int) -> Federation:
    edges = torch.zeros(2, 0, dtype=torch.int64)
    graph = make_graph(torch.ones(2, 1), edges, torch.zeros(2, dtype=torch.int64))
    return Federation((graph,) * size, 2)


def simulate(size: int = 4, engine: str = "serial", seed: int = 0) -> Simulation:
    return Simulation(crowd(size), TOY, engine=engine, seed=seed)


def drawn(size: int, fraction: float, round: int = 0, seed: int = 0) -> list[int]:
    return simulate(size, seed=seed).clients(round).sample(fraction).positions.tolist()


# Participants


@pytest.mark.parametrize(
    ("size", "fraction", "expected"),
    [
        (100, 0.29, 29),  # not 28, which int(100 * 0.29) gives, and not 30
        (10, 0.3, 3),
        (10, 0.31, 4),
        (10, 1.0, 10),
        (10, 1e-12, 1),
        (3, 0.01, 1),
        (1, 0.5, 1),
        (7, 0.5, 4),
        (1000, 0.001, 1),
        (1000, 0.0011, 2),
    ],
)
def test_a_share_is_rounded_up_and_never_empty(size, fraction, expected):
    assert len(drawn(size, fraction)) == expected


@given(st.integers(1, 40), st.floats(0, 1, exclude_min=True), st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_a_draw_has_no_duplicates_and_is_ascending(size, fraction, round):
    chosen = drawn(size, fraction, round)
    assert chosen == sorted(set(chosen))
    assert 0 <= chosen[0] <= chosen[-1] < size
    assert len(chosen) in (max(1, math.floor(size * fraction)), math.ceil(size * fraction))


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, math.nan, math.inf])
def test_an_impossible_share_is_refused(fraction):
    with pytest.raises(ConfigError, match=rf"fraction {fraction} is not possible; .*\(0, 1\]"):
        drawn(5, fraction)


def test_draws_repeat_and_differ_by_round_and_seed():
    assert drawn(50, 0.2, 3) == drawn(50, 0.2, 3)
    by_round = {tuple(drawn(50, 0.2, round)) for round in range(10)}
    by_seed = {tuple(drawn(50, 0.2, seed=seed)) for seed in range(10)}
    assert len(by_round) == len(by_seed) == 10


def test_the_same_clients_are_drawn_whatever_their_order():
    federation = crowd(20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()
    turned = federation.reordered(order)
    for round in range(5):
        chosen = [
            {f.numbers[p] for p in Simulation(f, TOY).clients(round).sample(0.3).positions}
            for f in (federation, turned)
        ]
        assert chosen[0] == chosen[1]


def test_everybody_is_drawn_equally_often():
    counts = torch.zeros(10)
    simulation = simulate(10)
    for round in range(1000):
        counts[simulation.clients(round).sample(0.3).positions] += 1
    expected, spread = 300, math.sqrt(1000 * 0.3 * 0.7)
    assert (counts - expected).abs().max() < 4.5 * spread


def test_participants_know_their_round_and_how_many_there_are():
    chosen = simulate(8).clients(3).sample(0.5)
    assert (len(chosen), chosen.total, chosen.round) == (4, 8, 3)
    smaller = chosen.sample(0.5)
    assert len(smaller) == 2
    assert set(smaller.positions.tolist()) <= set(chosen.positions.tolist())


# Keys


@engines
def test_keys_differ_by_client_call_step_round_and_seed(engine):
    seen: list[int] = []
    for seed in range(2):
        simulation = simulate(4, engine, seed)
        for round in range(2):
            everyone = simulation.clients(round)
            for step in (TOY.tell_key, TOY.other_step, TOY.tell_key):
                seen += everyone.map(step, ToAll(Empty())).value.tolist()
    assert len(set(seen)) == len(seen) == 2 * 2 * 3 * 4


def test_a_step_mapped_again_on_a_share_of_the_clients_gets_fresh_noise():
    everyone = simulate(4).clients(0)
    first = everyone.map(TOY.tell_key, ToAll(Empty())).value.tolist()
    again = everyone.sample(0.5).map(TOY.tell_key, ToAll(Empty())).value.tolist()
    third = everyone.map(TOY.tell_key, ToAll(Empty())).value.tolist()
    assert len({*first, *again, *third}) == 10


@engines
def test_a_clients_key_follows_its_number_not_its_place(engine):
    federation = crowd(4)
    straight, turned = (
        Simulation(f, TOY, engine=engine).clients(2).map(TOY.tell_key, ToAll(Empty())).value
        for f in (federation, federation.reordered([2, 0, 3, 1]))
    )
    assert straight[[2, 0, 3, 1]].tolist() == turned.tolist()


@engines
def test_a_clients_key_does_not_depend_on_who_else_takes_part(engine):
    whole = simulate(6, engine).clients(0).map(TOY.tell_key, ToAll(Empty())).value
    chosen = simulate(6, engine).clients(0).sample(0.5)
    part = chosen.map(TOY.tell_key, ToAll(Empty())).value
    assert part.tolist() == whole[chosen.positions].tolist()


def test_the_servers_key_differs_by_round():
    simulation = simulate()
    keys = [int(simulation.clients(round).key) for round in (-1, 0, 1)]
    assert len(set(keys)) == 3


# What is not a number


@engines
def test_a_reply_that_is_not_finite_names_client_step_and_round(engine):
    message = ToEach(torch.tensor([1.0, 2.0, 0.0, 0.0]))
    with pytest.raises(StepError) as caught:
        simulate(4, engine).clients(5).map(TOY.divide, message)
    error = caught.value
    assert (error.client, error.step, error.round) == (2, "divide", 5)
    assert str(error).startswith(
        "client 2, step divide, round 5: training diverged ('value.b' is not finite"
    )


@engines
def test_under_partial_participation_the_right_client_is_named(engine):
    simulation = simulate(8, engine)
    chosen = simulation.clients(0).sample(0.5)
    bad = int(chosen.positions[-1])
    values = torch.ones(8)
    values[bad] = 0
    with pytest.raises(StepError, match=f"client {bad}, step divide, round 0"):
        chosen.map(TOY.divide, ToEach(values))


@engines
def test_a_private_state_that_is_not_finite_is_found_if_nothing_leaves(engine):
    message = ToEach(torch.tensor([1.0, 2.0, 0.0, 0.0]))
    with pytest.raises(StepError, match=r"client 2, step hide, round 1: .*'kept'"):
        simulate(4, engine).clients(1).map(TOY.hide, message)


@engines
def test_a_refused_reply_is_not_counted_as_traffic(engine):
    simulation = simulate(4, engine)
    with pytest.raises(StepError):
        simulation.clients(0).map(TOY.divide, ToAll(torch.tensor(0.0)))
    assert not simulation.ledger.entries


# FedIIH's routing normalises every row, so that no step of SGD is too long for it.
DIVERGING = [
    pytest.param(name, optimizer(lr=1e30), id=f"{name}-{optimizer.__name__.lower()}")
    for name in METHODS
    for optimizer in (Adam, SGD)
    if (name, optimizer) != ("fediih", SGD)
]


@engines
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(("name", "optimizer"), DIVERGING)
def test_a_run_that_diverges_stops_with_client_step_and_round(name, epochs, optimizer, engine):
    net = NETS[(*METHODS[name].nets, "gcn")[0]](FEATURES, CLASSES, hidden=4)
    method = METHODS[name](net, optimizer=optimizer, epochs=epochs)
    experiment = Experiment(method, small_federation(), rounds=4, engine=engine)
    where = r"client \d, step \w+, round [01]: training|round [01]: (distillation|training)"
    with pytest.raises(AtollError, match=f"({where}) (of the prototypes )?diverged"):
        experiment.run()


def islands(clients: int, **knobs: int):
    source = make_lagoon(Archipelago(**knobs), clients, 0)
    return federate(source, clients=None, partition="column:owner", seed=0)


def method(federation) -> FedAvg:
    return FedAvg(GCN(federation.features, federation.classes, hidden=8), epochs=1)


def simulate_islands(clients: int, chunk: int) -> tuple[Simulation, FedAvg]:
    federation = islands(clients)
    made = method(federation)
    return Simulation(federation, made, chunk=chunk), made


@pytest.mark.parametrize("chunk", [16, 64])
def test_padding_and_programs_are_linear_in_the_nodes(chunk: int) -> None:
    for clients in (100, 400):
        federation = islands(clients)
        outlines = outline(federation.graphs)
        buckets = make_buckets(outlines, range(clients), chunk)
        assert sorted(p for bucket in buckets for p in bucket) == list(range(clients))
        padded = sum(len(b) * max(outlines[p].nodes for p in b) for b in buckets)
        # A quarter, and what is too little to matter in a program.
        assert padded <= 1.25 * sum(o.nodes for o in outlines) + 4096 * len(buckets)
        assert len(buckets) <= clients / chunk + 12


def test_the_chunk_bounds_what_is_held_at_once() -> None:
    largest = {}
    for chunk in (10, 40):
        simulation, made = simulate_islands(120, chunk)
        assert isinstance(simulation.engine, Fused)
        made.round(made.init(simulation.clients(-1)), simulation.clients(0))
        stacked = simulation.engine.stacked
        assert max(map(len, stacked)) <= chunk
        largest[chunk] = max(num_bytes(graph) for graph in stacked.values())
    assert largest[10] < largest[40] / 2


def test_large_clients_run_alone() -> None:
    federation = islands(4, least=MOST_NODES // 2 + 1, most=MOST_NODES // 2 + 9)
    simulation = Simulation(federation, method(federation))
    made = method(federation)
    made.round(made.init(simulation.clients(-1)), simulation.clients(0))
    assert simulation.engine.stacked == {}


def test_all_clients_take_part_with_their_numbers() -> None:
    federation = small_federation().reordered([2, 0, 1, *range(3, len(small_federation()))])
    made = Simulation(federation, FedAvg(GCN(FEATURES, CLASSES)), seed=3, engine="serial")
    assert made.numbers.tolist()[:3] == [2, 0, 1]
    assert torch.equal(made.root, make_key(3))
    clients = made.clients(5)
    assert (len(clients), clients.total, clients.round) == (len(federation),) * 2 + (5,)


def test_private_states_are_the_engine_s() -> None:
    method = Local(GCN(FEATURES, CLASSES, hidden=3), epochs=1)
    made = Simulation(small_federation(), method, engine="fused")
    assert made.private_states() == [None] * len(made.federation)
    made.clients(0).map(method.train, ToAll(make_key(1)))
    assert all(state is not None for state in made.private_states())
    assert made.ledger.by_step()["train"]["messages"] == len(made.federation)


def test_the_batching_is_the_given_one_or_the_federation_s() -> None:
    federation, method = small_graph_federation(), FedAvg(GraphGIN(FEATURES, CLASSES))
    for wish, used in ((None, federation.batching), (Graphs(2), Graphs(2)), (WHOLE, WHOLE)):
        made = Simulation(federation, method, engine="serial", batching=wish)
        assert made.engine.graphs[1].batching == used
