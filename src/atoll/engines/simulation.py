"""A federation on one machine: its clients behind one engine, the root of all keys, the ledger."""

from __future__ import annotations

import torch

from atoll.core.batching import Batching
from atoll.core.federation import Federation
from atoll.core.method import Method
from atoll.core.random import make_key
from atoll.core.tree import Tree
from atoll.engines.base import EngineFactory, engine_factory
from atoll.engines.clients import Participants
from atoll.engines.ledger import Ledger
from atoll.engines.prepare import EngineInputs


class Simulation:
    """Clients on this machine, behind one engine.

    Args:
        federation: The clients' graphs.
        method: Whose views the clients precompute.
        engine: A name among `ENGINES`, or a factory.
        seed: Root of all keys.
        device: Where tensors live.
        chunk: Most clients in one program of the fused engine; 0 chooses.
        beside: How many simulations share the device's memory, itself included.
        batching: How clients cut their training into steps; None leaves it to the federation.
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
        beside: int = 1,
        batching: Batching | None = None,
    ) -> None:
        self.federation = federation
        self.numbers = torch.tensor(federation.numbers, device=device)
        self.root = make_key(seed, device)
        self.ledger = Ledger()
        batching = federation.batching if batching is None else batching
        inputs = EngineInputs(federation, dict(method.views), device, chunk, beside, batching)
        self.engine = engine_factory(engine)(inputs)

    def private_states(self) -> list[Tree]:
        """Every client's private state."""
        states: list[Tree] = self.engine.export_states()
        return states

    def clients(self, round: int) -> Participants:
        """All clients, in the given round; -1 is the time before the first."""
        everyone = torch.arange(len(self.federation), device=self.root.device)
        return Participants(self, round, everyone)
