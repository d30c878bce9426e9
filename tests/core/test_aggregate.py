"""Aggregation: golden numbers, and the laws of a mixing matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.core.aggregate import average, mix, put, spread
from atoll.core.random import fold, make_key, normal, uniform
from atoll.core.tree import leaves, take

MODELS = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25]])


def test_average_by_size_and_plainly():
    # methods/baselines/fedavg.md
    sizes = torch.tensor([3.0, 5.0, 2.0])
    assert average(MODELS, sizes).tolist() == pytest.approx([1.9, 0.15], abs=1e-6)
    assert average(MODELS).tolist() == pytest.approx([1.5, 0.416667], abs=1e-6)
    assert average(MODELS, torch.ones(3)).tolist() == pytest.approx([1.5, 0.416667], abs=1e-6)


def test_mix_by_hand():
    tree = {"w": torch.tensor([[[1.0], [2.0]], [[10.0], [20.0]]]), "b": torch.tensor([3.0, 30.0])}
    out = mix(tree, torch.tensor([[0.75, 0.25], [0.0, 1.0], [1.0, -1.0]]))
    assert out["w"].tolist() == [[[3.25], [6.5]], [[10.0], [20.0]], [[-9.0], [-18.0]]]
    assert out["b"].tolist() == [9.75, 30.0, -27.0]


def test_scalars_and_tensors_without_numbers_are_averaged_too():
    tree = {"scalar": torch.tensor([1.0, 4.0]), "none": torch.zeros(2, 0, 3)}
    out = average(tree, torch.tensor([2.0, 1.0]))
    assert out["scalar"].shape == ()
    assert float(out["scalar"]) == 2
    assert out["none"].shape == (0, 3)
    assert mix(tree, torch.eye(2))["none"].shape == (2, 0, 3)


def test_average_is_one_row_of_mix():
    sizes = torch.tensor([3.0, 5.0, 2.0])
    row = (sizes / sizes.sum()).unsqueeze(0)
    torch.testing.assert_close(mix(MODELS, row)[0], average(MODELS, sizes))
    torch.testing.assert_close(mix(MODELS, torch.eye(3)), MODELS)


def test_types_of_models_win_over_the_type_of_weights():
    tree = [MODELS.double(), MODELS.float()]
    for out in (average(tree, torch.tensor([1.0, 2, 3])), mix(tree, torch.eye(3))):
        assert [leaf.dtype for leaf in out] == [torch.float64, torch.float32]
    assert average(tree, torch.tensor([1, 2, 3]))[0].dtype == torch.float64


def test_whole_numbers_are_refused_rather_than_turned_into_zeros():
    with pytest.raises(TypeError, match=r"floating-point.*int64"):
        mix(torch.arange(4).reshape(2, 2), torch.full((2, 2), 0.5))
    with pytest.raises(TypeError, match=r"floating-point.*int64"):
        average(torch.arange(4).reshape(2, 2), torch.ones(2))


seeds, sizes = st.integers(0, 2**20), st.integers(1, 6)


def rows_to_one(seed: int, rows: int, columns: int) -> Tensor:
    """Any real weights, as long as each row sums to one."""
    raw = normal(fold(make_key(seed), "mix"), (rows, columns), torch.float64)
    return raw + (1 - raw.sum(1, keepdim=True)) / columns


@given(seeds, sizes, sizes, st.floats(-1e6, 1e6))
@settings(max_examples=50, deadline=None)
def test_rows_that_sum_to_one_keep_constants(seed, rows, columns, constant):
    tree = {"w": torch.full((columns, 2, 3), constant, dtype=torch.float64)}
    out = mix(tree, rows_to_one(seed, rows, columns))["w"]
    torch.testing.assert_close(out, torch.full_like(out, constant), rtol=1e-9, atol=1e-9)


@given(seeds, sizes, st.floats(-1e6, 1e6))
@settings(max_examples=50, deadline=None)
def test_an_average_keeps_constants_and_stays_inside(seed, clients, constant):
    weight = uniform(fold(make_key(seed), "w"), (clients,), torch.float64)
    same = torch.full((clients, 3), constant, dtype=torch.float64)
    torch.testing.assert_close(average(same, weight), same[0], rtol=1e-12, atol=1e-12)
    models = normal(make_key(seed), (clients, 3), torch.float64)
    out = average(models, weight)
    assert (out <= models.amax(0) + 1e-12).all()
    assert (out >= models.amin(0) - 1e-12).all()


@given(seeds, sizes, sizes, sizes)
@settings(max_examples=50, deadline=None)
def test_mixing_twice_is_mixing_with_the_product(seed, first, second, clients):
    models = normal(make_key(seed), (clients, 2, 2), torch.float64)
    a, b = rows_to_one(seed, first, clients), rows_to_one(seed + 1, second, first)
    torch.testing.assert_close(mix(mix(models, a), b), mix(models, b @ a), rtol=1e-9, atol=1e-9)


@given(seeds, st.integers(2, 6))
@settings(max_examples=50, deadline=None)
def test_the_order_of_clients_does_not_matter(seed, clients):
    models = normal(make_key(seed), (clients, 3), torch.float64)
    weight = uniform(make_key(seed), (clients,), torch.float64)
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(seed))
    one, other = average(models, weight), average(models[order], weight[order])
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_put_replaces_rows_and_leaves_its_inputs_alone():
    stacked = {"a": torch.zeros(4, 2), "none": None}
    rows = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "none": None}
    out = put(stacked, torch.tensor([3, 1]), rows)
    assert out["a"].tolist() == [[0, 0], [3, 4], [0, 0], [1, 2]]
    assert not stacked["a"].any()


def test_spread_gives_everybody_a_copy_of_their_own():
    tree = [torch.tensor([1.0, 2.0]), torch.tensor(5)]
    out = spread(tree, 3)
    for k in range(3):
        assert all(map(torch.equal, leaves(take(out, k)), leaves(tree)))
    out[0][0] += 1
    assert out[0][1].tolist() == [1.0, 2.0]
    assert tree[0].tolist() == [1.0, 2.0]
