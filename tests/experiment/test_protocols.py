"""Protocols: their data, and the options that they fix."""

from __future__ import annotations

import pytest

import atoll
from atoll.core.errors import ConfigError
from atoll.experiment.protocols import PROTOCOLS, protocol

SMALL = {"data": "lagoon:nodes=150", "clients": 3, "rounds": 3}


def test_a_protocol_for_sets_of_graphs_refuses_one_graph() -> None:
    with pytest.raises(ConfigError) as caught:
        atoll.run("fedavg", protocol="gcfl", **SMALL)
    assert str(caught.value) == (
        "protocol 'gcfl' is for sets of graphs, but 'lagoon' is one graph; choose another protocol"
    )


def test_a_protocol_may_fix_the_data_for_all_seeds() -> None:
    one, two = (
        atoll.run("fedavg", data="lagoon:nodes=400", clients=2, rounds=1, protocol=p, seeds=2)
        for p in ("fedtad", "strict")
    )
    nodes = [[s.history.nodes.tolist() for s in run.seeds] for run in (one, two)]
    assert nodes[0][0] == nodes[0][1]
    assert nodes[1][0] != nodes[1][1]


def test_a_protocol_is_found_by_its_name() -> None:
    for name, rules in PROTOCOLS.items():
        assert protocol(name) is rules
        assert rules.name == name
    with pytest.raises(ConfigError, match="unknown protocol 'strct'; did you mean 'strict'"):
        protocol("strct")
