"""Initial values have the ranges of the stock layers, and follow their key."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.core.random import fold, make_key
from atoll.nn.init import glorot, kaiming, kaiming_bias, linear, zeros


@pytest.mark.parametrize(
    ("draw", "bound", "shape"),
    [
        (glorot, math.sqrt(6 / 500), (300, 200)),
        (kaiming, 1 / math.sqrt(300), (300, 200)),
        (kaiming_bias, 1 / math.sqrt(300), (200,)),
    ],
)
def test_values_fill_their_range(draw, bound, shape):
    found = draw(make_key(0), 300, 200)
    assert found.shape == shape
    assert 0.95 * bound < found.abs().max() <= bound
    assert torch.equal(found, draw(make_key(0), 300, 200))
    assert not torch.equal(found, draw(make_key(1), 300, 200))


def test_layers_of_one_key_differ_by_their_names():
    key = make_key(0)
    first, second, alone = linear(key, 5, 4, 0), linear(key, 5, 4, 1), linear(key, 5, 4)
    assert not torch.equal(first["weight"], second["weight"])
    assert torch.equal(first["weight"], kaiming(fold(key, 0, "weight"), 5, 4))
    assert torch.equal(alone["bias"], kaiming_bias(fold(key, "bias"), 5, 4))
    assert not zeros(key, 3).any()
