"""Sets of graphs joined by "+": a group of the user's own choice."""

from __future__ import annotations

import pytest

from atoll.core.errors import ConfigError
from atoll.data.load import load
from atoll.data.public.registry import GROUPS, sets_of_group, task_of_data


def test_names_joined_by_plus_are_a_group() -> None:
    assert sets_of_group("proteins+MUTAG") == ("PROTEINS", "MUTAG")
    assert sets_of_group("Molecules") == GROUPS["molecules"]
    assert task_of_data("PROTEINS+MUTAG:features=degree") == "graph"


@pytest.mark.parametrize(
    "name", ["PROTEINS", "cora+MUTAG", "PROTEINS+", "PROTEINS+nothing", "tu:A+B"]
)
def test_everything_else_is_not(name: str) -> None:
    assert sets_of_group(name) == ()


def test_a_set_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'PROTEINS\+MUTAGG'"):
        load("PROTEINS+MUTAGG")


@pytest.mark.data
def test_each_client_has_a_set_of_its_own(real_data) -> None:
    real_data("MUTAG")
    group, _ = load("MUTAG+PTC_MR:features=degree", root=real_data("PTC_MR"))
    assert [one.name for one in group.sets] == ["MUTAG", "PTC_MR"]
    assert group.name == "mutag+ptc_mr"
