"""Functional optimizers against `torch.optim`, for one client and for many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from atoll.core.fit import fit, minimise
from atoll.core.graph import Graph
from atoll.core.optim import SGD, Adam, Optimizer, pull
from atoll.core.random import fold, make_key, normal
from atoll.core.tree import Tree, leaves, stack, take, tree_map
from atoll.testing import small_federation

STEPS = 20
OPTIMIZERS: dict[str, tuple[Optimizer, Any]] = {
    "adam": (Adam(weight_decay=0.0), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam with decay": (
        Adam(lr=0.03, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.03, weight_decay=0.1),
    ),
    "adam, all settings": (
        Adam(lr=0.02, weight_decay=0.01, beta1=0.8, beta2=0.95, eps=1e-3),
        lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.01, betas=(0.8, 0.95), eps=1e-3),
    ),
    "sgd": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd with decay": (
        SGD(lr=0.1, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2),
    ),
    "sgd with momentum": (
        SGD(lr=0.1, weight_decay=0.2, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2, momentum=0.9),
    ),
}
optimizers = pytest.mark.parametrize("name", list(OPTIMIZERS))
ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-14}


def draw(seed: int, *, dtype: torch.dtype = torch.float64, label: str = "start") -> Tree:
    """A tree with a matrix, a vector, a scalar and a tensor without numbers."""
    key = fold(make_key(seed), label)
    shapes = {"weight": (3, 2), "bias": (2,), "scale": (), "none": (0, 2)}
    made = {n: normal(fold(key, n), shape, dtype) for n, shape in shapes.items()}
    return [{"weight": made["weight"], "bias": made["bias"]}, (made["scale"], made["none"])]


def slope(step: int, client: int = 0, dtype: torch.dtype = torch.float64) -> Tree:
    return draw(1000 * client + step, dtype=dtype, label="slope")


def batched(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """`vmap`, for trees that may hold None (plain SGD keeps nothing)."""

    def run(*trees: Tree) -> Tree:
        flat, spec = pytree.tree_flatten(trees)
        shapes = []

        def on_tensors(*tensors: Tensor) -> list[Tensor]:
            given = iter(tensors)
            whole = [None if leaf is None else next(given) for leaf in flat]
            out, out_spec = pytree.tree_flatten(function(*pytree.tree_unflatten(whole, spec)))
            shapes.append(([leaf is None for leaf in out], out_spec))
            return [leaf for leaf in out if leaf is not None]

        out = iter(vmap(on_tensors)(*[leaf for leaf in flat if leaf is not None]))
        empty, out_spec = shapes[0]
        filled = [None if is_none else next(out) for is_none in empty]
        return pytree.tree_unflatten(filled, out_spec)

    return run


def assert_close(ours: Tree, plain: Tree, tolerance: float) -> None:
    for one, other in zip(leaves(ours), leaves(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@optimizers
def test_twenty_steps_equal_torch(name, dtype):
    ours, make = OPTIMIZERS[name]
    params = draw(1, dtype=dtype)
    twins = [torch.nn.Parameter(leaf.clone()) for leaf in leaves(params)]
    torchs, state = make(twins), ours.init(params)
    for step in range(STEPS):
        grads = slope(step, dtype=dtype)
        for twin, g in zip(twins, leaves(grads), strict=True):
            twin.grad = g.clone()
        torchs.step()
        params, state = ours.update(grads, params, state, owned=step % 2 == 1)
        assert_close(params, [twin.detach() for twin in twins], ROUNDING[dtype])
    assert all(leaf.dtype == dtype for leaf in leaves(params))


@pytest.mark.parametrize("owned", [False, True])
@optimizers
def test_clients_of_different_age_equal_the_loop(name, owned):
    # Client k has taken 7k steps before they are stacked; Adam's bias correction must know it.
    ours, _ = OPTIMIZERS[name]
    alone = []
    for client in range(3):
        params = draw(client)
        state = ours.init(params)
        for step in range(7 * client):
            params, state = ours.update(slope(step, client), params, state)
        alone.append((params, state))
    params, state = stack(alone)
    update = batched(lambda g, p, s: ours.update(g, p, s, owned=owned))
    for step in range(30, 33):
        grads = [slope(step, client) for client in range(3)]
        params, state = update(stack(grads), params, state)
        alone = [ours.update(g, *one) for g, one in zip(grads, alone, strict=True)]
    for client in range(3):
        assert_close(take((params, state), client), alone[client], 1e-14)
    if isinstance(ours, Adam):
        assert state.steps.tolist() == [3, 10, 17]


@optimizers
def test_a_model_that_all_clients_share_is_a_start_for_each(name):
    ours, _ = OPTIMIZERS[name]
    shared = draw(1)
    many = [slope(step) for step in range(3)]

    def first_two(g: Tree) -> tuple[Tree, Tree]:
        params, state = ours.update(g, shared, ours.init(shared))
        return ours.update(g, params, state, owned=True)

    params, state = batched(first_two)(stack(many))
    assert_close(shared, draw(1), 0)
    for client, g in enumerate(many):
        one = ours.update(g, *ours.update(g, shared, ours.init(shared)))
        assert_close(take((params, state), client), one, 1e-14)


@pytest.mark.parametrize("many", [False, True])
@optimizers
def test_training_never_touches_what_it_was_given(name, many):
    ours, _ = OPTIMIZERS[name]
    params = draw(1)
    _, state = ours.update(slope(0), params, ours.init(params))
    given_trees = stack([(params, state)] * 2) if many else (params, state)
    before = tree_map(torch.clone, given_trees)

    def train(params: Tree, state: Tree) -> tuple[Tree, Tree]:
        return minimise(lambda p, _: size(p), params, ours, state, 4, make_key(0))

    after = (batched(train) if many else train)(*given_trees)
    assert_close(given_trees, before, 0)
    assert not torch.equal(leaves(after)[0], leaves(before)[0])


@optimizers
def test_an_update_that_owns_nothing_leaves_its_inputs_alone(name):
    ours, _ = OPTIMIZERS[name]
    params = stack([draw(1), draw(2)])
    state = batched(ours.init)(params)
    grads = stack([slope(1), slope(2)])
    before = tree_map(torch.clone, (grads, params, state))
    batched(ours.update)(grads, params, state)
    assert_close((grads, params, state), before, 0)


@optimizers
def test_training_many_equals_training_each_with_and_without_a_state(name):
    ours, _ = OPTIMIZERS[name]
    many = [draw(k) for k in range(3)]
    keys = fold(make_key(3), torch.arange(3))

    def loss(p: Tree, key: Tensor) -> Tensor:
        return size(tree_map(lambda leaf: leaf - normal(key, (1,), torch.float64)[0], p))

    def train(p: Tree, key: Tensor) -> tuple[Tree, Tree]:
        first = minimise(loss, p, ours, None, 3, fold(key, "first"))
        return minimise(loss, first[0], ours, first[1], 2, fold(key, "second"))

    together = batched(train)(stack(many), keys)
    for k in range(3):
        assert_close(take(together, k), train(many[k], keys[k]), 1e-14)


def size(params: Tree) -> Tensor:
    return torch.stack([(leaf**2).sum() for leaf in leaves(params)]).sum()


def test_fit_gives_every_epoch_its_own_key_and_adjusts_the_gradient():
    seen, adjusted = [], []

    def loss(p: Tensor, graph: Graph, key: Tensor) -> Tensor:
        seen.append(int(key))
        return 3 * p

    def adjust(g: Tensor, p: Tensor) -> Tensor:
        adjusted.append((float(g), float(p)))
        return g - 1

    params, state = fit(
        loss,
        torch.tensor(1.0),
        SGD(lr=0.5),
        None,
        3,
        make_key(0),
        small_federation().graphs[0],
        adjust,
    )
    assert float(params) == pytest.approx(1 - 3 * 0.5 * 2)
    assert adjusted == [(3.0, 1.0), (3.0, 0.0), (3.0, -1.0)]
    assert len(set(seen)) == 3
    assert state.velocity is None


def test_no_epoch_changes_nothing_and_starts_a_state():
    params = torch.tensor([1.0])
    after, state = minimise(lambda p, _: p.sum(), params, Adam(), None, 0, make_key(0))
    assert torch.equal(after, params)
    assert float(state.steps) == 0


H, A, START = torch.tensor([1.0, 4.0]), torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.5])


def quadratic(w: Tensor, _: Tensor) -> Tensor:
    """Its gradient is H (w - a)."""
    return (H * (w - A) ** 2).sum() / 2


def golden(start: Tensor, state: Tree) -> tuple[Tensor, Tree]:
    return minimise(quadratic, start, Adam(lr=0.01, weight_decay=5e-4), state, 3, make_key(0))


def test_adam_on_a_quadratic_by_hand():
    # methods/baselines/local.md
    torch.testing.assert_close(grad(quadratic)(START, START), H * (START - A))
    three, state = golden(START, None)
    six, _ = golden(three, state)
    anew, _ = golden(three, None)
    assert three.tolist() == pytest.approx([0.529979, 0.470004], abs=1e-6)
    assert six.tolist() == pytest.approx([0.559832, 0.440030], abs=1e-6)
    assert anew.tolist() == pytest.approx([0.559956, 0.440008], abs=1e-6)


def test_one_adam_step_by_hand():
    # m = 0.1 g, v = 0.001 g^2; corrected by 1 - 0.9 and 1 - 0.999 both are g and g^2 again.
    params, state = Adam(lr=0.1, weight_decay=0.5).update(
        torch.tensor([1.0], dtype=torch.float64),
        torch.tensor([2.0], dtype=torch.float64),
        Adam().init(torch.tensor([2.0], dtype=torch.float64)),
    )
    assert float(params) == pytest.approx(2 - 0.1 * 2 / (2 + 1e-8), rel=1e-12)
    assert float(state.mean) == pytest.approx(0.2)
    assert float(state.square) == pytest.approx(0.004)
    assert float(state.steps) == 1


def test_pull_adds_the_proximal_term_with_and_without_vmap():
    draw = torch.Generator().manual_seed(0)
    grads, params, start = (
        [torch.randn(3, *shape, generator=draw) for shape in ((4, 2), (5,))] for _ in range(3)
    )
    expected = [g + 0.3 * (w - s) for g, w, s in zip(grads, params, start, strict=True)]
    for found in (
        pull(grads, params, start, 0.3),
        torch.func.vmap(lambda *trees: pull(*trees, 0.3))(grads, params, start),
    ):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    shared = torch.func.vmap(lambda g, w: pull(g, w, [s[0] for s in start], 0.3))(grads, params)
    for one, g, w, s in zip(shared, grads, params, start, strict=True):
        torch.testing.assert_close(one, g + 0.3 * (w - s[0]))


def test_pull_changes_nothing_before_the_parameters_move():
    grads, params = [torch.ones(3)], [torch.randn(3)]
    assert pull(grads, params, params, 0.3) is grads
