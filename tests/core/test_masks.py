"""Masks on weights."""

from __future__ import annotations

import pytest
import torch

from atoll.core.masks import first_masks, masked


def test_small_masks_count_as_zero_where_a_threshold_is_given() -> None:
    model, masks = {"w": torch.tensor([[1.0, -2, 3]])}, [torch.tensor([[1.0, 5e-4, -0.5]])]
    assert masked(model, masks)["w"].flatten().tolist() == pytest.approx([1.0, -0.001, -1.5])
    assert masked(model, masks, 1e-3)["w"].tolist() == [[1.0, 0.0, -1.5]]


def test_masks_of_ones_change_nothing_and_vectors_have_none() -> None:
    model = {"w": torch.randn(2, 3), "b": torch.randn(3), "v": torch.randn(3, 1)}
    masks = first_masks(model)
    assert [mask.shape for mask in masks] == [(2, 3), (3, 1)]
    assert all(torch.equal(masked(model, masks)[name], model[name]) for name in model)
