"""Layers that never leave a client: split, kept and joined. Without them nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from atoll.core.federation import Federation
from atoll.core.graph import with_views
from atoll.core.optim import Adam
from atoll.core.private_layers import (
    KeepsPrivate,
    Private,
    fit_received,
    init_private,
    init_shared,
    join_parts,
    private_part,
    shared_part,
    whole_params,
)
from atoll.core.random import make_key
from atoll.core.tree import leaves, named_leaves, record
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
    common, own = shared_part(NET, params), private_part(NET, params)
    assert set(common) == {"convolutions"}
    assert set(own) == {"pre", "post", "readout"}
    assert join_parts(common, own) == params


def test_a_network_without_private_layers_is_shared_whole():
    net = GCN(FEATURES, CLASSES)
    params, graph = net.init(make_key(0)), small_graph_federation().graphs[0]
    assert shared_part(net, params) is params
    assert private_part(net, params) == init_private(net, graph, make_key(0)) == {}
    assert join_parts(params, {}) is params
    assert whole_params(net, graph, params, None) is params


def test_what_was_kept_wins_over_a_fresh_draw():
    graph = with_views(small_graph_federation().graphs[0], NET.views)
    common, fedavg = init_shared(NET, make_key(3)), FedAvg(NET)
    method = SimpleNamespace(
        net=NET, optimizer=Adam(), epochs=0, optimizer_state="keep", loss=fedavg.loss
    )
    _, fresh = fit_received(method, graph, common, None, make_key(1))
    _, other = fit_received(method, graph, common, None, make_key(2))
    assert not torch.equal(fresh.layers["pre"]["weight"], other.layers["pre"]["weight"])
    model, again = fit_received(method, graph, common, Private(fresh.layers, None), make_key(2))
    assert again.layers["pre"]["weight"] is fresh.layers["pre"]["weight"]
    assert set(model) == {"convolutions"}
    assert whole_params(NET, graph, common, fresh)["pre"] is fresh.layers["pre"]


@record
class Wrapped(KeepsPrivate):
    before: torch.Tensor
    own: Private


@record
class Unrelated:
    layers: object
    own: torch.Tensor


def test_only_a_record_that_declares_it_holds_private_layers_in_its_field_own():
    graph = with_views(small_graph_federation().graphs[0], NET.views)
    common, kept = init_shared(NET, make_key(3)), init_private(NET, graph, make_key(1))
    for state in (
        Private(kept, None),
        Wrapped(torch.zeros(1), Private(kept, None)),
        Unrelated(kept, torch.zeros(1)),
    ):
        assert whole_params(NET, graph, common, state)["pre"] is kept["pre"]


def test_moments_are_kept_or_start_anew():
    graph = with_views(small_graph_federation().graphs[0], NET.views)
    common = init_shared(NET, make_key(3))
    for optimizer_state, age in (("keep", 4), ("reset", 2)):
        method = FedAvg(NET, epochs=2, optimizer_state=optimizer_state)
        model, state = fit_received(method, graph, common, None, make_key(1))
        _, state = fit_received(method, graph, model, state, make_key(2))
        assert float(state.moments.steps) == age


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
    common = leaves(init_shared(GraphGIN(7, 2), make_key(0)))
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
    assert moved(strong, "private") != moved(weak, "private")  # only through the convolutions


def test_local_keeps_all_layers_and_sends_none():
    made = run(Local(NET))
    assert made.ledger.total("up") == 0
    for state in made.simulation.engine.export_states():
        assert set(state.model) == {"convolutions", "pre", "post", "readout"}
