"""Rectifier and dropout on a GPU have the CPU's bits."""

from __future__ import annotations

from tests.nn.kernels import interpreted, needs_triton

CODE = """
import torch
from atoll.core.kernels import noise
from atoll.core.random import dropout, fold, make_key, salt

draw, share = torch.Generator().manual_seed(0), round(0.3 * 2**16)
for width in (1, 7, 64, 100):
    keys = fold(make_key(3), torch.arange(4))
    rows = torch.randint(10_000, (4, 40), generator=draw, dtype=torch.int32)
    h, grad = torch.randn(2, 4, 40, width, generator=draw)
    for purpose in ((), ("layer", 1)):
        own = salt(*purpose) if purpose else None
        x = h.clone().requires_grad_()
        zipped = list(zip(x, keys, rows))
        plain = torch.stack([dropout(a, k, r, 0.3, *purpose) for a, k, r in zipped])
        behind = torch.stack([dropout(torch.relu(a), k, r, 0.3, *purpose) for a, k, r in zipped])
        assert torch.equal(noise.dropped(h, keys, rows, own, share, False), plain)
        found = noise.dropped(h, keys, rows, own, share, True)
        assert torch.equal(found, behind)
        slope = torch.autograd.grad(behind, x, grad)[0]
        assert torch.equal(noise.passed_back(grad, found, share), slope)
print("equal")
"""


@needs_triton
def test_kernels_equal_the_operations_they_replace() -> None:
    done = interpreted(CODE)
    assert done.stdout == "equal\n", done.stderr
