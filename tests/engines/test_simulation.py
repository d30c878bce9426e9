"""A federation on one machine: its keys and its clients, many of them, and large ones."""

from __future__ import annotations

import pytest
import torch

from atoll.core.batching import WHOLE, Graphs
from atoll.core.message import ToAll
from atoll.core.random import make_key
from atoll.core.tree import num_bytes
from atoll.data.divide import federate
from atoll.data.synthetic import Archipelago, make_lagoon
from atoll.engines.buckets import MOST_NODES, make_buckets, outline
from atoll.engines.fused import Fused
from atoll.engines.simulation import Simulation
from atoll.methods import FedAvg, Local
from atoll.nn import GCN, GraphGIN
from atoll.testing import CLASSES, FEATURES, small_federation, small_graph_federation


def islands(clients: int, **knobs: int):
    source = make_lagoon(Archipelago(**knobs), clients, 0)
    return federate(source, clients=None, partition="column:owner", seed=0)


def method(federation) -> FedAvg:
    return FedAvg(GCN(federation.features, federation.classes, hidden=8), epochs=1)


def simulate(clients: int, chunk: int) -> tuple[Simulation, FedAvg]:
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
        simulation, made = simulate(120, chunk)
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
    for given, used in ((None, federation.batching), (Graphs(2), Graphs(2)), (WHOLE, WHOLE)):
        made = Simulation(federation, method, engine="serial", batching=given)
        assert made.engine.graphs[1].batching == used
