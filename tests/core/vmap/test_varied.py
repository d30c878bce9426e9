"""A number of each run behaves as one number, and refuses what only one number can do."""

from __future__ import annotations

import pytest
import torch

from atoll.core.optim import Adam
from atoll.core.vmap.varied import Undecided, is_zero, points
from atoll.methods import FedAvg, FedProx
from atoll.nn import GCN
from atoll.testing import CLASSES, FEATURES

NET = GCN(FEATURES, CLASSES, hidden=5)


def test_what_has_no_value_of_its_own_says_so() -> None:
    grid = points([FedProx(NET, mu=mu) for mu in (0.1, 0.2)])

    def inside(row):
        mu = grid.at(row).mu
        assert mu
        assert mu < 1
        assert mu != 3
        with pytest.raises(Undecided, match="mu decides"):
            bool(mu > 0.15)
        with pytest.raises(Undecided, match="one plain number"):
            float(mu)
        with pytest.raises(Undecided, match="part of a key"):
            hash(grid.at(row))
        return (torch.ones(2) * mu).sum() + (1 - mu) / 2 * torch.ones(()), 2**mu * torch.ones(3)

    numbers = grid.tensor(torch.device("cpu"))
    total, power = torch.func.vmap(inside)(numbers)
    assert total.dtype == power.dtype == torch.float32
    torch.testing.assert_close(total, torch.tensor([0.65, 0.8]))
    with pytest.raises(Undecided, match="as a constant"):
        torch.ones(2) * grid.at(numbers[0]).mu


def test_points_are_the_numbers_in_which_nested_dataclasses_differ() -> None:
    grid = points([FedAvg(NET, Adam(lr=lr, eps=1e-8)) for lr in (0.1, 0.2)])
    assert grid.paths == (("optimizer", "lr"),)
    assert grid.values == ((0.1,), (0.2,))
    assert points([FedAvg(NET)] * 2).tensor(torch.device("cpu")) is None
    with pytest.raises(Undecided, match="they differ in epochs"):
        points([FedAvg(NET, epochs=number) for number in (1, 2)])


def test_a_number_is_zero_only_where_all_runs_agree() -> None:
    def zero(values: tuple[float, float]) -> bool:
        grid = points([FedProx(NET, mu=mu) for mu in values])
        found: list[bool] = []
        torch.func.vmap(lambda row: found.append(is_zero(grid.at(row).mu)) or row)(
            grid.tensor(torch.device("cpu"))
        )
        return found[0]

    assert not zero((0.0, 0.1))
    assert is_zero(0.0)
    assert not is_zero(0.5)
