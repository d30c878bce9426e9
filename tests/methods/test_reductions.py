"""Methods that must become each other, and FedAvg's identity with one central step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import grad

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph
from atoll.core.losses import cross_entropy
from atoll.core.method import Method
from atoll.core.optim import SGD, Adam
from atoll.core.task import NODES
from atoll.core.tree import Tree, leaves, tree_map
from atoll.engines.base import ENGINES
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import METHODS, FedAvg, FedProx, Local, method_class
from atoll.nn import nets_for
from atoll.nn.nets import GCN
from atoll.testing import CLASSES, FEATURES, double_precision, small_federation

NODE_NETS = nets_for(NODES.name)

engines = pytest.mark.parametrize("engine", ENGINES)
NET = GCN(FEATURES, CLASSES, hidden=6)


def run(method: Method, engine: str = "fused", **more: object) -> Run:
    return Experiment(method, small_federation(), rounds=3, engine=engine, **more).run()


def same(a: Tree, b: Tree) -> bool:
    return all(map(torch.equal, leaves(a), leaves(b)))


@engines
@pytest.mark.parametrize("optimizer", [Adam(), SGD(lr=0.1, momentum=0.9)])
def test_fedprox_without_pull_is_fedavg_bit_for_bit(engine, optimizer):
    avg = run(FedAvg(NET, optimizer), engine, fraction=0.75)
    prox = run(FedProx(NET, optimizer, mu=0.0), engine, fraction=0.75)
    assert same(avg.server, prox.server)
    assert same(avg.simulation.engine.export_states(), prox.simulation.engine.export_states())
    for scored, rounds in avg.history.scores.items():
        np.testing.assert_array_equal(rounds, prox.history.scores[scored])


def test_a_pull_keeps_models_near_the_received_one():
    def moved(mu: float) -> float:
        method = FedProx(NET, SGD(lr=0.05), epochs=8, mu=mu)
        made = run(method)
        start = method.init(made.simulation.clients(-1))
        return sum(
            float((a - b).square().sum())
            for a, b in zip(leaves(start), leaves(made.server), strict=True)
        )

    assert moved(0.0) > moved(1.0) > moved(10.0) > 0


def test_fedavg_of_one_client_is_local_training():
    alone = replace(small_federation((13,)), numbers=(0,))
    seed_of_local = Local(NET, epochs=3)
    local = Experiment(seed_of_local, alone, rounds=3).run()
    fedavg = Experiment(FedAvg(NET, epochs=3), alone, rounds=3).run()
    (state,) = local.simulation.engine.export_states()
    assert same(state.model, fedavg.server)


def union(federation: Federation) -> Graph:
    """All clients' graphs side by side, as one graph."""
    graphs = federation.graphs
    starts = torch.tensor([0, *(g.num_nodes for g in graphs)]).cumsum(0)

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(g, name) for g in graphs])

    edges = [g.edges + start for g, start in zip(graphs, starts, strict=False)]
    whole = torch.cat(edges, dim=1)
    return make_graph(joined("x"), whole, joined("y"), train=joined("train"))


@engines
@pytest.mark.parametrize("name", list(NODE_NETS))
def test_one_plain_step_weighted_by_training_nodes_is_one_central_step(engine, name):
    # methods/baselines/fedavg.md: E = 1, SGD, p_i = n_i^tr / n^tr
    with double_precision():
        quiet = {} if name == "sgc" else {"dropout": 0.0}
        net = NODE_NETS[name](FEATURES, CLASSES, **quiet)
        method = FedAvg(net, SGD(lr=0.1, weight_decay=0.01), epochs=1, weight_by="train")
        federation = small_federation()
        made = Experiment(method, federation, rounds=1, engine=engine).run()

        whole = Federation((union(federation),), CLASSES).prepared(net.views).graphs[0]
        start = method.init(made.simulation.clients(-1))
        slope = grad(lambda p: cross_entropy(net(p, whole), whole))(start)
        central = tree_map(lambda p, g: p - 0.1 * (g + 0.01 * p), start, slope)
        for ours, one in zip(leaves(made.server), leaves(central), strict=True):
            torch.testing.assert_close(ours, one, rtol=1e-12, atol=1e-12)


def test_moments_that_are_reset_are_those_of_a_client_that_never_trained():
    kept, reset = (run(FedAvg(NET, optimizer_state=s)) for s in ("keep", "reset"))
    ages = [
        {float(state.moments.steps) for state in made.simulation.engine.export_states()}
        for made in (kept, reset)
    ]
    assert ages == [{9.0}, {3.0}]
    assert not same(kept.server, reset.server)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_that_does_not_exist_stops_the_run(engine):
    with pytest.raises(ConfigError, match="unknown weight_by 'trian'"):
        run(FedAvg(NET, weight_by="trian"), engine)


def test_local_clients_start_alike_and_hear_nothing():
    made = run(Local(NET))
    reply_bytes = made.ledger.by_step()["train"]
    assert reply_bytes == {"messages": 12, "down": 12 * 8, "up": 0}
    start = Local(NET).init(made.simulation.clients(-1))
    assert torch.equal(made.server, start)
    models = [state.model for state in made.simulation.engine.export_states()]
    assert not same(models[0], models[1])


def test_methods_are_found_by_name_whatever_the_case():
    assert method_class("FedAvg") is METHODS["fedavg"] is FedAvg
    with pytest.raises(ConfigError, match=r"unknown method 'fedporx'; did you mean 'fedprox'\?"):
        method_class("fedporx")


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_has_a_paper_and_a_wire_line(name):
    import sys

    cls = METHODS[name]
    text = sys.modules[cls.__module__].__doc__ or ""
    assert cls.paper
    assert cls.deployed in ("global", "personalised")
    for line in ("Wire, per client and round:", "Private state:", "Departures from the reference"):
        assert line in text
