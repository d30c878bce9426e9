"""Federations that several runs share are loaded and divided once.

Which seed, data and partition a federation has does not depend on the method that trains on it, so
what decides it is the configuration without everything that only decides the training.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from atoll.core.federation import Lazily
from atoll.core.tree import num_bytes
from atoll.engines.prepare import ready_graphs
from atoll.experiment.config import RunConfig, config_text
from atoll.experiment.hardware import available_memory
from atoll.experiment.problem import Data, Divide, Division, Problem

TRAINING = (
    "method",
    "rounds",
    "epochs",
    "fraction",
    "seeds",
    "seed",
    "engine",
    "device",
    "chunk",
    "set",
    "compat",
    "evaluate",
    "objects",
)
"""What no federation depends on; whatever else there is, or will be, tells two apart."""
SHARE = 4
"""Federations are kept in at most the free memory divided by this."""


@dataclass
class _Kept:
    made: Division
    group: str
    data: Data | None  # kept, so that no other object gets its identity

    @property
    def size(self) -> int:
        """Bytes of the graphs, and of those that engines keep prepared."""
        federation = self.made.federation
        return num_bytes([list(federation.graphs), ready_graphs(federation)])


class FederationCache:
    """The federations of several runs, each loaded and divided once.

    When the memory is full, other data and partitions make room, the oldest first; other seeds of
    the same do not, because runs that go through all seeds in turn would never find one again.

    Args:
        limit: Most bytes to keep; None takes a share of the free memory.
        make: Makes a federation that is not there; a function around `Problem.divide` may change
            it, for example to hide the test nodes.
    """

    def __init__(self, limit: int | None = None, make: Divide = Problem.divide) -> None:
        self.limit = available_memory() // SHARE if limit is None else limit
        self.make = make
        self.made = 0  # how many were not found
        self._kept: dict[tuple[str, int, bool, int], _Kept] = {}

    def with_limit(self, limit: int) -> Self:
        """An empty cache of the same kind with another limit."""
        other = copy(self)
        other.limit, other._kept = limit, {}
        return other

    def __getstate__(self) -> dict[str, object]:
        """For another process, which makes its own federations."""
        return {**vars(self), "made": 0, "_kept": {}}

    def __call__(self, problem: Problem, seed: int) -> Division:
        config, group = problem.config, group_of(problem.given)
        # The notes on a file depend on whether there are several seeds.
        key = group, problem.seed_of_data(seed), config.seeds > 1, id(problem.data)
        if key not in self._kept:
            self.made += 1
            made = self.make(problem, seed)
            self._keep(key, _Kept(made, group, problem.data))
            return made
        made = self._kept[key].made
        training = {name: getattr(config, name) for name in TRAINING}
        return replace(made, config=msgspec.structs.replace(made.config, **training))

    def _keep(self, key: tuple[str, int, bool, int], new: _Kept) -> None:
        if isinstance(new.made.federation.graphs, Lazily):  # there is nothing to keep
            return
        others = [old for old, kept in self._kept.items() if kept.group != new.group]
        while others and self._size() + new.size > self.limit:
            del self._kept[others.pop(0)]
        if self._size() + new.size <= self.limit:
            self._kept[key] = new

    def _size(self) -> int:
        return sum(kept.size for kept in self._kept.values())


def group_of(config: RunConfig) -> str:
    """What decides the clients of a run, but for the seed: equal for runs that share them."""
    plain = RunConfig()
    return config_text(
        msgspec.structs.replace(config, **{name: getattr(plain, name) for name in TRAINING})
    )
