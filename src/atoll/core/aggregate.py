"""How a server combines the clients' models: `average`, `mix`, and rules in the mean's place.

    server <- first_server(self.aggregate, model)                    once, in `init`
    server <- next_server(self.aggregate, server, reply, key)    in every round

A method that averages has a field `aggregate`, a `Rule`; `--set aggregate=median` chooses one. The
server's tree keeps a rule's state: in `Averaged` if the tree is the model itself, else in a field
`rule` of the method's own record (`aggregated`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.random import fold
from atoll.core.tree import Tree, record, tree_map

T = TypeVar("T")


@record
class Update:
    """What a client of an averaging method sends: its trained model, and its weight in the mean."""

    model: Tree
    weight: Tensor


class Rule(Protocol):
    """Turns many updates into one. Rules are frozen dataclasses of their parameters."""

    def init(self, model: Tree) -> Tree:
        """The first state, None for none; every round returns one of the same shapes."""

    def __call__(
        self, updates: Tree, weight: Tensor, key: Tensor, state: Tree
    ) -> tuple[Tree, Tree]:
        """One update and the next state, from stacked updates (K, ...) and their weights (K,).

        An update is a participant's model minus the received one. The key is for the rule's noise.
        """


class Stateless(ABC):
    """A rule that remembers nothing."""

    def init(self, model: Tree) -> None:
        return None

    def __call__(self, updates: T, weight: Tensor, key: Tensor, state: None) -> tuple[T, None]:
        return self.combined(updates, weight), None

    @abstractmethod
    def combined(self, updates: T, weight: Tensor) -> T:
        """One update from many."""


@dataclass(frozen=True)
class Mean(Stateless):
    """The weighted mean."""

    def combined(self, updates: T, weight: Tensor) -> T:
        return average(updates, weight)


@dataclass(frozen=True)
class Median(Stateless):
    """The median of every parameter, each client counting the same (Yin et al., 2018)."""

    def combined(self, updates: T, weight: Tensor) -> T:
        def median(stacked: Tensor) -> Tensor:
            ordered, count = stacked.sort(dim=0).values, len(stacked)
            # The mean of the two middle values of an even number.
            return torch.lerp(ordered[(count - 1) // 2], ordered[count // 2], 0.5)

        return tree_map(median, updates)


Aggregate = Annotated[Rule, "rule that makes one model of the clients' models"]
"""The type of a method's field `aggregate`."""
RULES: dict[str, type[Rule]] = {"mean": Mean, "median": Median}
"""Every rule, by the name that `--set aggregate=NAME` gives it."""


@record
class Averaged:
    """The server's tree of a method that keeps only a model, with the state of its rule."""

    model: Tree
    rule: Tree


def model_of(server: Tree) -> Tree:
    """The model in a server's tree: its field `model`, or else the whole tree."""
    return getattr(server, "model", server)


def with_model(server: Tree, model: Tree) -> Tree:
    """The server's tree with another model (`model_of`)."""
    return replace(server, model=model) if hasattr(server, "model") else model


def first_server(rule: Rule, model: Tree) -> Tree:
    """The server's first tree: the model, with the rule's state if the rule has one."""
    state = rule.init(model)
    return model if state is None else Averaged(model, state)


def next_server(rule: Rule, server: Tree, reply: Update, key: Tensor) -> Tree:
    """The server's next tree, from the replies to its model, stacked."""
    model, state = aggregated(rule, server, reply, key)
    return model if state is None else Averaged(model, state)


def aggregated(rule: Rule, server: Tree, reply: Tree, key: Tensor) -> tuple[Tree, Tree]:
    """The next model and state of the rule; server and reply are a method's own records."""
    state = getattr(server, "rule", None)
    return combine(rule, model_of(server), reply.model, reply.weight, key, state)


def combine(
    rule: Rule, received: T, models: T, weight: Tensor, key: Tensor, state: Tree
) -> tuple[T, Tree]:
    """The next model and state, from the received model, the stacked models and their weights."""
    if type(rule) is Mean:
        # Not received + mean update: adding and subtracting the model would round twice.
        return average(models, weight), state
    updates = tree_map(lambda after, before: after - before, models, received)
    update, state = rule(updates, weight, fold(key, "aggregate"), state)
    return tree_map(torch.add, received, update), state


def average(stacked: T, weight: Tensor | None = None) -> T:
    """Weighted mean over clients of stacked trees (K, ...); uniform without weights."""
    if weight is None:
        return tree_map(lambda leaf: leaf.mean(0), stacked)
    share = weight / weight.sum()
    return tree_map(lambda leaf: _weighted(share.to(leaf.dtype), leaf), stacked)


def mix(stacked: T, matrix: Tensor) -> T:
    """New model i = sum_j matrix[i, j] * model j, for stacked trees (K, ...) and matrix (M, K)."""
    return tree_map(lambda leaf: _weighted(matrix.to(leaf.dtype), leaf), stacked)


def _weighted(weight: Tensor, leaf: Tensor) -> Tensor:
    if not leaf.is_floating_point():
        # Weights turned into whole numbers would all be zero.
        raise TypeError(f"only floating-point tensors can be averaged, not {leaf.dtype}")
    flat = leaf.reshape(leaf.shape[0], leaf.shape[1:].numel())
    return (weight @ flat).reshape((*weight.shape[:-1], *leaf.shape[1:]))


def cosines(rows: Tensor) -> Tensor:
    """Cosines of all pairs of rows, (K, K); a zero row equals only itself."""
    unit = functional.normalize(rows, dim=-1)
    same = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    return torch.where(same, 1.0, unit @ unit.T)


def put(stacked: T, positions: Tensor, rows: T) -> T:
    """Stacked trees (N, ...) with the rows at `positions` replaced by `rows` (K, ...)."""
    return tree_map(lambda old, new: old.index_copy(0, positions, new), stacked, rows)


def spread(tree: T, size: int) -> T:
    """The same tree `size` times, stacked: a common start for personalised models."""
    return tree_map(lambda leaf: leaf.expand(size, *leaf.shape).clone(), tree)
