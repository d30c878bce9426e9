"""Work at used slots equals work at all slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.fit import gradient
from atoll.core.random import make_key
from atoll.core.tree import Tree, leaves, structure
from atoll.nn.neighgen_slots import used_places
from atoll.testing import double_precision


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double_precision():
        yield


def close(a: Tree, b: Tree, tolerance: float = 1e-12) -> None:
    assert structure(a) == structure(b)
    for one, other in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def test_places_of_several_clients() -> None:
    """Against the same on all slots: products, gradients, sums, and where rows go."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([[2, 0, 1, 3, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    used = (torch.arange(4) < counts.unsqueeze(-1)).double()
    h, weight, bias, out = (
        torch.randn(3, *shape, generator=generator)
        for shape in ((5, 6), (6, 4 * 7), (4 * 7,), (7, 2))
    )

    def few(used: Tensor, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        places = used_places(used)
        assert places is not None
        assert places.sizes == (4, 2, 1)
        assert places.counts == ((3, 2, 1), (0, 0, 0), (4, 0, 0))

        def loss(params: Tree, key: Tensor) -> Tensor:
            weight, bias, out = params
            made = places.tanh_layer(h[places.nodes], weight, bias)
            heard = places.onto(places.node_product(places.summed(made), out))
            return places.spread(places.product(made, out)).sin().sum() + heard.cos().sum()

        return gradient(loss, rest, key)

    def every(used: Tensor, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        def loss(params: Tree) -> Tensor:
            weight, bias, out = params
            made = torch.tanh(h @ weight + bias).reshape(5, 4, 7) * used.unsqueeze(-1)
            return (made @ out).sin().sum() + (made.sum(1) @ out).cos().sum()

        return torch.func.grad(loss)(rest)

    key = make_key(0)
    given = (used, h, weight, bias, out)
    close(torch.func.vmap(few)(*given), torch.func.vmap(every)(*given))


def test_shapes_do_not_depend_on_numbers_that_cannot_be_read() -> None:
    used = torch.ones(3, 2)
    assert used_places(used) is not None
    seen: list[Any] = []
    torch.func.grad(lambda x: (seen.append(used_places(used * x.detach())), x.sum())[1])(used)
    assert seen == [None]
