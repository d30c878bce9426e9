"""Graphs that grow: engines agree, and nothing of a test node or its edges reaches training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.core.stages import at_stage
from atoll.core.tree import leaves
from atoll.methods import METHODS
from atoll.nn import NETS
from atoll.testing import (
    Case,
    ContractBroken,
    _same_runs,
    check_replay,
    double_precision,
    small_federation,
)
from tests.contract.test_methods import SHORTER, THREE_ROUNDS


def growing(graph: Graph) -> Graph:
    """Validation nodes and test nodes appear after training, each with its edges."""
    val, test = graph.val * (1 - graph.train), graph.test * (1 - graph.train)
    since = (val + 2 * test).to(torch.int8)
    edge_since = since[graph.edges].amax(0)
    return replace(graph, val=val, test=test, since=since, edge_since=edge_since)


def disturbed(graph: Graph) -> Graph:
    """Change only features, labels and edges of test nodes."""
    noise = torch.Generator().manual_seed(1)
    hidden, size = graph.test > 0, graph.num_nodes
    assert isinstance(graph.x, torch.Tensor)
    drawn = torch.rand(graph.x.shape, generator=noise, dtype=graph.x.dtype)
    x = torch.where(hidden.unsqueeze(1), drawn, graph.x)
    kept = ~hidden[graph.edges].any(0)
    ends = torch.randint(0, size, (2, 40), generator=noise)
    ends = ends[:, hidden[ends].any(0)]
    edges = torch.cat([graph.edges[:, kept], ends, ends.flip(0)], 1)
    y = torch.where(hidden, graph.y.roll(1), graph.y)
    new = replace(graph, x=x, y=y, edges=edges, edge_weight=torch.ones(edges.shape[1]).to(x.dtype))
    return growing(new)


@pytest.mark.parametrize("name", METHODS)
def test_nothing_of_a_test_node_reaches_training(name: str) -> None:
    with double_precision():
        plain = small_federation()
        clients = replace(plain, graphs=tuple(growing(graph) for graph in plain.graphs))
        others = replace(plain, graphs=tuple(disturbed(graph) for graph in clients.graphs))
        net = NETS[(*METHODS[name].nets, "gcn")[0]]
        made = net(plain.features, plain.classes, hidden=5, dropout=0.4)
        method = METHODS[name](net=made, **SHORTER.get(name, {}))
        case = Case(method, clients, 3 if name in THREE_ROUNDS else 2)
        if method.why_bound():
            with pytest.raises(ContractBroken, match="nodes that are absent in training"):
                case.run("serial")
            return
        runs = [case.run("fused"), Case(method, others, case.rounds).run("fused")]
        _same_runs(case.serial, runs[0], "engines serial and fused disagree")
        trees = [[run.server, run.simulation.engine.export_states()] for run in runs]
        for one, two in zip(*map(leaves, trees), strict=True):
            assert torch.equal(one, two)
        for scored in ("deployed", "local"):
            first, second = (torch.tensor(run.history.scores[scored][-1]) for run in runs)
            assert torch.equal(first[:, :2].nan_to_num(-1), second[:, :2].nan_to_num(-1))
        assert not torch.equal(first[:, 2].nan_to_num(-1), second[:, 2].nan_to_num(-1))


def test_a_growing_graph_trains_as_the_graph_that_is_there() -> None:
    with double_precision():
        plain = small_federation()
        clients = replace(plain, graphs=tuple(growing(graph) for graph in plain.graphs))
        method = METHODS["fedavg"](net=NETS["gcn"](plain.features, plain.classes, hidden=5))
        grown = Case(method, clients, 2).run("serial")
        early = replace(plain, graphs=tuple(at_stage(graph, 0) for graph in clients.graphs))
        alone = Case(method, Federation(early.graphs, early.classes), 2).run("serial")
        for one, two in zip(leaves(grown.server), leaves(alone.server), strict=True):
            assert torch.equal(one, two)
        check_replay(Case(method, clients, 2))
