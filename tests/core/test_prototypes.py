"""Class prototypes: the golden numbers of FedProto's card for pulls and inference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from atoll.core.losses import class_means
from atoll.core.prototypes import nearness, pull
from atoll.testing import double_precision


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


Z, Y = [[1.0, 1], [0, 1], [2, 0]], [0, 0, 1]
GLOBAL = [[2.0, 1], [0, 2]]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("nodes", 2.166667), ("classes", 5.25), ("prototypes", 4.328427), ("means", 2.164214)],
)
def test_golden_pull(kind: str, expected: float) -> None:
    given = torch.tensor(Z), torch.tensor(Y), torch.ones(3)
    found = pull(*given, torch.tensor(GLOBAL), torch.ones(2), kind)
    assert float(found) == pytest.approx(expected, abs=1e-6)
    # Rows outside of the mask do not count, and a third class without rows changes nothing.
    padded = torch.cat([given[0], torch.full((2, 2), 9.0)]), torch.tensor([*Y, 0, 2])
    wider = torch.tensor([*GLOBAL, [5.0, 5]])
    mask = torch.tensor([1.0, 1, 1, 0, 0])
    found = pull(*padded, mask, wider, torch.ones(3), kind)
    assert float(found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("nodes", 5 / 6), ("classes", 1.25), ("prototypes", 1.5), ("means", 1.5)],
)
def test_a_class_without_prototype_pulls_nobody(kind: str, expected: float) -> None:
    known = torch.tensor([1.0, 0.0])
    found = pull(torch.tensor(Z), torch.tensor(Y), torch.ones(3), torch.tensor(GLOBAL), known, kind)
    assert float(found) == pytest.approx(expected)


def test_golden_inference() -> None:
    near = nearness(torch.tensor(Z), torch.tensor(GLOBAL), torch.ones(2))
    assert near.argmax(-1).tolist() == [0, 1, 0]
    only = nearness(torch.tensor(Z), torch.tensor(GLOBAL), torch.tensor([0.0, 1.0]))
    assert only.argmax(-1).tolist() == [1, 1, 1]


def test_a_sole_owner_has_a_finite_gradient_at_its_own_prototype() -> None:
    z = torch.tensor(Z, requires_grad=True)
    own, _ = class_means(z.detach(), torch.tensor(Y), torch.ones(3), 2)
    pull(z, torch.tensor(Y), torch.ones(3), own, torch.ones(2), "prototypes").backward()
    assert z.grad is not None
    assert not z.grad.any()
