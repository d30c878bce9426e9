"""Client-level differential privacy around a method: clip the update, add noise, then send it.

    Δ_i = θ_i - x                          x the received model, θ_i the trained one
    Δ_i <- Δ_i min(1, C / ‖Δ_i‖)           the norm of the whole update, all layers together
    sent:  x + Δ_i + N(0, (z C)² I),  weight 1

`Noised` is a method around another one: engines run its step, so that nothing leaves a client
before it is clipped and noised. Every client counts alike, because a weight would disclose how much
data it has. Only for methods whose clients send one update of one model (`Method.not_private`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from atoll.core.aggregate import Mean
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
"""A float rounds an update below this by a share that the clip does not allow."""


def keyed_noise(update: Tree, key: Tensor) -> Tree:
    """Noise that the seed can reproduce: only for simulations and tests."""
    flat, spec = flatten(update)
    keys = [fold(key, "noise", place) for place in range(len(flat))]
    noise = [normal(k, tuple(leaf.shape), leaf.dtype) for k, leaf in zip(keys, flat, strict=True)]
    return unflatten(noise, spec)


def clipped(update: Tree, clip: float) -> Tree:
    """The update, shortened to at most `clip`; a whole tree has one Euclidean norm."""
    squares = [leaf.double().square().sum() for leaf in leaves(update)]
    length = torch.stack(squares).sum().sqrt()
    # A norm beyond all numbers still gives a bounded update: nothing of it.
    share = clip / length.clamp(min=clip)
    # In double: as a float a tiny share would be rounded by more than the clip allows.
    return tree_map(lambda leaf: (leaf.double() * share).to(leaf.dtype), update)


@dataclass(frozen=True)
class Noised(Wrapper):
    """A method whose clients send clipped and noised updates."""

    base: Method
    clip: float  # C, the most that one client may move the model
    noise: float  # z, the noise of one client as a multiple of C, for every parameter
    delta: float = 1e-5  # for the account of what is spent; it changes nothing that is sent
    source: Noise = keyed_noise  # a real site has its own, which no other can repeat
    # An update that is not finite counts as none and discloses nothing; a simulation stops at it.
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
                f"{type(self.base).__name__} cannot be made differentially private: {why}; leave "
                "--dp out, or choose another method (docs/federation.md lists them)"
            )
        if type(getattr(self.base, "aggregate", Mean())) is not Mean:
            raise ConfigError(
                "differential privacy accepts only aggregate=mean, because the reported epsilon "
                "counts on the sum of all noise; leave out --set aggregate, or --dp"
            )

    def init(self, clients: Clients) -> Tree:
        server = self.base.init(_OneUpdate(clients, self))
        if not leaves(self.base.deploy(server).tree):
            raise ConfigError(
                f"{type(self.base).__name__} shares no parameter of this network, so that there is "
                "no update to make private; leave --dp out, or choose another network"
            )
        return server

    def round(self, server: Tree, clients: Clients) -> Tree:
        return self.base.round(server, _OneUpdate(clients, self))

    @client_step(vectorize=lambda method: method.base.train.vectorize)
    def train(self, graph: Graph, message: Tree, state: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """Run the base's step and release its reply clipped and noised.

        No attribute of this class returns the base's step: its reply is not private. The noise
        covers what a field of that reply discloses of the private state.
        """
        reply, state = self.base.train(graph, message, state, key)  # type: ignore[attr-defined]
        return self.release(reply, message, key), state

    def release(self, reply: Any, received: Tree, key: Tensor) -> Any:
        """What may leave, of a reply to the received model."""
        if type(reply) is Empty:  # anything else may carry plain values beside its tensors
            return reply
        parts = {part.name for part in fields(reply)} if is_dataclass(reply) else set()
        if parts != {"model", "weight"} or structure(reply.model) != structure(received):
            raise ConfigError(
                f"{type(self.base).__name__} says that it can be made differentially private, but "
                "its reply is not one update of the received model and a weight"
            )
        update = tree_map(torch.sub, reply.model, received)
        if self.hides_divergence and not all_finite(update):
            update = tree_map(torch.zeros_like, update)
        update = clipped(update, self.clip)
        noise, scale = self.source(update, fold(key, "dp")), self.clip * self.noise
        # A site's noise is finer than the model's numbers: added first, it is rounded with them.
        model = tree_map(lambda x, u, n: (u + scale * n + x).to(x.dtype), received, update, noise)
        return replace(reply, model=model, weight=torch.ones_like(reply.weight))


class _OneUpdate:
    """Clients that answer only with noised updates (`core.method.Clients`)."""

    def __init__(self, clients: Clients, method: Noised) -> None:
        self.clients, self.method = clients, method

    positions, total, replies, round, key, require_finite, happens = (
        property(attrgetter(f"clients.{name}"))
        for name in ("positions", "total", "replies", "round", "key", "require_finite", "happens")
    )

    def __len__(self) -> int:
        return len(self.clients)

    def map(self, step: TypedStep[Reply], message: Message) -> Reply:
        if step.name != "train" or step.owner is not self.method.base:
            raise ConfigError(
                f"{type(self.method.base).__name__} says that it can be made differentially "
                f"private, but its clients also answer step '{step.name}'"
            )
        reply: Reply = self.clients.map(self.method.train, message)
        return reply

    def sample(self, fraction: float) -> Clients:
        return _OneUpdate(self.clients.sample(fraction), self.method)
