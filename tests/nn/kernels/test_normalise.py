"""Layer normalisation on a GPU equals torch's, with its gradient."""

from __future__ import annotations

from tests.nn.kernels import interpreted, needs_triton

CODE = """
import torch
from torch.nn import functional
from atoll.nn.kernels import normalise

draw = torch.Generator().manual_seed(0)
for rows, width in ((70, 32), (3, 33), (1, 1), (5, 3000)):
    x = (3 + torch.randn(rows, width, generator=draw)).requires_grad_()
    grad = torch.randn(rows, width, generator=draw)
    wanted = functional.layer_norm(x, (width,))
    (slope,) = torch.autograd.grad(wanted, x, grad)
    out, factors = normalise.normalised(x.detach(), 1e-5)
    torch.testing.assert_close(out, wanted.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        normalise.passed_back(grad, out, factors), slope, rtol=1e-3, atol=1e-4
    )
print("equal")
"""


@needs_triton
def test_the_kernel_equals_the_operations_it_replaces() -> None:
    done = interpreted(CODE)
    assert done.stdout == "equal\n", done.stderr
