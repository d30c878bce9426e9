"""Products by oneDNN against `@`, with their derivatives, and under `vmap`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atoll.nn import dense, gin

Made = Callable[[Tensor, Tensor], Tensor]


def matrix(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float32)


def slopes(made: Made, *inputs: Tensor) -> list[Tensor]:
    """A result, and the derivatives of its squares' sum."""
    given = [part.clone().requires_grad_() for part in inputs]
    out = made(*given)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


def assert_close(ours: list[Tensor], plain: list[Tensor]) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the left sides of all products by oneDNN."""
    seen: list[tuple[int, ...]] = []
    linear = dense._onednn()
    if linear is None:
        pytest.skip("torch was built without oneDNN")

    def watched(x: Tensor, *rest: object) -> Tensor:
        seen.append(tuple(x.shape))
        return linear(x, *rest)

    monkeypatch.setattr(dense, "_onednn", lambda: watched)
    return seen


@pytest.mark.parametrize("relu", [False, True])
def test_a_large_layer_agrees_with_plain_torch(counted: list[tuple[int, ...]], relu: bool) -> None:
    inputs = matrix(600, 64), matrix(64, 64, number=1), matrix(64, number=2)

    def plain(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(a @ b + bias) if relu else a @ b + bias

    ours = slopes(lambda a, b, bias: dense.dense_layer(a, b, bias, relu), *inputs)
    assert_close(ours, slopes(plain, *inputs))
    assert counted == [(600, 64), (600, 64), (64, 600)]


def test_small_products_and_other_types_are_plain(counted: list[tuple[int, ...]]) -> None:
    a, b = matrix(600, 64), matrix(64, 64, number=1)
    assert torch.equal(dense.times(a[:9], b), a[:9] @ b)
    assert torch.equal(dense.times(a.double(), b.double()), a.double() @ b.double())
    assert torch.equal(dense.raw_product(a.double(), b.double()), a.double() @ b.double())
    assert torch.equal(dense.dense_layer(a[:9], b, b[0], relu=True), (a[:9] @ b + b[0]).relu())
    assert not counted
    assert_close([dense.raw_product(a, b)], [a @ b])
    assert counted == [(600, 64)]


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("by_column", [False, True])
def test_clients_at_once_agree_with_one_by_one(
    counted: list[tuple[int, ...]], dims: tuple[int | None, ...], by_column: bool
) -> None:
    a = matrix(3, 600, 64) if dims[0] == 0 else matrix(600, 64)
    b = matrix(3, 64, 80, number=1) if dims[1] == 0 else matrix(64, 80, number=1)
    b = b.mT.contiguous().mT if by_column else b
    bias = matrix(3, 80, number=2)

    def layer(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return dense.dense_layer(a, b, bias, relu=True)

    def plain(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(a @ b + bias.unsqueeze(1))

    ours = slopes(torch.func.vmap(layer, (*dims, 0)), a, b, bias)
    assert_close(ours, slopes(plain, a, b, bias))
    shared = slopes(torch.func.vmap(dense.times, dims), a, b)
    assert_close(shared, slopes(torch.matmul, a, b))
    assert counted


def test_rows_are_evened_with_zeros_where_shapes_may_change_often() -> None:
    h = matrix(600, 4)
    even = dense.evened(h)
    assert len(even) == 640
    assert torch.equal(even[:600], h)
    assert not even[600:].any()
    assert dense.evened(even) is even
    assert dense.evened(h[:100]).data_ptr() == h.data_ptr()


def test_layers_of_a_mini_batch_have_even_shapes(counted: list[tuple[int, ...]]) -> None:
    made = {"weight": matrix(64, 64, number=1), "bias": matrix(64, number=2)}
    h = matrix(600, 64).requires_grad_()
    out = gin._rectified(h, made, made)
    plain = h
    for _ in range(2):
        plain = torch.relu(plain @ made["weight"] + made["bias"])
    assert_close([out.detach()], [plain.detach()])
    (by_h,) = torch.autograd.grad(out.sum(), h)
    assert_close([by_h], [*torch.autograd.grad(plain.sum(), h)])
    assert counted == [(640, 64)] * 4
