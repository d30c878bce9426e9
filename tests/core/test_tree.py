"""Trees: records are frozen tree nodes, and stacking them can be undone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from atoll.core.tree import (
    RECORDS,
    Empty,
    Tree,
    all_finite,
    concat,
    leaves,
    named_leaves,
    num_bytes,
    record,
    stack,
    static,
    structure,
    take,
    tree_map,
    unstack,
    with_leaves,
)


@record
class Pair:
    left: Tree
    right: Tree
    kind: str = static("plain")


def assert_equal(a: Tree, b: Tree) -> None:
    assert structure(a) == structure(b)
    assert len(leaves(a)) == len(leaves(b))
    for one, other in zip(leaves(a), leaves(b), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_record_is_frozen():
    pair = Pair(torch.zeros(1), None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.left = torch.ones(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.other = 1


def test_a_record_is_registered_by_its_dotted_name():
    assert RECORDS[f"{__name__}.Pair"] is Pair


def test_a_record_is_a_tree_of_its_fields_without_the_static_ones():
    pair = Pair(torch.zeros(1), {"a": torch.ones(2)}, kind="odd")
    flat, spec = pytree.tree_flatten(pair)
    assert len(flat) == 2
    again = pytree.tree_unflatten(flat, spec)
    assert isinstance(again, Pair)
    assert again.kind == "odd"


def test_static_fields_are_part_of_the_structure():
    one, other = (Pair(torch.zeros(1), None, kind=kind) for kind in ("plain", "odd"))
    assert structure(one) != structure(other)
    assert structure(one) == structure(Pair(torch.ones(1), None))
    assert structure(one) != structure(Pair(torch.ones(1), torch.ones(1)))


def test_vmap_goes_through_a_record_whose_field_is_none():
    pair = Pair(torch.arange(3.0), None)
    out = torch.func.vmap(lambda one: Pair(one.left * 2, one.right))(pair)
    assert out.left.tolist() == [0.0, 2.0, 4.0]
    assert out.right is None


def test_records_pass_through_vmap_and_grad():
    pair = Pair(torch.arange(3.0), torch.ones(3))
    out = torch.func.vmap(lambda p: Pair(p.left * 2, p.right + p.left))(pair)
    assert_equal(out, Pair(torch.tensor([0.0, 2, 4]), torch.tensor([1.0, 2, 3])))
    slope = torch.func.grad(lambda p: (p.left * p.right).sum())(pair)
    assert_equal(slope, Pair(pair.right, pair.left))


def test_named_leaves_are_dotted_paths_in_order():
    tree = Pair([{"weight": torch.zeros(1)}, (torch.ones(1), None)], {"b": Empty(), "a": None})
    tree = {"model": tree, "loss": torch.tensor(2.0)}
    names = [name for name, _ in named_leaves(tree)]
    assert names == ["model.left.0.weight", "model.left.1.0", "loss"]
    assert [name for name, _ in named_leaves(torch.zeros(2))] == [""]
    assert not list(named_leaves(Empty()))


def test_tree_map_leaves_none_and_plain_values_alone():
    tree = {"a": torch.ones(2), "none": None, "number": 3, "name": "x"}
    out = tree_map(lambda a, b: a + b, tree, tree)
    assert torch.equal(out["a"], torch.full((2,), 2.0))
    assert (out["none"], out["number"], out["name"]) == (None, 3, "x")


def test_tree_map_refuses_trees_of_different_structure():
    with pytest.raises(ValueError, match="mismatch"):
        tree_map(lambda a, b: a + b, {"a": torch.ones(1)}, {"b": torch.ones(1)})


tensors = st.builds(
    lambda shape, whole: (
        torch.arange(int(torch.tensor([*shape, 1]).prod())).reshape(shape) + (0 if whole else 0.5)
    ),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.booleans(),
)
trees = st.recursive(
    st.one_of(tensors, st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Pair, inner, inner, st.sampled_from(["plain", "odd"])),
    ),
    max_leaves=6,
)


@given(trees, st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_stack_and_unstack_undo_each_other(tree, size):
    many = [tree_map(lambda leaf, k=k: leaf + k, tree) for k in range(size)]
    for one, back in zip(many, unstack(stack(many), size), strict=True):
        assert_equal(one, back)


@given(trees, st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_concat_joins_stacks(tree, first, second):
    many = [tree_map(lambda leaf, k=k: leaf + k, tree) for k in range(first + second)]
    assert_equal(concat([stack(many[:first]), stack(many[first:])]), stack(many))


def test_take_picks_rows_by_number_slice_and_tensor():
    tree: dict[str, Any] = {"a": torch.arange(6).reshape(3, 2), "none": None}
    assert take(tree, 1)["a"].tolist() == [2, 3]
    assert take(tree, slice(1, 3))["a"].tolist() == [[2, 3], [4, 5]]
    assert take(tree, torch.tensor([2, 0]))["a"].tolist() == [[4, 5], [0, 1]]
    assert take(tree, 0)["none"] is None


def test_bytes_are_counted_over_all_tensors():
    tree = Pair(torch.zeros(3, dtype=torch.float64), [torch.zeros(2, dtype=torch.int8), None, 7])
    assert num_bytes(tree) == 3 * 8 + 2
    assert num_bytes(Empty()) == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_one_bad_number_anywhere_is_found(bad, where):
    tree = [torch.zeros(3), torch.zeros(3)]
    tree[where][1] = bad
    assert not all_finite(tree)


def test_infinities_that_would_cancel_are_found():
    assert not all_finite([torch.tensor([torch.inf]), torch.tensor([-torch.inf])])


def test_finite_numbers_whose_sum_overflows_are_finite():
    huge = torch.full((3,), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert all_finite(huge)
    assert all_finite(torch.full((3,), torch.finfo(torch.float32).max))
    assert not all_finite([huge, torch.tensor(torch.nan)])


@pytest.mark.parametrize("tree", [None, Empty(), torch.tensor([1, 2]), torch.zeros(0), [None, 3]])
def test_trees_without_floats_are_finite(tree):
    assert all_finite(tree)


def test_the_leaves_of_a_tree_are_tensors_alone():
    found = leaves([torch.zeros(1), None, 3, "x", {"a": torch.ones(1)}])
    assert [type(leaf) for leaf in found] == [Tensor, Tensor]


def test_other_tensors_in_the_places_of_the_old_ones():
    tree = Pair(torch.zeros(1), [None, 3, {"a": torch.ones(1)}, (torch.ones(2),)])
    given = [torch.tensor(float(number)) for number in range(3)]
    found = with_leaves(tree, given)
    assert all(one is other for one, other in zip(leaves(found), given, strict=True))
    assert structure(found) == structure(tree)
    assert leaves(tree)[0].tolist() == [0]
