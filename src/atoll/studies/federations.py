"""Federations that the cells of a study share are loaded and divided once.

Which seed, data and partition a federation has does not depend on the method that trains on it, so
what decides it is the configuration without everything that only decides the training.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from atoll.core.federation import Federation, Lazily
from atoll.core.tree import num_bytes
from atoll.engines.prepare import ready_graphs
from atoll.experiment.config import RunConfig, config_text
from atoll.experiment.hardware import available_memory
from atoll.experiment.problem import Data, make_federation
from atoll.experiment.protocols import Protocol

Made = tuple[Federation, list[str], RunConfig]
"""What `make_federation` returns."""
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
    made: Made
    group: str

    @property
    def size(self) -> int:
        """Bytes of the graphs, and of those that engines keep prepared."""
        federation = self.made[0]
        return num_bytes([list(federation.graphs), ready_graphs(federation)])


class Federations:
    """`make_federation` with a memory; give it to `run_config` of several runs.

    When the memory is full, other data and partitions make room, the oldest first; other seeds of
    the same do not, because runs that go through all seeds in turn would never find one again.

    Args:
        limit: Most bytes to keep; None takes a share of what is free now.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = available_memory() // SHARE if limit is None else limit
        self.made = 0  # how many were not found
        self._kept: dict[tuple[str, int, bool], _Kept] = {}

    def __call__(
        self, config: RunConfig, rules: Protocol, seed: int, data: Data | None, asked: RunConfig
    ) -> Made:
        if data is not None:  # an object has no name to be found by
            self.made += 1
            return make_federation(config, rules, seed, data, asked)
        group = group_of(asked)
        drawn = seed if rules.data_seed is None else rules.data_seed
        key = group, drawn, config.seeds > 1  # which is what the notes on a file depend on
        if key not in self._kept:
            self.made += 1
            made = make_federation(config, rules, seed, None, asked)
            self._keep(key, group, made)
            return made
        federation, notes, completed = self._kept[key].made
        training = {name: getattr(config, name) for name in TRAINING}
        return federation, notes, msgspec.structs.replace(completed, **training)

    def _keep(self, key: tuple[str, int, bool], group: str, made: Made) -> None:
        if isinstance(made[0].graphs, Lazily):  # made when asked for: there is nothing to keep
            return
        new = _Kept(made, group)
        others = [old for old, kept in self._kept.items() if kept.group != group]
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
