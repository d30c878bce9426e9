"""Federations that several runs share are loaded and divided once.

A federation does not depend on the method that trains on it. Its key is therefore the configuration
without all options that decide only the training.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from atoll.core.federation import LazyGraphs
from atoll.core.tree import num_bytes
from atoll.engines.prepare import ready_graphs
from atoll.experiment.config import RunConfig, config_text
from atoll.experiment.hardware import available_memory
from atoll.experiment.problem import Data, Divide, Division, Problem

TRAINING = (
    *("method", "rounds", "epochs", "fraction", "seeds", "seed", "engine", "device", "chunk"),
    *("set", "compat", "evaluate", "objects"),
)
"""What no federation depends on; every other option, also a future one, distinguishes two."""
SHARE = 4
"""Federations are kept in at most the free memory divided by this."""


@dataclass
class _Entry:
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

    The limit is in bytes; None takes a share of the free memory. `make` makes a federation that is
    not there; a function around `Problem.divide` may change it, for example hide the test nodes.
    """

    def __init__(self, limit: int | None = None, make: Divide = Problem.divide) -> None:
        self.limit = available_memory() // SHARE if limit is None else limit
        self.make = make
        self.made = 0  # how many were not found
        self._entries: dict[tuple[str, int, bool, int], _Entry] = {}

    def with_limit(self, limit: int) -> Self:
        """An empty cache of the same kind with another limit."""
        other = copy(self)
        other.limit, other._entries = limit, {}
        return other

    def __getstate__(self) -> dict[str, object]:
        """For another process, which makes its own federations."""
        return {**vars(self), "made": 0, "_entries": {}}

    def __call__(self, problem: Problem, seed: int) -> Division:
        config, group = problem.config, group_of(problem.given)
        # The notes on a file depend on whether there are several seeds.
        key = group, problem.seed_of_data(seed), config.seeds > 1, id(problem.data)
        if key in self._entries:
            made = self._entries[key].made
            training = {name: getattr(config, name) for name in TRAINING}
            return replace(made, config=msgspec.structs.replace(made.config, **training))
        self.made += 1
        made = self.make(problem, seed)
        if isinstance(made.federation.graphs, LazyGraphs):  # there is nothing to keep
            return made
        new = _Entry(made, group, problem.data)
        others = [old for old, entry in self._entries.items() if entry.group != group]
        while others and self._size() + new.size > self.limit:
            del self._entries[others.pop(0)]
        if self._size() + new.size <= self.limit:
            self._entries[key] = new
        return made

    def _size(self) -> int:
        return sum(entry.size for entry in self._entries.values())


def group_of(config: RunConfig) -> str:
    """What decides the clients of a run, but for the seed: equal for runs that share them."""
    plain = {name: getattr(RunConfig(), name) for name in TRAINING}
    return config_text(msgspec.structs.replace(config, **plain))
