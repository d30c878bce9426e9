"""Adam, the pull and the check for finite numbers on a GPU equal what they replace."""

from __future__ import annotations

from tests.nn.kernels import interpreted, needs_triton

CODE = """
import math
import torch
from atoll.core.kernels import leaves

draw = torch.Generator().manual_seed(0)
shapes = [(3, 50, 33), (3, 7), (3, 1)]
values, grads, means, squares = [
    [torch.randn(shape, generator=draw) for shape in shapes] for _ in range(4)
]
squares = [square.abs() for square in squares]
steps = torch.tensor([0.0, 4.0, 9.0])  # clients of different ages
for beta in (0.9, 0.0):
    settings = (0.01, 5e-4, beta, 0.999, 1e-8)
    counted, new = leaves.adam(settings, steps, [values, grads, means, squares])
    assert torch.equal(counted, steps + 1)
    for p, g, m, v, *found in zip(values, grads, means, squares, *new):
        count = (steps + 1).double().view(3, *[1] * (p.dim() - 1))
        g = g + p * 5e-4
        m, v = beta * m + (1 - beta) * g, 0.999 * v + 0.001 * g * g
        rate, bias = 0.01 / (1 - beta**count), (1 - 0.999**count).sqrt()
        p = p - rate.float() * m / (v.sqrt() / bias.float() + 1e-8)
        for one, other in zip(found, (p, m, v)):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
for axes, start in ((1, values), (1, [one[:1].expand_as(one) for one in values])):
    found = leaves.pull(0.3, axes, grads, means, start)
    for one, g, w, begun in zip(found, grads, means, start):
        torch.testing.assert_close(one, g + 0.3 * (w - begun), rtol=1e-6, atol=1e-6)
pairs = [[leaf.unflatten(0, (3, 1)).repeat(1, 2, *[1] * (leaf.dim() - 1)) for leaf in part]
         for part in (grads, means)]  # three runs of two clients
own = [one.unsqueeze(1).expand(-1, 2, *one.shape[1:]) for one in values]
for one, g, w, begun in zip(leaves.pull(0.3, 2, *pairs, own), *pairs, own):
    torch.testing.assert_close(one, g + 0.3 * (w - begun), rtol=1e-6, atol=1e-6)
some = [torch.randn(2, 9000), torch.randn(3, 2, 2), torch.full((1, 1), 3e38)]
assert leaves.finite(some).all()
some[0][1, 8999], some[1][2, 1, 1] = math.inf, math.nan
assert leaves.finite(some).tolist() == [True, False, True, True, False, True]
print("equal")
"""


@needs_triton
def test_kernels_equal_the_operations_they_replace() -> None:
    done = interpreted(CODE)
    assert done.stdout == "equal\n", done.stderr
