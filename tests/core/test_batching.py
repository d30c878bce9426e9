"""Batching of a client's data: the values and their option."""

from __future__ import annotations

import pytest

from atoll.core.batching import WHOLE, Graphs, batch_size_of, batching_of
from atoll.core.errors import ConfigError


def test_the_option_batch_size_and_the_value_stand_for_each_other():
    assert [batch_size_of(batching_of(size)) for size in (0, 1, 128)] == [0, 1, 128]
    for wrong in (lambda: batching_of(-1), lambda: Graphs(0)):
        with pytest.raises(ConfigError, match="give"):
            wrong()


def test_only_batches_of_graphs_cut() -> None:
    assert (WHOLE.cuts, Graphs(3).cuts) == (False, True)
    assert Graphs(3) == Graphs(3) != Graphs(2)
