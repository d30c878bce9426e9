"""Elementwise functions of whole trees: equal to each leaf's own, with and without `vmap`."""

from __future__ import annotations

import operator

import pytest
import torch

from atoll.core.aggregate import Adaptive
from atoll.core.optim import SGD
from atoll.core.vmap.leaves import Leaves, on_leaves
from atoll.core.vmap.stacks import vmap_trees

SHAPES = ((4, 3), (3,), (2, 1, 2), (1,))


def tree(seed: int, *front: int):
    draw = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(*front, *shape, generator=draw) for shape in SHAPES]
    return {"first": drawn[:2], "rest": (drawn[2], None, drawn[3])}


def flat(found):
    return [*found["first"], found["rest"][0], found["rest"][2]]


def mixture(p, g):
    return (p - 0.3 * g).lerp(g * g, 0.25) / ((g * g).sqrt() + 0.1) + p.sign() * 2.0


def test_each_leaf_gets_the_function():
    found = on_leaves(mixture, tree(1), tree(2))
    assert found["rest"][1] is None
    for one, p, g in zip(flat(found), flat(tree(1)), flat(tree(2)), strict=True):
        assert torch.equal(one, mixture(p, g))


def test_stacks_of_clients_and_of_runs():
    def clients(p, g):
        return vmap_trees(lambda p, g: on_leaves(mixture, p, g), p, g)

    def shared(p):
        return on_leaves(mixture, p, common)

    left, right, common = tree(1, 5, 3), tree(2, 5, 3), tree(3)  # 5 runs, 3 clients
    for found, other in (
        (vmap_trees(clients, left, right), right),
        (vmap_trees(lambda p: vmap_trees(shared, p), left), common),
    ):
        for one, p, g in zip(flat(found), flat(left), flat(other), strict=True):
            assert torch.equal(one, mixture(p, g))


def test_the_form_for_a_gpu_equals_the_tensors_arithmetic():
    p, g = flat(tree(1)), flat(tree(2))
    found = mixture(Leaves(p), Leaves(g)).tensors
    for one, own, other in zip(found, p, g, strict=True):
        torch.testing.assert_close(one, mixture(own, other), rtol=1e-6, atol=1e-7)
    for operation in (operator.add, operator.sub, operator.mul, operator.truediv):
        found = operation(Leaves(p), Leaves(g)).tensors
        assert all(map(torch.equal, found, map(operation, p, g)))


@pytest.mark.parametrize("optimizer", ["adam", "yogi", "adagrad", "sgd"])
def test_a_step_in_the_form_for_a_gpu(optimizer, monkeypatch):
    def all_at_once(function, *trees, numbers=()):
        return {"w": function(*(Leaves(one["w"]) for one in trees)).tensors}

    rule = Adaptive(optimizer, lr=0.2, beta1=0.5)
    params, grads = ({"w": flat(tree(number))} for number in (1, 2))
    state, sgd = rule.init(params), SGD(lr=0.2, weight_decay=0.1, momentum=0.5)
    usual = *rule.step(grads, state), *sgd.update(grads, params, sgd.init(params))
    monkeypatch.setattr("atoll.core.aggregate.on_leaves", all_at_once)
    monkeypatch.setattr("atoll.core.optim.on_leaves", all_at_once)
    found = *rule.step(grads, state), *sgd.update(grads, params, sgd.init(params))
    pairs = [(usual[0], found[0]), (usual[1].mean, found[1].mean), (usual[2], found[2])]
    if optimizer != "sgd":
        pairs.append((usual[1].square, found[1].square))
    for one, other in pairs:
        for a, b in zip(one["w"], other["w"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_tree_without_tensors_stays_as_it_is():
    assert on_leaves(operator.add, [None], [None]) == [None]


def test_leaves_of_the_same_place_meet():
    p = {"a": torch.zeros(2), "b": torch.full((2,), 10.0)}
    g = {"b": torch.full((2,), 5.0), "a": torch.ones(2)}  # a method may rebuild a dict
    found = SGD(lr=1.0).update(g, p, SGD(lr=1.0).init(p))[0]
    assert found["a"].tolist() == [-1, -1]
    assert found["b"].tolist() == [5, 5]
    for other in ([torch.ones(2), torch.ones(2)], {"a": torch.ones(2)}, {**g, "c": torch.ones(2)}):
        with pytest.raises(ValueError, match=r"."):
            on_leaves(operator.sub, p, other)


def test_a_step_can_be_differentiated():
    def after(p):  # two steps on |p|²
        for _ in range(2):
            (p,), _ = SGD(lr=0.1).update([2 * p], [p], SGD(lr=0.1).init([p]))
        return p.square().sum()

    start = torch.tensor([1.0, 2.0])
    expected = 2 * 0.8**4 * start
    torch.testing.assert_close(torch.func.grad(after)(start), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(after))(start[None]), expected[None])
    tracked = start.clone().requires_grad_()
    after(tracked).backward()
    torch.testing.assert_close(tracked.grad, expected)
