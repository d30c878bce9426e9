"""Edge evaluators, and propagation weighted by their scores."""

from __future__ import annotations

import pytest
import torch

from atoll.core.graph import make_graph, with_views
from atoll.core.random import make_key
from atoll.methods.fedath import FedATH
from atoll.nn import GCN
from atoll.nn.edges import EdgeGNN, weighted_gcn
from atoll.nn.views import loop_adjacency
from atoll.testing import double_precision, small_federation


@pytest.fixture(autouse=True)
def _double():
    with double_precision():
        yield


def test_weighted_propagation():
    source = torch.tensor([0, 1, 1, 2, 2, 3])
    target = torch.tensor([1, 0, 2, 1, 3, 2])
    weight = {(0, 1): 0.9, (1, 0): 0.8, (1, 2): 0.5, (2, 1): 0.4, (2, 3): 0.2, (3, 2): 0.6}
    graph = make_graph(
        torch.eye(4), torch.stack([source, target]), torch.zeros(4, dtype=torch.long)
    )
    loops = loop_adjacency(graph)
    pairs = zip(loops.columns.tolist(), loops.rows.tolist(), strict=True)
    values = torch.tensor([weight.get(pair, 0.123) for pair in pairs])  # a loop's is not used
    propagate = weighted_gcn(loops, values)
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    expected = torch.tensor([[1.341913], [1.857910], [3.395445], [3.711298]])
    assert torch.allclose(propagate(x), expected, atol=1e-6)
    dense = propagate(torch.eye(4))
    assert dense[0, 1].item() == pytest.approx(0.393179, abs=1e-6)
    assert dense[1, 0].item() == pytest.approx(0.442326, abs=1e-6)


def prepared(method, size=13):
    graph = small_federation((size,)).graphs[0]
    return with_views(graph, method.views)


def test_the_evaluator_sees_direction():
    """Scores of i -> j and j -> i differ: the input is an ordered pair."""
    scorer = EdgeGNN(11, 3, hidden=8)
    method = FedATH(GCN(11, 3, hidden=8), evaluator="gnn")
    graph = prepared(method)
    score = scorer(scorer.init(make_key(3)), graph)
    loops = graph.views["loops"]
    found = {
        (r, c): s
        for r, c, s in zip(loops.rows.tolist(), loops.columns.tolist(), score.tolist(), strict=True)
    }
    assert any(abs(found[r, c] - found[c, r]) > 1e-6 for r, c in found if r != c)
