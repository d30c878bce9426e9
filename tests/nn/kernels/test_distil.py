"""FedTAD's losses on a GPU equal the operations that they replace."""

from __future__ import annotations

from tests.nn.kernels import interpreted, needs_triton

CODE = """
import torch
from atoll.nn import fedtad
from atoll.nn.kernels import distil

draw = torch.Generator().manual_seed(0)
# More teachers than a program takes at once; one teacher; many classes.
for teachers, nodes, classes in ((19, 21, 7), (1, 5, 2), (3, 9, 70)):
    student = torch.randn(nodes, classes, generator=draw).requires_grad_()
    taught = torch.randn(teachers, nodes, classes, generator=draw)
    taught[0, :3] = student.detach()[:3] + 1e-8  # they agree
    weight = torch.rand(teachers, nodes, generator=draw)
    plain = fedtad.divergence(student, taught, weight, "l1")
    (by_student,) = torch.autograd.grad(plain, student)
    ours, slope = distil.l1_gaps(student.detach(), taught, weight)
    torch.testing.assert_close(ours, plain.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope, by_student, rtol=1e-5, atol=1e-6)
    fedtad.on_gpu = lambda x: True  # the same by way of autograd
    again = fedtad.divergence(student, taught, weight, "l1")
    (found,) = torch.autograd.grad(3 * again, student)
    fedtad.on_gpu = lambda x: False
    torch.testing.assert_close(found, 3 * by_student, rtol=1e-5, atol=1e-6)
for rows, width in ((21, 130), (3, 5)):
    x = torch.randn(rows, width, generator=draw)
    x[1] = x[0]  # no sign
    weight = torch.rand(rows, rows, generator=draw)
    weight = weight + weight.T
    wanted = fedtad._half_by_row(x, weight)
    torch.testing.assert_close(distil.half_gaps(x, weight), wanted, rtol=1e-5, atol=1e-5)
print("equal")
"""


@needs_triton
def test_kernels_equal_the_operations_they_replace() -> None:
    done = interpreted(CODE)
    assert done.stdout == "equal\n", done.stderr
