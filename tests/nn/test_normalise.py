"""Rows have mean zero and variance one, as torch's normalisation makes them."""

from __future__ import annotations

import torch
from torch.nn import functional

from atoll.nn.normalise import normalised


def test_rows_have_mean_zero_and_variance_one() -> None:
    h = 5 + 3 * torch.randn(7, 20, dtype=torch.float64)
    found = normalised(h)
    torch.testing.assert_close(found.mean(1), torch.zeros(7, dtype=torch.float64))
    torch.testing.assert_close(
        found.var(1, correction=0), torch.ones(7).double(), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(found, functional.layer_norm(h, (20,)))


def test_a_constant_row_becomes_zero_with_a_finite_gradient() -> None:
    h = torch.full((2, 4), 3.0, requires_grad=True)
    found = normalised(h)
    assert torch.equal(found, torch.zeros(2, 4))
    found.sum().backward()
    assert h.grad is not None
    assert torch.isfinite(h.grad).all()
