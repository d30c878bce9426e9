"""Many clients, and large ones: cost grows as nodes and edges do, memory as the chunk does."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.core.tree import num_bytes
from atoll.data.archive import load_federation, save_federation
from atoll.data.divide import federate
from atoll.data.synthetic import Archipelago, make_lagoon
from atoll.engines.buckets import MOST_NODES, make_buckets, outline
from atoll.engines.fused import Fused
from atoll.engines.simulation import Simulation
from atoll.experiment import columns
from atoll.experiment.rounds import Experiment
from atoll.experiment.run import run
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


def seconds_of(clients: int) -> float:
    """CPU seconds of dividing, preparing, training and scoring; the better of two."""
    found = []
    for _ in range(2):
        start = time.process_time()
        federation = islands(clients)
        Experiment(method(federation), federation, rounds=2, chunk=50).run()
        found.append(time.process_time() - start)
    return min(found)


def test_four_times_the_clients_cost_about_four_times_as_much() -> None:
    seconds_of(50)  # whatever happens once in a process
    assert seconds_of(800) < 4 * 2 * seconds_of(200)


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


def test_lazy_clients_give_the_same_numbers_and_are_not_kept(tmp_path: Path) -> None:
    path = save_federation(islands(30), tmp_path / "a.atoll")
    runs = []
    for lazy in (False, True):
        federation = load_federation(path, lazy=lazy)
        found = Experiment(method(federation), federation, rounds=3, fraction=0.7, chunk=8).run()
        runs.append(np.stack(found.history.scores["deployed"]))
    np.testing.assert_array_equal(*runs)


def test_long_tables_become_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    options = {"clients": 3, "rounds": 2, "seeds": 2}
    run("fedavg", "lagoon:nodes=150", out=tmp_path / "text", **options)
    monkeypatch.setattr(columns, "MAX_CSV_ROWS", 20)
    run("fedavg", "lagoon:nodes=150", out=tmp_path / "long", **options)
    for name in ("metrics", "ledger"):
        assert not (tmp_path / "long" / f"{name}.csv").exists()
        with (tmp_path / "text" / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        table = pq.read_table(tmp_path / "long" / f"{name}.parquet")
        assert table.column_names == list(rows[0])
        for column in table.column_names:
            values = table[column].to_pylist()
            for given, row in zip(values, rows, strict=True):
                if isinstance(given, float):
                    assert given == pytest.approx(float(row[column]), rel=1e-5)
                else:
                    assert ("" if given is None else str(given)) == row[column]


def test_states_of_different_shapes_survive_a_checkpoint() -> None:
    from atoll.engines.checkpoint import pack_states, unpack_states

    states = [None, {"a": torch.ones(2)}, None, {"a": torch.zeros(3)}, {"a": torch.zeros(2)}]
    again = unpack_states(pack_states(states))
    assert again[0] is None
    assert again[2] is None
    for position in (1, 3, 4):
        assert torch.equal(again[position]["a"], states[position]["a"])
