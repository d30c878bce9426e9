"""Federations that several runs share: made once, found by what decides them, kept in bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.core.tree import num_bytes
from atoll.experiment.config import make_config, resolve
from atoll.experiment.problem import make_federation
from atoll.experiment.run import run_config
from atoll.studies.federations import TRAINING, Federations, Made

SMALL = {"data": "lagoon:nodes=150", "clients": 3, "rounds": 2}


def get(federations: Any, seed: int = 0, **options: Any) -> Made:
    asked = make_config(**{**SMALL, **options})
    config, rules = resolve(asked)
    return federations(config, rules, seed, None, asked)


def test_another_method_finds_the_same_clients_and_keeps_its_own_configuration() -> None:
    shared = Federations()
    first = get(shared, method="fedavg", set={"hidden": 8})
    second = get(shared, method="fedprox", rounds=5, seeds=1, set={"mu": 1.0}, device="cpu")
    assert second[0] is first[0]
    assert shared.made == 1
    assert second[2] == get(make_federation, method="fedprox", rounds=5, set={"mu": 1.0},
                            device="cpu")[2]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"clients": 2}, {"data": "lagoon:nodes=160"}, {"partition": "random"}, {"split": "random"},
        {"protocol": "fedtad"}, {"ratios": (0.5, 0.2, 0.3)}, {"allow": ("no-edge",)}, {"seed": 1},
        {"data_root": "elsewhere"},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_decides_the_clients_tells_them_apart(options: dict[str, Any]) -> None:
    shared = Federations()
    first = get(shared)[0]
    other = get(shared, **options)[0]
    assert shared.made == 2
    assert other is not first
    plain = get(make_federation, **options)[0]
    pairs = zip(plain.graphs, other.graphs, strict=True)
    assert all(torch.equal(a.ids, b.ids) and torch.equal(a.train, b.train) for a, b in pairs)


def test_a_protocol_with_fixed_data_makes_them_once_for_all_seeds() -> None:
    shared = Federations()
    options = {"data": "lagoon:nodes=150", "protocol": "fedtad", "partition": "column:owner"}
    assert get(shared, 0, **options)[0] is get(shared, 1, **options)[0]
    assert shared.made == 1


def test_only_what_trains_is_left_out_of_the_key() -> None:
    unknown = set(TRAINING) - set(make_config().__struct_fields__)
    assert not unknown


def test_full_memory_lets_other_data_go_but_keeps_the_first_seeds() -> None:
    size = sum(num_bytes(graph) for graph in get(make_federation)[0].graphs)
    shared = Federations(limit=int(2.5 * size))
    for _ in range(2):
        for seed in range(3):  # the third does not fit, and the first two stay
            get(shared, seed)
    assert shared.made == 4
    get(shared, 0, clients=2)  # makes room for itself
    get(shared, 0, clients=2)
    assert shared.made == 5
    nothing = Federations(limit=0)
    get(nothing)
    get(nothing)
    assert nothing.made == 2


def test_shared_clients_give_the_numbers_of_a_run_of_its_own() -> None:
    shared = Federations()
    for method in ("fedath", "fedgta"):
        config = make_config(**SMALL, method=method, seeds=2)
        alone, together = run_config(config), run_config(config, divide=shared)
        assert together.metrics() == alone.metrics()
        assert together.config == alone.config
    assert shared.made == 2
