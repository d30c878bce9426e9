"""Many clients, and large ones: padding grows as nodes do, memory as the chunk does."""

from __future__ import annotations

import pytest

from atoll.core.tree import num_bytes
from atoll.data.divide import federate
from atoll.data.synthetic import Archipelago, make_lagoon
from atoll.engines.buckets import MOST_NODES, make_buckets, outline
from atoll.engines.fused import Fused
from atoll.engines.simulation import Simulation
from atoll.methods import FedAvg
from atoll.nn import GCN


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
