"""Federations that several runs share: made once, found by what decides them, kept in bounds."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

import atoll
from atoll.core.tree import num_bytes
from atoll.experiment.config import make_config
from atoll.experiment.federation_cache import TRAINING, FederationCache
from atoll.experiment.problem import Divide, Division, Problem
from atoll.experiment.run import RunPlan

SMALL = {"data": "lagoon:nodes=150", "clients": 3, "rounds": 2}


def get(federations: Divide, seed: int = 0, **options: Any) -> Division:
    return federations(Problem.of(make_config(**{**SMALL, **options})), seed)


def test_another_method_finds_the_same_clients_and_keeps_its_own_configuration() -> None:
    shared = FederationCache()
    first = get(shared, method="fedavg", set={"hidden": 8})
    second = get(shared, method="fedprox", rounds=5, seeds=1, set={"mu": 1.0}, device="cpu")
    assert second.federation is first.federation
    assert shared.made == 1
    assert second.config == get(Problem.divide, method="fedprox", rounds=5, set={"mu": 1.0},
                            device="cpu").config  # fmt: skip


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
    shared = FederationCache()
    first = get(shared).federation
    other = get(shared, **options).federation
    assert shared.made == 2
    assert other is not first
    plain = get(Problem.divide, **options).federation
    pairs = zip(plain.graphs, other.graphs, strict=True)
    assert all(torch.equal(a.ids, b.ids) and torch.equal(a.train, b.train) for a, b in pairs)


def test_a_protocol_with_fixed_data_makes_them_once_for_all_seeds() -> None:
    shared = FederationCache()
    options = {"data": "lagoon:nodes=150", "protocol": "fedtad", "partition": "column:owner"}
    assert get(shared, 0, **options).federation is get(shared, 1, **options).federation
    assert shared.made == 1


def test_only_what_trains_is_left_out_of_the_key() -> None:
    unknown = set(TRAINING) - set(make_config().__struct_fields__)
    assert not unknown


def test_full_memory_lets_other_data_go_but_keeps_the_first_seeds() -> None:
    size = sum(num_bytes(graph) for graph in get(Problem.divide).federation.graphs)
    shared = FederationCache(limit=int(2.5 * size))
    for _ in range(2):
        for seed in range(3):  # the third does not fit, and the first two stay
            get(shared, seed)
    assert shared.made == 4
    get(shared, 0, clients=2)  # makes room for itself
    get(shared, 0, clients=2)
    assert shared.made == 5
    nothing = FederationCache(limit=0)
    get(nothing)
    get(nothing)
    assert nothing.made == 2


def test_shared_clients_give_the_numbers_of_a_run_of_its_own() -> None:
    shared = FederationCache()
    for method in ("fedath", "fedgta"):
        config = make_config(**SMALL, method=method, seeds=2)
        alone, together = RunPlan(config).run(), RunPlan(config, divide=shared).run()
        assert together.metrics() == alone.metrics()
        assert together.config == alone.config
    assert shared.made == 2


def test_an_object_is_found_again_and_another_one_is_not() -> None:
    shared = FederationCache()
    one, two = (atoll.load("lagoon:nodes=150", clients=3, seed=seed) for seed in (0, 1))
    config = make_config(objects=["data"], data="lagoon")
    first = shared(Problem.of(config, one), 0)
    assert shared(Problem.of(config, one), 0).federation is first.federation
    assert shared(Problem.of(config, two), 0).federation is not first.federation
    assert shared.made == 2


def test_a_cache_may_change_what_it_keeps() -> None:
    def only_two(problem: Problem, seed: int) -> Division:
        made = problem.divide(seed)
        return replace(made, federation=made.federation.reordered([1, 0]))

    shared = FederationCache(make=only_two)
    assert get(shared).federation.numbers == (1, 0)
    smaller = shared.with_limit(0)
    assert get(smaller).federation.numbers == (1, 0)
    assert (smaller.limit, shared.limit > 0) == (0, True)


def test_another_process_gets_an_empty_cache() -> None:
    shared = FederationCache(limit=1 << 30)
    get(shared)
    other = pickle.loads(pickle.dumps(shared))
    assert (other.limit, other.made) == (1 << 30, 0)
    get(other)
    assert other.made == 1
