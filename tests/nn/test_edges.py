"""A graph convolution with weighted edges, by hand."""

from __future__ import annotations

import pytest
import torch

from atoll.core.graph import make_graph
from atoll.nn.edges import weighted_gcn
from atoll.nn.views import loop_adjacency


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
    none = torch.zeros(())
    assert torch.allclose(propagate(x, none), expected, atol=1e-6)
    assert torch.allclose(propagate(x, none + 2), expected + 2, atol=1e-6)
    dense = propagate(torch.eye(4), none)
    assert dense[0, 1].item() == pytest.approx(0.393179, abs=1e-6)
    assert dense[1, 0].item() == pytest.approx(0.442326, abs=1e-6)
