"""FedAvg: golden numbers, and its identities with local training and one central step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.func import grad

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph, make_graph
from atoll.core.losses import cross_entropy
from atoll.core.optim import SGD
from atoll.core.task import NODES
from atoll.core.tree import leaves, tree_map
from atoll.engines.base import ENGINES
from atoll.experiment.rounds import Experiment
from atoll.methods import FedAvg, Local
from atoll.nn import nets_for
from atoll.testing import CLASSES, FEATURES, double_precision, small_federation
from tests.methods.quadratic import ADAM, NET, TWO_ROUNDS, Quadratic, owner, play, run, same

NODE_NETS = nets_for(NODES.name)
RESET = [0.559956, 0.440008]

engines = pytest.mark.parametrize("engine", ENGINES)


@engines
@pytest.mark.parametrize(("keeping", "expected"), [("keep", TWO_ROUNDS), ("reset", RESET)])
def test_fedavg_keeps_or_resets_the_moments(engine, keeping, expected):
    # Two equal clients: the average is what either of them gets by itself.
    with double_precision():
        method = FedAvg(Quadratic((0.5, 0.5)), ADAM, epochs=3, optimizer_state=keeping)
        clients = [owner([1.0, 4.0], [1.0, -2.0], nodes) for nodes in (1, 4)]
        server, _ = play(method, clients, engine, rounds=2)
    assert server["w"].tolist() == pytest.approx(expected, abs=1e-6)


@engines
def test_fedavg_weights_by_size(engine):
    # One plain step of lr 1 with h = 1 jumps from anywhere onto a: locals are the card's models.
    with double_precision():
        models, sizes = ([1.0, 2.0], [3.0, -1.0], [0.5, 0.25]), (3, 5, 2)
        clients = [owner([1.0, 1.0], a, n) for a, n in zip(models, sizes, strict=True)]
        made = {
            by: play(FedAvg(Quadratic((0.0, 0.0)), SGD(lr=1.0), 1, by), clients, engine, 1)[0]["w"]
            for by in ("nodes", "train", "uniform")
        }
    assert made["nodes"].tolist() == pytest.approx([1.9, 0.15], abs=1e-9)
    assert made["train"].tolist() == pytest.approx([1.9, 0.15], abs=1e-9)
    assert made["uniform"].tolist() == pytest.approx([1.5, 0.416667], abs=1e-6)


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


@engines
def test_a_weight_that_does_not_exist_stops_the_run(engine):
    with pytest.raises(ConfigError, match="unknown weight_by 'trian'"):
        run(FedAvg(NET, weight_by="trian"), engine)
