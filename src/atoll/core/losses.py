"""Losses over a graph's nodes, and functions for the losses of methods.

Every mean is over a mask, so padding never counts. `cross_entropy` reads class weights and the
focal exponent from the graph; `with_loss` puts them there. Methods with contrastive or prototype
terms use `masked_mean`, `unit` and `class_means`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.kernels import on_gpu
from atoll.core.tree import Tree, leaves
from atoll.core.vmap.stacks import Context, Gradients, Stacked, call

if TYPE_CHECKING:
    from atoll.core.graph import Graph


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of values, (N,), where the mask is one, or zero if the mask is empty."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def unit(z: Tensor) -> Tensor:
    """Normalise rows to length one. A zero row stays zero, and its gradient is finite."""
    square = z.square().sum(-1, keepdim=True)
    return z * torch.where(square > 1e-24, square, torch.ones_like(square)).rsqrt()


def cross_entropy(logits: Tensor, graph: Graph) -> Tensor:
    """Return the mean (focal) cross entropy over the training nodes, with the class weights."""
    if on_gpu(logits) and not graph.focal:
        weighs = graph.class_weights
        weights = graph.train if weighs is None else graph.train * weighs.gather(0, graph.y)
        loss: Tensor = call(_CrossEntropy, logits, graph.y, weights, weighs is not None)[0]
        return loss
    below, log_total = below_top(logits)
    losses = log_total - below.gather(-1, graph.y.unsqueeze(-1)).squeeze(-1)
    if graph.focal:  # a well predicted node counts little
        # The clamp avoids 0, where the slope of a root is infinite.
        losses = (1 - (-losses).exp()).clamp(min=1e-6) ** graph.focal * losses
    if graph.class_weights is None:
        return masked_mean(losses, graph.train)
    weights = graph.train * graph.class_weights.gather(0, graph.y)
    total = weights.sum()
    return (losses * weights).sum() / torch.where(total > 0, total, torch.ones_like(total))


class _CrossEntropy(Stacked):
    """The weighted mean loss, (...,), of logits (..., N, C), and the gradient of the logits."""

    @staticmethod
    def forward(
        logits: Tensor, y: Tensor, weights: Tensor, weighted: bool
    ) -> tuple[Tensor, Tensor]:
        from atoll.core.kernels import classes

        front = logits.shape[:-2]
        labels, each = (part.reshape(-1, y.shape[-1]).contiguous() for part in (y, weights))
        flat = logits.reshape(-1, *logits.shape[-2:]).contiguous()
        loss, slope = classes.cross_entropy(flat, labels, each, weighted)
        return loss.reshape(front), slope.reshape(logits.shape)

    @staticmethod
    def setup_context(ctx: Context, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Context, grad: Tensor, _: Tensor) -> Gradients:
        return call(_Along, *ctx.saved_tensors, grad), None, None, None


class _Along(Stacked):
    """A gradient (..., N, C) times numbers (...,). Its own derivative is not available."""

    @staticmethod
    def forward(slope: Tensor, grad: Tensor) -> Tensor:
        return slope * grad[..., None, None]

    @staticmethod
    def setup_context(ctx: Context, inputs: object, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        raise RuntimeError("second derivatives of the cross entropy are not available on a GPU")


FOCAL = 2.0  # the usual exponent of a focal loss
BALANCED = "balanced"


def parse_loss(text: str) -> float:
    """Return the focal exponent of `cross_entropy`, `focal` or `focal:GAMMA`."""
    name, colon, gamma = text.partition(":")
    try:
        if name == "focal" and 0 < (exponent := float(gamma) if colon else FOCAL) <= 100:
            return exponent
    except ValueError:
        pass
    if text == "cross_entropy":
        return 0.0
    give = "give cross_entropy, focal or focal:GAMMA with a number up to 100"
    raise ConfigError(f"loss cannot be '{text}'; {give}")


def parse_class_weights(text: str, classes: int | None = None) -> tuple[float, ...] | None:
    """Parse the class weights, one number per class. Return None for `balanced`."""
    if text == BALANCED:
        return None
    try:
        weights = tuple(map(float, text.split(",")))
    except ValueError:
        weights = ()
    if not any(weights) or not all(0 <= weight < float("inf") for weight in weights):
        give = "give balanced, or one number per class, as in 1,10"
        raise ConfigError(f"class_weights cannot be '{text}'; {give}")
    if classes not in (None, len(weights)):
        has = f"has {len(weights)} numbers, but the data have {classes} classes"
        raise ConfigError(f"class_weights {has}; give one number per class")
    return weights


def with_loss(graph: Graph, classes: int, weights: str | None, loss: str | None) -> Graph:
    """Set class weights and loss from texts. None stands for equal weights, or cross entropy."""
    focal = 0.0 if loss is None else parse_loss(loss)
    if weights is None:
        return replace(graph, focal=focal)
    if (given := parse_class_weights(weights, classes)) is None:
        # From this client's training labels. A class without labels has no effect on the loss.
        numbers = torch.arange(classes, device=graph.y.device)
        counts = ((graph.y.unsqueeze(-1) == numbers) * graph.train.unsqueeze(-1)).sum(0)
        each = counts.sum() / (classes * counts.clamp(min=1))
    else:
        each = graph.train.new_tensor(given)
    return replace(graph, class_weights=each.to(graph.train.dtype), focal=focal)


def log_probabilities(logits: Tensor) -> Tensor:
    """Return `log_softmax` of the last axis, on a CPU in a third of its time for few classes."""
    if logits.is_cuda:  # one kernel
        return logits.log_softmax(-1)
    below, log_total = below_top(logits)
    return below - log_total.unsqueeze(-1)


def below_top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits minus their row's maximum, (N, C), and the logsumexp of these, (N,)."""
    # Their difference is `log_softmax`, for which torch takes three times as long for few classes.
    # Not `logsumexp` of the logits themselves, because large logits round a small loss to zero.
    below = logits - logits.detach().amax(-1, keepdim=True)
    return below, below.exp().sum(-1).log()


def class_means(z: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return each class's mean row over the mask, (C, h), and its row count, (C,).

    The mean of a class without rows is zero.
    """
    member = (y.unsqueeze(-1) == torch.arange(classes, device=y.device)) * mask.unsqueeze(-1)
    count = member.sum(0)
    return member.T @ z / count.clamp(min=1).unsqueeze(-1), count


def sq_distance(a: Tree, b: Tree) -> Tensor:
    """Return the squared Euclidean distance between two trees of the same structure."""
    parts = [((x - y) ** 2).sum() for x, y in zip(leaves(a), leaves(b), strict=True)]
    return torch.stack(parts).sum()
