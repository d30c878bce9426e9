"""Functional optimizers that match `torch.optim`: `init` makes a state, `update` takes a step.

Weight decay is L2. On a CPU, Adam calls torch's fused kernel once for all clients of a stack; on a
GPU it calls Atoll's kernel. Runs of one stack may differ in their settings (`Varied`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import is_
from typing import Annotated, Protocol

import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.hyper import LearningRate, NonNegative, ShareBelowOne
from atoll.core.kernels import on_gpu
from atoll.core.tree import Tree, inside_transform, leaves, record, tree_map, with_leaves
from atoll.core.vmap import kernels
from atoll.core.vmap.leaves import on_leaves
from atoll.core.vmap.stacks import Constant, Dims, Vmap, as_batch, call
from atoll.core.vmap.varied import Varied, is_zero, scalar


class Optimizer(Protocol):
    """The protocol of optimizers: `init` makes a state for parameters, `update` takes a step."""

    @property
    def lr(self) -> float: ...
    def init(self, params: Tree) -> Tree: ...
    def update(
        self, grads: Tree, params: Tree, state: Tree, *, owned: bool = False
    ) -> tuple[Tree, Tree]:
        """Return (parameters, state) after one step. `owned` allows overwriting both."""


@record
class AdamState:
    """The number of steps, and running means of the gradient and of its square."""

    steps: Tensor
    mean: Tree
    square: Tree


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015)."""

    lr: Annotated[LearningRate, "size of a step"] = 0.01
    weight_decay: Annotated[NonNegative, "weight of the parameters in the gradient"] = 5e-4
    beta1: Annotated[ShareBelowOne, "decay of the running mean of the gradient"] = 0.9
    beta2: Annotated[ShareBelowOne, "decay of the running mean of its square"] = 0.999
    eps: Annotated[NonNegative, "constant that is added to the divisor of a step"] = 1e-8

    def init(self, params: Tree) -> AdamState:
        zeros = tree_map(torch.zeros_like, params)
        first = leaves(params)[0]
        # A sum of zeros, not a constant: under `vmap` every client then counts its own steps.
        steps = (first.flatten()[:1].detach() * 0).sum().to(torch.float32)
        return AdamState(steps=steps, mean=zeros, square=tree_map(torch.clone, zeros))

    def update(
        self, grads: Tree, params: Tree, state: AdamState, *, owned: bool = False
    ) -> tuple[Tree, AdamState]:
        own = leaves(params)
        rest = [leaves(tree) for tree in (grads, state.mean, state.square)]
        _check_shapes(own, *rest)
        count = len(own)
        inputs = [leaf for part in (own, *rest) for leaf in part]
        if inside_transform():
            steps, *out = call(_AdamStep, self, owned, self._numbers(own[0]), state.steps, *inputs)
        else:
            whole = [_own(leaf, owned or i // count == 1) for i, leaf in enumerate(inputs)]
            steps, *out = _adam(self, None, state.steps, whole)
        if owned and all(map(is_, out, (*own, *inputs[2 * count :]))):  # overwritten in place
            return params, AdamState(steps=steps, mean=state.mean, square=state.square)
        parts = (out[i * count : (i + 1) * count] for i in range(3))
        params, mean, square = (with_leaves(params, part) for part in parts)
        return params, AdamState(steps=steps, mean=mean, square=square)

    def _numbers(self, like: Tensor) -> Tensor | None:
        """Return the settings, in the fields' order, as one tensor, or None if none is `Varied`."""
        found = [getattr(self, field.name) for field in fields(self)]
        varied = any(isinstance(number, Varied) for number in found)
        return torch.stack([scalar(number, like) for number in found]) if varied else None


def _check_shapes(params: list[Tensor], *others: list[Tensor]) -> None:
    """Reject moments of another model, because torch's fused kernel does not check shapes."""
    wanted = [leaf.shape for leaf in params]
    if any([leaf.shape for leaf in other] != wanted for other in others):
        raise ConfigError(
            "the optimizer's moments do not fit the parameters; keep the model's shapes for a "
            "whole run, or reset the moments"
        )


def _own(leaf: Tensor, may_have: bool) -> Tensor:
    """Return the leaf if the CPU kernel may overwrite it (`may_have`), or else a copy."""
    if leaf.is_cuda:
        return leaf  # the GPU kernel does not overwrite its input
    if may_have:
        return leaf.contiguous()
    return leaf.clone(memory_format=torch.contiguous_format)


class _AdamStep(Constant):
    """One step of Adam on all leaves of all clients at once."""

    @staticmethod
    def forward(
        settings: Adam, owned: bool, numbers: Tensor | None, steps: Tensor, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        return _adam(settings, numbers, steps, [leaf.clone() for leaf in flat])

    @staticmethod
    def vmap(
        info: Vmap, dims: Dims, settings: Adam, owned: bool, numbers: Tensor | None, *flat: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size, count, around = info.batch_size, len(flat) // 4, inside_transform()

        numbers = None if numbers is None else as_batch(numbers, dims[2], size)
        whole = []
        for i, (leaf, dim) in enumerate(zip(flat, dims[3:], strict=True)):
            full = as_batch(leaf, dim, size)
            # The first leaf counts the steps. Gradients, the second quarter after it, are only
            # read. The kernel overwrites the rest, so copy it unless the loop owns it.
            mine = count < i <= 2 * count or (owned and dim is not None)
            whole.append(full if around else _own(full, mine))
        if around:  # an outer `vmap` over seeds remains
            out = _AdamStep.apply(settings, owned, numbers, *whole)  # type: ignore[no-untyped-call]
        else:
            out = _adam(settings, numbers, whole[0], whole[1:])
        return out, (0,) * len(out)


def _adam(
    settings: Adam, numbers: Tensor | None, steps: Tensor, flat: list[Tensor]
) -> tuple[Tensor, ...]:
    """Return the new step counts, parameters and both moments.

    `flat` are parameters, gradients and both moments. A CPU overwrites all except the gradients.
    """
    # Steps have the leading axes of all leaves: none, clients, or runs and clients. So do the
    # numbers, which replace the settings if runs differ in them.
    if numbers is not None and not steps.is_cuda:
        return _adam_by_run(numbers, steps, flat)
    if steps.dim() > 1 and not steps.is_cuda:
        shape, axes = steps.shape, steps.dim() - 1
        out = _adam(settings, None, steps.flatten(), [leaf.flatten(0, axes) for leaf in flat])
        return tuple(leaf.reshape(*shape, *leaf.shape[1:]) for leaf in out)
    batched = steps.dim() == 1
    count = len(flat) // 4
    lists = [flat[i * count : (i + 1) * count] for i in range(4)]
    params, _, mean, square = lists
    if on_gpu(params[0]) and numbers is None:
        from atoll.core.kernels import leaves as leaf_kernels

        plain = tuple(float(getattr(settings, field.name)) for field in fields(settings))
        counted, new = leaf_kernels.adam(plain, steps, lists)
        return (counted, *(leaf for part in new for leaf in part))
    if steps.is_cuda:
        found = zip(*kernels.adam(settings, numbers, steps + 1, lists), strict=True)
        return (steps + 1, *(leaf for part in found for leaf in part))
    steps = steps + 1
    counts = [steps] * count  # the kernel only reads them
    if batched and len(set(steps.numpy().tolist())) == 1:
        # Clients with equal step counts (nearly always): their leaves form one long leaf.
        counts = [steps[0]] * count
    elif batched:
        # Step counts differ between clients, so pass each client's leaves separately.
        lists = [[row for leaf in part for row in leaf.unbind(0)] for part in lists]
        counts = [*steps.unbind(0)] * count
    # The kernel of torch.optim.Adam(fused=True), whose wrapper would load a compiler first.
    fused: Callable[..., None] = torch._fused_adam_
    fused(*lists, [], counts, **vars(settings), amsgrad=False, maximize=False)
    return (steps, *params, *mean, *square)


def _adam_by_run(numbers: Tensor, steps: Tensor, flat: list[Tensor]) -> tuple[Tensor, ...]:
    """Call `_adam` once for each run, because runs have different settings."""
    rows = numbers.reshape(-1, numbers.shape[-1]).numpy()
    if (rows == rows[0]).all():  # all clients of one run
        return _adam(Adam(*rows[0].tolist()), None, steps, flat)
    for row in range(len(numbers)):
        _adam_by_run(numbers[row], steps[row], [leaf[row] for leaf in flat])
    count = len(flat) // 4
    return (steps + 1, *flat[:count], *flat[2 * count :])


def pull(grads: Tree, params: Tree, towards: Tree, mu: float | Varied) -> Tree:
    """Return g + mu (w - start) for every leaf: the gradient with FedProx's proximal term.

    On a GPU it is one kernel for all leaves.
    """
    parts = [leaves(tree) for tree in (grads, params, towards)]
    if all(map(is_, *parts[1:])):  # the first step, before the parameters move
        return grads
    if isinstance(mu, Varied):
        found = [g + mu * (w - start) for g, w, start in zip(*parts, strict=True)]
    else:
        found = call(_Pull, mu, 0, *(leaf for part in parts for leaf in part))
    return with_leaves(grads, found)


class _Pull(Constant):
    """`pull` of the leaves of all clients at once. `axes` counts the axes of runs and clients."""

    @staticmethod
    def forward(mu: float, axes: int, *flat: Tensor) -> tuple[Tensor, ...]:
        count = len(flat) // 3
        grads, params, starts = (flat[i * count : (i + 1) * count] for i in range(3))
        if axes and on_gpu(grads[0]):
            from atoll.core.kernels import leaves as leaf_kernels

            return leaf_kernels.pull(mu, axes, grads, params, starts)
        rows = zip(grads, params, starts, strict=True)
        # In place, because memory that was just written is still in the cache.
        return tuple((w - start).mul_(mu).add_(g) for g, w, start in rows)

    @staticmethod
    def vmap(
        info: Vmap, dims: Dims, mu: float, axes: int, *flat: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        pairs = zip(flat, dims[2:], strict=True)
        whole = [as_batch(leaf, dim, info.batch_size) for leaf, dim in pairs]
        step = _Pull.apply if inside_transform() else _Pull.forward
        out = step(mu, axes + 1, *whole)
        return out, (0,) * len(out)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with optional momentum."""

    lr: Annotated[LearningRate, "size of a step"] = 0.01
    weight_decay: Annotated[NonNegative, "weight of the parameters in the gradient"] = 0.0
    momentum: Annotated[ShareBelowOne, "share of the last step that the next step keeps"] = 0.0

    def init(self, params: Tree) -> SGDState:
        return SGDState(tree_map(torch.zeros_like, params) if self.momentum else None)

    def update(
        self, grads: Tree, params: Tree, state: SGDState, *, owned: bool = False
    ) -> tuple[Tree, SGDState]:
        numbers = self.lr, self.weight_decay, self.momentum
        if not is_zero(self.weight_decay):
            decay = self.weight_decay
            grads = on_leaves(lambda g, p: g + decay * p, grads, params, numbers=numbers)
        if self.momentum:
            # torch starts from the first gradient, which equals a start with zero velocity.
            kept = self.momentum
            grads = on_leaves(lambda v, g: kept * v + g, state.velocity, grads, numbers=numbers)
            state = SGDState(grads)
        return on_leaves(lambda p, g: p - self.lr * g, params, grads, numbers=numbers), state


@record
class SGDState:
    """The running sum of gradients, or None without momentum."""

    velocity: Tree


OPTIMIZERS: dict[str, type[Adam | SGD]] = {"adam": Adam, "sgd": SGD}
