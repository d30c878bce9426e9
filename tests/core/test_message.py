"""Messages: the same tree to all clients, or one row to each."""

from __future__ import annotations

import torch

from atoll.core.message import ToAll, ToEach

TREE = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.arange(3)}


def test_to_all_sends_the_tree_to_everybody():
    message = ToAll(TREE)
    assert message.for_one(0) is message.for_one(2) is TREE
    assert message.bytes_for_one(3) == 6 * 4 + 3 * 8


def test_to_each_sends_one_row():
    message = ToEach(TREE)
    assert message.for_one(1)["w"].tolist() == [2.0, 3.0]
    assert message.rows(torch.tensor([2, 0]))["b"].tolist() == [2, 0]
    assert message.bytes_for_one(3) == 2 * 4 + 8
