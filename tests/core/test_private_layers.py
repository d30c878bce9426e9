"""Layers that never leave a client: split off, kept, joined again; nothing changes without any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from atoll.core.federation import Federation
from atoll.core.private_layers import Private, joined, kept, own_layers, private, shared, whole
from atoll.core.random import make_key
from atoll.core.tree import leaves, named_leaves
from atoll.engines.base import ENGINES
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import FedAvg, FedProx, Local
from atoll.nn import GCN, GraphGIN
from atoll.testing import CLASSES, FEATURES, double_precision, small_graph_federation


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


NET = GraphGIN(FEATURES, CLASSES, hidden=5)


def test_parts_make_the_whole():
    params = NET.init(make_key(0))
    common, own = shared(NET, params), private(NET, params)
    assert set(common) == {"convolutions"}
    assert set(own) == {"pre", "post", "readout"}
    assert joined(common, own) == params


def test_a_network_without_private_layers_is_shared_whole():
    net = GCN(FEATURES, CLASSES)
    params, graph = net.init(make_key(0)), small_graph_federation().graphs[0]
    assert shared(net, params) is params
    assert private(net, params) == own_layers(net, graph, make_key(0)) == {}
    assert joined(params, {}) is params
    assert whole(net, graph, params, None) is params


def test_what_was_kept_wins_over_a_fresh_draw():
    graph = small_graph_federation().graphs[0]
    fresh = kept(NET, graph, None, make_key(1))
    assert fresh.moments is None
    other = kept(NET, graph, None, make_key(2))
    assert not torch.equal(fresh.layers["pre"]["weight"], other.layers["pre"]["weight"])
    state = Private(fresh.layers, None)
    assert kept(NET, graph, state, make_key(2)) is state
    common = shared(NET, NET.init(make_key(3)))
    assert whole(NET, graph, common, state)["pre"] is fresh.layers["pre"]


def run(method, engine: str = "fused", federation: Federation | None = None) -> Run:
    made = federation or small_graph_federation()
    return Experiment(method, made, rounds=2, engine=engine).run()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", [FedAvg(NET), FedProx(NET, mu=0.5)])
def test_only_convolutions_cross(method, engine):
    made = run(method, engine)
    assert {name.split(".")[0] for name, _ in named_leaves(made.server)} == {"convolutions"}
    floats = sum(leaf.numel() for leaf in leaves(made.server))
    assert floats == 3 * 2 * (5 * 5 + 5)
    assert made.ledger.total("down") == 2 * 4 * 8 * floats
    assert made.ledger.total("up") == 2 * 4 * 8 * (floats + 1)
    states = made.simulation.engine.export_states()
    starts = [leaves(state.layers)[0] for state in states]
    assert not torch.equal(starts[0], starts[3])  # every client drew its own


def test_the_published_network_shares_12_tensors_with_24960_numbers():
    common = leaves(shared(GraphGIN(7, 2), GraphGIN(7, 2).init(make_key(0))))
    assert (len(common), sum(leaf.numel() for leaf in common)) == (12, 24_960)


def test_a_proximal_pull_leaves_private_layers_alone():
    strong, weak = (run(FedProx(NET, mu=mu)) for mu in (1e3, 0.0))

    def moved(made: Run, part: str) -> float:
        fresh = made.experiment.method.init(made.simulation.clients(-1))
        if part == "server":
            pairs = zip(leaves(made.server), leaves(fresh), strict=True)
            return sum(float((a - b).abs().sum()) for a, b in pairs)
        return float(made.simulation.engine.export_states()[0].layers["post"]["bias"].abs().sum())

    assert moved(strong, "server") < 0.5 * moved(weak, "server")
    assert moved(strong, "private") != moved(weak, "private")  # through the convolutions alone


def test_local_keeps_all_layers_and_sends_none():
    made = run(Local(NET))
    assert made.ledger.total("up") == 0
    for state in made.simulation.engine.export_states():
        assert set(state.model) == {"convolutions", "pre", "post", "readout"}
