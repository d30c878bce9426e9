"""The list of methods: names, papers and what each module says."""

from __future__ import annotations

import sys

import pytest

from atoll.core.errors import ConfigError
from atoll.methods import METHODS, FedAvg, method_class


def test_methods_are_found_by_name_whatever_the_case():
    assert method_class("FedAvg") is METHODS["fedavg"] is FedAvg
    with pytest.raises(ConfigError, match=r"unknown method 'fedporx'; did you mean 'fedprox'\?"):
        method_class("fedporx")


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_has_a_paper_and_a_wire_line(name):
    cls = METHODS[name]
    text = sys.modules[cls.__module__].__doc__ or ""
    assert cls.paper
    assert cls.deployed in ("global", "personalised")
    for line in ("Wire, per client and round:", "Private state:", "Departures from the reference"):
        assert line in text
