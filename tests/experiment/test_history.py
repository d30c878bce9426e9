"""A history starts with the clients' sizes and continues from a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.experiment.history import empty_history
from atoll.experiment.metrics import METRICS
from atoll.testing import small_federation


def test_a_history_begins_with_the_sizes_of_the_clients() -> None:
    federation = small_federation()
    history = empty_history(federation)
    assert history.rounds == 0
    assert history.nodes.tolist() == [graph.num_nodes for graph in federation.graphs]
    for counts, graph in zip(history.counts, federation.graphs, strict=True):
        assert counts.tolist() == [int(m.sum()) for m in (graph.train, graph.val, graph.test)]


def test_a_history_continues_from_a_checkpoint() -> None:
    history = empty_history(small_federation())
    tables = torch.rand(2, len(history.nodes), 3, len(METRICS), dtype=torch.float64)
    scores = {"deployed": tables, "local": torch.zeros(0)}
    history.restore({"scores": scores, "seconds": torch.tensor([0.5, 0.25])})
    assert (history.rounds, history.seconds) == (2, [0.5, 0.25])
    found = history.array("deployed", "loss", "val")
    np.testing.assert_array_equal(found, tables[:, :, 1, METRICS.index("loss")].numpy())
    with pytest.raises(ValueError, match="need at least one array"):
        history.array("local", "loss", "val")  # none was scored
