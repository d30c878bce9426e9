"""Cross entropy and scores on a GPU equal the operations that they replace."""

from __future__ import annotations

from tests.nn.kernels import interpreted, needs_triton

CODE = """
import torch
from torch.nn import functional
from atoll.core.kernels import classes

draw = torch.Generator().manual_seed(0)
# The second has more rows than a program takes, and the first client of each trains on none.
for clients, nodes, kinds in ((3, 20, 4), (2, 1200, 7), (1, 5, 2)):
    logits = 3 * torch.randn(clients, nodes, kinds, generator=draw)
    y = torch.randint(kinds, (clients, nodes), generator=draw)
    masks = (torch.rand(3, clients, nodes, generator=draw) < 0.4).float()
    masks[0, 0] = 0
    x = logits.clone().requires_grad_()
    each = functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
    for weighted in (False, True):
        weights = masks[0] * (torch.rand(clients, nodes, generator=draw) if weighted else 1)
        total = weights.sum(1)
        divisor = torch.where(total > 0, total, 1.0) if weighted else total.clamp(min=1)
        want = (each * weights).sum(1) / divisor
        slope = torch.autograd.grad(want.sum(), x, retain_graph=True)[0]
        loss, found = classes.cross_entropy(logits, y, weights, weighted)
        torch.testing.assert_close(loss, want.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found, slope, rtol=1e-5, atol=1e-6)
    counts, loss = classes.scores(logits, y, tuple(masks))
    for role, mask in enumerate(masks):
        for client in range(clients):
            want = torch.zeros(kinds, kinds)
            place = y[client], logits[client].argmax(-1)
            want.index_put_(place, mask[client], accumulate=True)
            assert torch.equal(counts[client, role], want)
        mean = (each.detach() * mask).sum(1) / mask.sum(1).clamp(min=1)
        torch.testing.assert_close(loss[:, role], mean, rtol=1e-5, atol=1e-6)
print("equal")
"""


@needs_triton
def test_kernels_equal_the_operations_they_replace() -> None:
    done = interpreted(CODE)
    assert done.stdout == "equal\n", done.stderr
