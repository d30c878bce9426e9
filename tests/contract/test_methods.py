"""Every registered method keeps the contract."""

import pytest

from atoll.methods import METHODS
from atoll.testing import check_method


@pytest.mark.parametrize("name", METHODS)
def test_contract(name):
    check_method(METHODS[name])
