"""A history starts with the sizes, continues from a checkpoint, and has a selected round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.engines.ledger import Ledger
from atoll.experiment.history import BEST_CACHED, History, Improvements, Selection, empty_history
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
    ledger = Ledger()
    ledger.add(0, "train", [0, 1], down=7, up=11)
    seconds = torch.tensor([0.5, 0.25])
    history.restore({"scores": scores, "seconds": seconds, "ledger": ledger.export()})
    assert history.ledger.entries == ledger.entries
    assert (history.rounds, history.seconds) == (2, [0.5, 0.25])
    found = history.array("deployed", "loss", "val")
    np.testing.assert_array_equal(found, tables[:, :, 1, METRICS.index("loss")].numpy())
    with pytest.raises(ValueError, match="need at least one array"):
        history.array("local", "loss", "val")  # none was scored


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_improvements_find_the_rounds_that_the_selection_picks(data):
    rounds, clients = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    value = st.sampled_from([0.0, 0.25, 0.5, float("nan")])
    size = rounds * clients * 15
    numbers = np.array(data.draw(st.lists(value, min_size=size, max_size=size)))
    tables = list(numbers.reshape(rounds, clients, 3, 5))
    for table in tables[1:]:  # a client has a metric in all rounds, or in none
        table[np.isnan(tables[0])] = np.nan
        table[np.isnan(table) & ~np.isnan(tables[0])] = 0.0
    history = History(
        counts=np.array(data.draw(st.lists(st.integers(1, 9), min_size=clients, max_size=clients)))[
            :, None
        ].repeat(3, 1),
        nodes=np.arange(1, clients + 1),
        scores={"deployed": tables, "local": tables},
        seconds=[0.0] * rounds,
    )
    select = data.draw(st.sampled_from(["best-val", "best-val-per-client", "last"]))
    rule = Selection("deployed", data.draw(st.sampled_from(["accuracy", "auc"])), "tests", select)
    found, improvements = np.full(clients, -1), Improvements(rule, rounds)
    for number in range(rounds):
        found[improvements.of(history, number)] = number
    assert found.tolist() == rule.rounds(history).tolist()


def test_no_round_improves_where_test_scores_select():
    rule = Selection("deployed", "accuracy", "tests", BEST_CACHED)
    history = History(counts=np.ones((2, 3)), nodes=np.ones(2))
    assert not Improvements(rule, 1).of(history, 0).any()
