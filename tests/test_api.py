"""The Python face: load, partition, save, and the plot of a result."""

from __future__ import annotations

import pytest

import atoll
from atoll.core.errors import ConfigError


def test_a_source_is_divided_as_a_run_would() -> None:
    owned = atoll.load("lagoon:nodes=200", clients=3)
    assert len(atoll.partition(owned)) == 3  # one client for each owner
    assert len(atoll.partition(owned, "louvain")) == 5  # protocol strict
    assert len(atoll.partition(atoll.load("archipelago", clients=4))) == 4


def test_a_federation_is_divided_once(tmp_path) -> None:
    made = atoll.partition(atoll.load("lagoon:nodes=200"), "random", clients=2)
    again = atoll.load(str(atoll.save(made, tmp_path / "two.atoll")))
    assert repr(again) == repr(made)
    with pytest.raises(ConfigError, match="is a federation, divided already"):
        atoll.partition(again)


def test_a_result_draws_itself() -> None:
    pytest.importorskip("matplotlib")
    result = atoll.run("local", data="lagoon:nodes=200", clients=2, rounds=1, set={"hidden": 4})
    assert result.plot("clients").axes
    with pytest.raises(ConfigError, match="convergence"):
        result.plot("nothing")
