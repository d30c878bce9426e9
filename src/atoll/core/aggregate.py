"""Aggregation: how the server combines the clients' models.

    server <- first_server(self.aggregate, model)                once, in `init`
    server <- next_server(self.aggregate, server, reply, key)    in every round

`average` and `mix` are plain functions. A `Rule`, such as the median, replaces the mean: a method
that averages has a field `aggregate`, and `--set aggregate=median` selects the rule. `Adaptive` is
the server optimizer of FedOPT as a rule. The server's tree stores the rule's state: in `Averaged`
if the tree is only a model, otherwise in the field `rule` of the method's own record
(`aggregated`).
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.errors import ConfigError
from atoll.core.hyper import Limits, ShareBelowOne, check_hypers
from atoll.core.random import fold
from atoll.core.tree import Tree, record, tree_map
from atoll.core.vmap.leaves import on_leaves

T = TypeVar("T")


@record
class Update:
    """The reply of a client that trains one model: the model, and its weight in the mean."""

    model: Tree
    weight: Tensor


class Rule(Protocol):
    """Combines many updates into one update. A rule is a frozen dataclass of its parameters."""

    def init(self, model: Tree) -> Tree:
        """Return the initial state, or None. The state keeps its shapes in all rounds."""

    def __call__(
        self, updates: Tree, weight: Tensor, key: Tensor, state: Tree
    ) -> tuple[Tree, Tree]:
        """Return one update and the next state, given stacked updates (K, ...) and weights (K,).

        An update is a participant's model minus the received model. The key seeds the rule's noise.
        """


class Stateless(ABC):
    """A rule without state."""

    def init(self, model: Tree) -> None:
        return None

    def __call__(self, updates: T, weight: Tensor, key: Tensor, state: None) -> tuple[T, None]:
        return self.combined(updates, weight), None

    @abstractmethod
    def combined(self, updates: T, weight: Tensor) -> T:
        """Combine stacked updates (K, ...) with weights (K,) into one update."""


class OfMean(ABC):
    """A rule that reads the updates only through their weighted mean.

    Differential privacy accepts these rules, because its noise is in the mean. A subclass defines
    `step`. A rule that reads single updates derives from `Stateless`, or from nothing.
    """

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if cls.__call__ is not OfMean.__call__ or hasattr(cls, "combined"):
            raise ConfigError(
                f"the aggregation rule {cls.__name__} derives from OfMean, whose rules read only "
                "the mean of the updates; define `step`, or derive from Stateless"
            )

    def init(self, model: Tree) -> Tree:
        return None

    def __call__(
        self, updates: Tree, weight: Tensor, key: Tensor, state: Tree
    ) -> tuple[Tree, Tree]:
        return self.step(average(updates, weight), state)

    @abstractmethod
    def step(self, update: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Return the server's update and the next state, given the mean of the updates."""


@dataclass(frozen=True)
class Mean(OfMean):
    """The weighted mean of the updates."""

    def step(self, update: Tree, state: Tree) -> tuple[Tree, Tree]:
        return update, state


ServerOptimizer = Annotated[Literal["adam", "yogi", "adagrad", "sgd"], "optimizer of the server"]
ServerRate = Annotated[
    float | None,
    Limits(above=0, words="a positive learning rate"),
    "η_s: learning rate of the server; none: by optimizer",
]
ServerBeta1 = Annotated[
    float | None, Limits(low=0, below=1), "β1: decay of m per round; none: by optimizer"
]
ServerBeta2 = Annotated[ShareBelowOne, "β2: decay of v per round"]
ServerTau = Annotated[
    float,
    Limits(above=0, high=1e6, words="a positive number up to a million"),
    "τ: start of √v, and least divisor of a step",
]


@record
class Moments:
    """The state of `Adaptive`: running means of the update and of its square (None for sgd)."""

    mean: Tree
    square: Tree


@dataclass(frozen=True)
class Adaptive(OfMean):
    """A server optimizer whose gradient is the mean update Δ (Reddi et al., 2021).

        m <- β1 m + (1 - β1) Δ                   from zero.
        v <- v + Δ²                              adagrad.
        v <- v - (1 - β2) Δ² sign(v - Δ²)        yogi.
        v <- β2 v + (1 - β2) Δ²                  adam;  all from v = τ².
        update: η m / (√v + τ)                   sgd:  η m.

    There is no bias correction.
    """

    optimizer: ServerOptimizer = "adam"
    lr: ServerRate = None
    beta1: ServerBeta1 = None
    beta2: ServerBeta2 = 0.99
    tau: ServerTau = 1e-3

    def __post_init__(self) -> None:
        check_hypers(self)

    @property
    def rates(self) -> tuple[float, float]:
        """Return η and β1: the given values, or else the defaults of the optimizer."""
        lr, beta1 = SERVER_RATES[self.optimizer]
        return lr if self.lr is None else self.lr, beta1 if self.beta1 is None else self.beta1

    def init(self, model: Tree) -> Moments:
        square = None
        if self.optimizer != "sgd":
            square = tree_map(lambda x: torch.full_like(x, self.tau**2), model)
        return Moments(tree_map(torch.zeros_like, model), square)

    def step(self, update: Tree, state: Moments) -> tuple[Tree, Moments]:
        (lr, beta1), beta2, tau = self.rates, self.beta2, self.tau
        numbers = lr, beta1, beta2, tau

        def second(v: Any, new: Any) -> Any:
            if self.optimizer == "adagrad":
                return v + new * new
            if self.optimizer == "yogi":
                return v - (1 - beta2) * (new * new) * (v - new * new).sign()
            return v.lerp(new * new, 1 - beta2)

        mean = on_leaves(lambda d, m: d.lerp(m, beta1), update, state.mean, numbers=numbers)
        if self.optimizer == "sgd":
            return on_leaves(lambda m: lr * m, mean, numbers=numbers), Moments(mean, None)
        square = on_leaves(second, state.square, update, numbers=numbers)
        found = on_leaves(lambda m, v: lr * (m / (v.sqrt() + tau)), mean, square, numbers=numbers)
        return found, Moments(mean, square)


SERVER_RATES = {"adam": (0.03, 0.9), "yogi": (0.03, 0.9), "adagrad": (0.1, 0.0), "sgd": (1.0, 0.0)}
"""The defaults of η and β1 for each optimizer of `Adaptive`."""


@dataclass(frozen=True)
class Median(Stateless):
    """The median of every parameter. All clients have equal weight (Yin et al., 2018)."""

    def combined(self, updates: T, weight: Tensor) -> T:
        def median(stacked: Tensor) -> Tensor:
            ordered, count = stacked.sort(dim=0).values, len(stacked)
            # For an even number of clients: the mean of the two middle values.
            return torch.lerp(ordered[(count - 1) // 2], ordered[count // 2], 0.5)

        return tree_map(median, updates)


Aggregate = Annotated[Rule, "rule that combines the clients' models into one"]
"""The type of a method's field `aggregate`."""
RULES: dict[str, type[Rule]] = {"mean": Mean, "median": Median, "adaptive": Adaptive}
"""Every rule, by its name in `--set aggregate=NAME`."""


@record
class Averaged:
    """The server's tree of a method that stores only a model, with the state of its rule."""

    model: Tree
    rule: Tree


def model_of(server: Tree) -> Tree:
    """Return the model in a server's tree: the field `model` if it exists, else the whole tree."""
    return getattr(server, "model", server)


def with_model(server: Tree, model: Tree) -> Tree:
    """Replace the model in a server's tree (see `model_of`)."""
    return replace(server, model=model) if hasattr(server, "model") else model


def first_server(rule: Rule, model: Tree) -> Tree:
    """Return the server's first tree: the model, and the rule's state if the rule has one."""
    state = rule.init(model)
    return model if state is None else Averaged(model, state)


def next_server(rule: Rule, server: Tree, reply: Update, key: Tensor) -> Tree:
    """Return the server's next tree, given the stacked replies to its model."""
    model, state = aggregated(rule, server, reply, key)
    return model if state is None else Averaged(model, state)


def aggregated(rule: Rule, server: Tree, reply: Tree, key: Tensor) -> tuple[Tree, Tree]:
    """Return the next model and rule state, which a method with its own record stores itself."""
    state = getattr(server, "rule", None)
    if state is None and rule.init(model_of(server)) is not None:
        raise ConfigError(
            "the saved server has no state of this aggregation rule, because the run began with "
            "another rule; start the run again, or set the rule that it began with"
        )
    return combine(rule, model_of(server), reply.model, reply.weight, key, state)


def combine(
    rule: Rule, received: T, models: T, weight: Tensor, key: Tensor, state: Tree
) -> tuple[T, Tree]:
    """Combine the stacked models, trained from `received`. Return the model and the rule state."""
    if isinstance(rule, OfMean):
        # Not the mean of the updates: subtracting the received model would round every model.
        mean = average(models, weight)
        if type(rule) is Mean:
            return mean, state
        update, state = rule.step(on_leaves(operator.sub, mean, received), state)
        return on_leaves(operator.add, received, update), state
    updates = tree_map(lambda after, before: after - before, models, received)
    update, state = rule(updates, weight, fold(key, "aggregate"), state)
    return tree_map(torch.add, received, update), state


def average(stacked: T, weight: Tensor | None = None) -> T:
    """Return the weighted mean of K stacked trees (K, ...). By default all weights are equal."""
    if weight is None:
        return tree_map(lambda leaf: leaf.mean(0), stacked)
    share = weight / weight.sum()
    return tree_map(lambda leaf: _weighted(share.to(leaf.dtype), leaf), stacked)


def mix(stacked: T, matrix: Tensor) -> T:
    """Return M mixtures of K stacked trees: tree i is sum_j matrix[i, j] * tree j."""
    return tree_map(lambda leaf: _weighted(matrix.to(leaf.dtype), leaf), stacked)


def _weighted(weight: Tensor, leaf: Tensor) -> Tensor:
    if not leaf.is_floating_point():
        # Weights that are rounded to integers would all be zero.
        raise TypeError(f"only floating-point tensors can be averaged, not {leaf.dtype}")
    flat = leaf.reshape(leaf.shape[0], leaf.shape[1:].numel())
    return (weight @ flat).reshape((*weight.shape[:-1], *leaf.shape[1:]))


def cosines(rows: Tensor) -> Tensor:
    """Return cosines of all pairs of rows, (K, K). A zero row is similar only to itself."""
    unit = functional.normalize(rows, dim=-1)
    same = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    return torch.where(same, 1.0, unit @ unit.T)


def put(stacked: T, positions: Tensor, rows: T) -> T:
    """Replace the trees at K `positions` of N stacked trees (N, ...) by `rows` (K, ...)."""
    return tree_map(lambda old, new: old.index_copy(0, positions, new), stacked, rows)


def spread(tree: T, size: int) -> T:
    """Stack `size` copies of a tree, as the common start of personalised models."""
    return tree_map(lambda leaf: leaf.expand(size, *leaf.shape).clone(), tree)
