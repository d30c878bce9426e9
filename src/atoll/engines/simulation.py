"""A federation on one machine: its clients behind one engine, the root of all keys, the ledger."""

from __future__ import annotations

import torch

from atoll.core.batching import Batching
from atoll.core.federation import Federation
from atoll.core.method import Method
from atoll.core.random import make_key
from atoll.core.tree import Tree
from atoll.engines.base import EngineFactory, engine_factory
from atoll.engines.clients import Backend, Participants
from atoll.engines.prepare import EngineInputs


class Simulation(Backend):
    """Clients on this machine, behind one engine (a name among `ENGINES`, or a factory).

    The method names the views that they precompute. A batching of None leaves it to the federation.
    The other options are those of `EngineInputs`.
    """

    def __init__(
        self,
        federation: Federation,
        method: Method,
        *,
        engine: str | EngineFactory = "fused",
        seed: int = 0,
        device: torch.device | str = "cpu",
        chunk: int = 0,
        runs_per_device: int = 1,
        batching: Batching | None = None,
    ) -> None:
        batching = federation.batching if batching is None else batching
        views = dict(method.views)
        inputs = EngineInputs(federation, views, device, chunk, runs_per_device, batching)
        numbers = torch.tensor(federation.numbers, device=device)
        super().__init__(
            federation, numbers, make_key(seed, device), engine_factory(engine)(inputs)
        )

    def private_states(self) -> list[Tree]:
        states: list[Tree] = self.engine.export_states()
        return states

    def clients(self, round: int) -> Participants:
        everyone = torch.arange(len(self.federation), device=self.root.device)
        return Participants(self, round, everyone)
