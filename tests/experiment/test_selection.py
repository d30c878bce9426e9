"""The selected round, round by round and of a whole history."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.experiment.history import History
from atoll.experiment.selection import BEST_CACHED, Improvements, Selection


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
