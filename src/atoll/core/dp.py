"""Client-level differential privacy: clip a client's update, add noise, then send it.

    Δ_i = θ_i - x                          x is the received model, θ_i client i's trained model.
    Δ_i <- Δ_i min(1, C / ‖Δ_i‖)           C is `clip`. The norm covers all layers together.
    sent:  x + Δ_i + N(0, (z C)² I)        z is `noise`. The weight is 1.

`Noised` wraps a method. Engines run the wrapper's step, so a client sends nothing before it is
clipped and noised. All clients have equal weight, because a weight would disclose the amount of
data. The base method must send one update of one model (see `Method.not_private`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from atoll.core.aggregate import Mean, OfMean
from atoll.core.errors import ConfigError
from atoll.core.graph import Graph
from atoll.core.message import Message
from atoll.core.method import Clients, Method, Reply, TypedStep, client_step
from atoll.core.random import fold, normal
from atoll.core.task import TASKS
from atoll.core.tree import Empty, Tree, all_finite, flatten, leaves, structure, tree_map, unflatten
from atoll.core.wrapper import Wrapper

Noise = Callable[[Tree, Tensor], Tree]
"""(clipped update, key) -> standard normal numbers of the same shapes."""
LEAST_CLIP = 1e-30
"""Smallest clip. The rounding of floats can make a shorter update exceed its clip."""


def keyed_noise(update: Tree, key: Tensor) -> Tree:
    """Return noise that the seed reproduces. Use it only for simulations and tests."""
    flat, spec = flatten(update)
    keys = [fold(key, "noise", place) for place in range(len(flat))]
    noise = [normal(k, tuple(leaf.shape), leaf.dtype) for k, leaf in zip(keys, flat, strict=True)]
    return unflatten(noise, spec)


def clipped(update: Tree, clip: float) -> Tree:
    """Scale the update to a norm of at most `clip`. The whole tree has one Euclidean norm."""
    squares = [leaf.double().square().sum() for leaf in leaves(update)]
    length = torch.stack(squares).sum().sqrt()
    # If the norm overflows, the share is zero and the update is still bounded.
    share = clip / length.clamp(min=clip)
    # In double, because a float would round a tiny share by more than the clip allows.
    return tree_map(lambda leaf: (leaf.double() * share).to(leaf.dtype), update)


@dataclass(frozen=True)
class Noised(Wrapper):
    """A method whose clients send clipped and noised updates."""

    base: Method
    clip: float  # C, the largest norm of one client's update
    noise: float  # z, the standard deviation of one client's noise per parameter, divided by C
    delta: float = 1e-5  # for the reported epsilon; it does not change the reply
    source: Noise = keyed_noise  # a real site uses a secret source that cannot be repeated
    # If set, a non-finite update counts as zero and discloses nothing. A simulation stops at it.
    hides_divergence: bool = False

    tasks: ClassVar[tuple[str, ...]] = tuple(TASKS)
    paper: ClassVar[str] = (
        "McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018"
    )
    not_private: ClassVar[str] = "it is already"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not LEAST_CLIP <= self.clip < math.inf:
            allowed = f"a finite number above 0, at least {LEAST_CLIP:g}"
            raise ConfigError(f"dp: clip is {self.clip:g}; give {allowed}")
        if not 0 <= self.noise < math.inf:
            raise ConfigError(f"dp: noise is {self.noise:g}; give a finite number, not negative")
        why = self.base.why_not_private()
        if why:
            raise ConfigError(
                f"{type(self.base).__name__} cannot be made differentially private: {why}; remove "
                "--dp, or choose another method (docs/federation.md lists them)"
            )
        if not isinstance(getattr(self.base, "aggregate", Mean()), OfMean):
            raise ConfigError(
                "differential privacy accepts only aggregate=mean or adaptive, because the "
                "reported epsilon counts on the sum of all noise; remove --set aggregate, or --dp"
            )

    def init(self, clients: Clients) -> Tree:
        server = self.base.init(_OneUpdate(clients, self))
        if not leaves(self.base.deploy(server).tree):
            raise ConfigError(
                f"{type(self.base).__name__} shares no parameter of this network, so that there is "
                "no update to make private; remove --dp, or choose another network"
            )
        return server

    def round(self, server: Tree, clients: Clients) -> Tree:
        return self.base.round(server, _OneUpdate(clients, self))

    @client_step(vectorize=lambda method: method.base.train.vectorize)
    def train(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """Run the base's step, and reply with its clipped and noised update.

        No attribute of this class returns the base's step, because its reply is not private. The
        base's `discloses` is not declared again, because only the noised model leaves the client.
        """
        reply, state = self.base.train(graph, message, state, key)  # type: ignore[attr-defined]
        return self.release(reply, message, key), state

    def release(self, reply: Any, received: Tree, key: Tensor) -> Any:
        """Return the clipped and noised form of a reply. An `Empty` reply is unchanged."""
        if type(reply) is Empty:  # any other reply may contain plain values in addition to tensors
            return reply
        parts = {part.name for part in fields(reply)} if is_dataclass(reply) else set()
        if parts != {"model", "weight"} or structure(reply.model) != structure(received):
            raise ConfigError(
                f"{type(self.base).__name__} declares that it can be made differentially private, "
                "but its reply is not one update of the received model and a weight"
            )
        update = tree_map(torch.sub, reply.model, received)
        if self.hides_divergence and not all_finite(update):
            update = tree_map(torch.zeros_like, update)
        update = clipped(update, self.clip)
        noise, scale = self.source(update, fold(key, "dp")), self.clip * self.noise
        # A site's noise has more digits than the model: add it first, so both are rounded once.
        model = tree_map(lambda x, u, n: (u + scale * n + x).to(x.dtype), received, update, noise)
        return replace(reply, model=model, weight=torch.ones_like(reply.weight))


class _OneUpdate:
    """Clients (`core.method.Clients`) whose only replies are noised updates."""

    def __init__(self, clients: Clients, method: Noised) -> None:
        self.clients, self.method = clients, method

    positions, numbers, total, replies, round = (
        property(attrgetter(f"clients.{name}"))
        for name in ("positions", "numbers", "total", "replies", "round")
    )
    key, require_finite, happens = (
        property(attrgetter(f"clients.{name}")) for name in ("key", "require_finite", "happens")
    )

    def __len__(self) -> int:
        return len(self.clients)

    def map(self, step: TypedStep[Reply], message: Message) -> Reply:
        if step.name != "train" or step.owner is not self.method.base:
            raise ConfigError(
                f"{type(self.method.base).__name__} declares that it can be made differentially "
                f"private, but its clients also answer step '{step.name}'"
            )
        reply: Reply = self.clients.map(self.method.train, message)
        return reply

    def sample(self, fraction: float) -> Clients:
        return _OneUpdate(self.clients.sample(fraction), self.method)
