"""Every registered method keeps the contract."""

from functools import partial

import pytest

from atoll.methods import METHODS
from atoll.testing import check_method

# The same steps, a few times instead of very many.
SHORTER = {"fedsage+": {"generator_epochs": 2, "exchanges": 2, "wide": 8}}
# Their later rounds differ from the first two. For others, the second reads all from the first.
THREE_ROUNDS = ("adafgl", "fedsage+", "gcfl")


@pytest.mark.parametrize("name", METHODS)
def test_contract(name):
    method = METHODS[name]
    make = partial(method, **SHORTER[name]) if name in SHORTER else method
    check_method(make, rounds=3 if name in THREE_ROUNDS else 2)
