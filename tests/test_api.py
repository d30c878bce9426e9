"""The Python API: load, partition as in a run, save, and plot a result."""

from __future__ import annotations

from functools import partial

import pytest

import atoll
from atoll.core.errors import ConfigError
from tests.experiment.own_graphs import divided_by_run, ids, write_own
from tests.experiment.test_run import group, rings


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: atoll.load("lagoon:nodes=300"),
        lambda folder: atoll.load("lagoon:nodes=300", clients=3),
        lambda folder: atoll.load("archipelago", clients=4),
        lambda folder: atoll.load(write_own(folder)),
        lambda folder: atoll.load(write_own(folder, "client")),
        lambda folder: rings(200, 3, 0),
        lambda folder: group(),
    ],
    ids=["lagoon", "lagoon of three", "archipelago", "owner", "client", "set", "group"],
)
def test_partition_and_run_divide_alike(tmp_path, make):
    source = make(tmp_path)
    assert divided_by_run(tmp_path / "run", source) == ids(atoll.partition(source))


def test_a_graph_without_owners_is_divided_alike(tmp_path):
    source = atoll.load(write_own(tmp_path, "shop"))
    federation = atoll.partition(source, clients=3)
    assert federation.about["partition"] == "louvain"
    assert divided_by_run(tmp_path / "run", source, clients=3) == ids(federation)


def test_another_number_than_that_of_the_owners_is_refused_alike():
    source = atoll.load("lagoon:nodes=300")
    for action in (
        lambda: atoll.partition(source, clients=3),
        lambda: atoll.run("fedavg", source, clients=3, rounds=1),
    ):
        with pytest.raises(ConfigError, match="has 5 values, so it gives 5 clients, not 3"):
            action()


def test_a_source_is_divided_as_a_run_would() -> None:
    owned = atoll.load("lagoon:nodes=200", clients=3)
    assert len(atoll.partition(owned)) == 3  # one client for each owner
    assert len(atoll.partition(owned, "louvain")) == 5  # protocol strict
    assert len(atoll.partition(atoll.load("archipelago", clients=4))) == 4


def test_a_federation_is_divided_once(tmp_path) -> None:
    made = atoll.partition(atoll.load("lagoon:nodes=200"), "random", clients=2)
    again = atoll.load(str(atoll.save(made, tmp_path / "two.atoll")))
    assert repr(again) == repr(made)
    with pytest.raises(ConfigError, match="is already a divided federation"):
        atoll.partition(again)


@pytest.mark.parametrize("recipe", [None, "louvain"])
@pytest.mark.parametrize("clients", [0, -1])
def test_a_number_of_clients_below_one_is_refused(recipe: str | None, clients: int) -> None:
    source = atoll.load("lagoon:nodes=200")
    with pytest.raises(
        ConfigError, match=f"^clients is {clients}; give a whole number of at least"
    ):
        atoll.partition(source, recipe, clients=clients)


CALLS = (atoll.run, atoll.tune, partial(atoll.compare, against="fedavg"))


@pytest.mark.parametrize("call", CALLS, ids=["run", "tune", "compare"])
def test_data_that_are_no_data_and_an_empty_folder_are_refused(call, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^data cannot be None; give a name or path as text, or"):
        call("fedavg", None)
    with pytest.raises(ConfigError, match=r"of type \w*Path; give a name or path as text"):
        call("fedavg", tmp_path)
    with pytest.raises(ConfigError, match=r"^out is empty; give a path$"):
        call("fedavg", "lagoon", out="", rounds=1)
    assert list(tmp_path.iterdir()) == []


def test_a_result_draws_itself() -> None:
    pytest.importorskip("matplotlib")
    result = atoll.run("local", data="lagoon:nodes=200", clients=2, rounds=1, set={"hidden": 4})
    assert result.plot("clients").axes
    with pytest.raises(ConfigError, match="convergence"):
        result.plot("nothing")
