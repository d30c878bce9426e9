"""Packing communities into clients."""

from __future__ import annotations

import numpy as np

from atoll.data.partition.packing import (
    PackingRule,
    cut,
    mistaken_smallest,
    pack,
    smallest,
    stay,
    top_up,
)


def test_cut_keeps_the_first_and_appends_the_rest():
    pieces = cut([np.arange(5), np.arange(5, 7)], 2)
    assert [piece.tolist() for piece in pieces] == [[0, 1], [5, 6], [2, 3], [4]]


def test_who_takes_a_group_that_fits_nowhere():
    sizes, everyone = np.array([5, 3, 9]), np.arange(3)
    assert smallest(sizes, everyone, 2) == 1
    assert stay(sizes, everyone, 2) == 2
    assert mistaken_smallest(sizes, everyone, 0) == 2  # 1001 steps on, the cursor is on the 9


def test_pack_stays_on_the_client_until_it_is_full():
    groups = [np.arange(3), np.arange(3, 5), np.arange(5, 7), np.arange(7, 8)]
    rule = PackingRule(piece=4, room=5, full=4, no_room=smallest)
    assert [ids.tolist() for ids in pack(groups, 2, rule)] == [[0, 1, 2, 3, 4], [5, 6, 7]]


def test_top_up_shares_the_largest_and_leaves_the_others():
    parts = top_up([np.arange(5), np.empty(0, int), np.arange(5, 8)])
    assert [ids.tolist() for ids in parts] == [[0, 1, 2], [3, 4], [5, 6, 7]]
