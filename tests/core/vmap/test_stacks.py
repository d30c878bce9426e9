"""The stacks behind `vmap`: the same numbers as torch's own way through its transforms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from atoll.core.fit import gradient
from atoll.core.random import _Keep, fold, make_key
from atoll.core.tree import tree_map
from atoll.core.vmap.stacks import call, current_batch, vmap_trees


def loss_of(x: Tensor, power: Tensor):
    def loss(params: dict[str, Tensor], key: Tensor) -> Tensor:
        return ((x @ params["w"]).tanh() * power + params["b"]).square().sum() + 0 * key

    return loss


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_all_clients_equal_those_of_the_transform(shared: bool) -> None:
    torch.manual_seed(0)
    x, power = torch.randn(5, 7, 3).double(), torch.rand(5).double()
    one = {"w": torch.randn(3, 2).double(), "b": torch.zeros(2).double()}
    params = one if shared else tree_map(lambda t: torch.stack([t * k for k in range(5)]), one)
    dims = (0, 0, None if shared else 0)

    def step(way):
        with torch.no_grad():
            return vmap(lambda x, p, params: way(loss_of(x, p), params), dims)(x, power, params)

    key = make_key(0)
    ours = step(lambda loss, params: gradient(loss, params, key))
    theirs = step(lambda loss, params: grad(loss)(params, key))
    for name in one:
        assert torch.allclose(ours[name], theirs[name], atol=1e-12)
        assert not ours[name].requires_grad


def test_a_parameter_that_the_loss_does_not_read_has_a_zero_gradient() -> None:
    params = {"used": torch.ones(4, 2), "unused": torch.ones(4, 3)}
    found = vmap(lambda p: gradient(lambda q, key: q["used"].sum(), p, make_key(0)))(params)
    assert torch.equal(found["used"], torch.ones(4, 2))
    assert torch.equal(found["unused"], torch.zeros(4, 3))


def test_gradients_inside_of_other_transforms_take_the_transform() -> None:
    def slope(x: Tensor) -> Tensor:
        return gradient(lambda p, key: (p**3).sum(), x, make_key(0)).sum()

    x = torch.tensor([1.0, 2.0])
    assert torch.equal(grad(slope)(x), 6 * x)
    assert torch.equal(vmap(grad(slope))(torch.stack([x, 2 * x])), torch.stack([6 * x, 12 * x]))


def test_calls_equal_torchs_own_apply() -> None:
    keys, rows = fold(make_key(1), torch.arange(3)), torch.arange(6, dtype=torch.int32)
    dropped, salt, width, dtype = 2**15, 7, 4, torch.float32

    def ours(key: Tensor) -> Tensor:
        return call(_Keep, key, rows, dropped, salt, width, dtype)

    def theirs(key: Tensor) -> Tensor:
        return _Keep.apply(key, rows, dropped, salt, width, dtype)

    assert torch.equal(vmap(ours)(keys), vmap(theirs)(keys))
    assert torch.equal(vmap(lambda key, x: ours(keys[0]) * x)(keys, keys), vmap(
        lambda key, x: theirs(keys[0]) * x)(keys, keys))  # fmt: skip


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (None, None)])
@pytest.mark.parametrize("inner", [0, 1])
def test_gradients_in_all_runs_and_clients(axes: tuple[int | None, int | None], inner: int) -> None:
    """A `vmap` of runs over clients, with parameters per pair, run or client, or for all."""
    draw = torch.Generator().manual_seed(3)
    shape = [size for size, axis in zip((2, 3), axes, strict=True) if axis is not None]
    start = {
        "w": torch.randn(*shape, 5, 4, generator=draw),
        "b": torch.randn(tuple(shape), generator=draw),
    }
    data, powers = torch.randn(2, 3, 6, 5, generator=draw), torch.rand(2, 3, generator=draw)
    data = data.movedim(1, 1 + inner)

    def every(slope):
        def one(params, x, power):
            return slope(loss_of(x, power), params, make_key(0))

        return vmap(vmap(one, (axes[1], inner, 0)), (axes[0], 0, 0))(start, data, powers)

    ours, theirs = every(gradient), every(lambda loss, *given: grad(loss)(*given))
    for name in start:
        assert ours[name].shape == (2, 3, *start[name].shape[len(shape) :])
        torch.testing.assert_close(ours[name], theirs[name])


def test_the_batch_is_seen_only_under_a_single_vmap() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(current_batch())
        return x * 2

    look(torch.ones(1))
    vmap(look)(torch.ones(4))
    vmap(vmap(look))(torch.ones(4, 3))
    grad(look)(torch.ones(()))
    assert [found is not None for found in seen] == [False, True, False, False]
    assert seen[1].batch_size == 4


def test_an_error_inside_leaves_the_transforms_in_order() -> None:
    def fails(x: Tensor) -> Tensor:
        return gradient(lambda p, key: p.reshape(99), x, make_key(0))

    with pytest.raises(RuntimeError, match="shape"):
        vmap(fails)(torch.ones(4, 2))
    assert current_batch() is None
    assert torch.equal(vmap(lambda x: x + 1)(torch.ones(2)), torch.full((2,), 2.0))


def test_trees_with_different_numbers_of_rows_cannot_be_mapped_together():
    with pytest.raises(ValueError, match="first axes are equal"):
        vmap_trees(lambda a, b: a, torch.zeros(2), [torch.zeros(3), None])
