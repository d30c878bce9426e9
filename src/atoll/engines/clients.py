"""The clients behind one engine, and a round's view of them, with sampling and a ledger."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from atoll.core.batching import Batching
from atoll.core.clock import OFF, Clock
from atoll.core.errors import ConfigError, ServerDiverged, StepError
from atoll.core.federation import Federation
from atoll.core.message import Message
from atoll.core.method import Method, Step
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree, all_finite, leaves, named_leaves, num_bytes, take, tree_map
from atoll.engines.base import Engine, EngineFactory, Recordable, engine_factory
from atoll.engines.ledger import Ledger
from atoll.engines.prepare import EngineInputs
from atoll.engines.recording import ROUND, KeyPart, NotRecordable, Tape, filled


class Backend(ABC):
    """The clients of a federation behind one engine, with their numbers and the run's root key."""

    def __init__(self, federation: Sized, numbers: Tensor, root: Tensor, engine: Engine) -> None:
        self.federation, self.numbers, self.root, self.engine = federation, numbers, root, engine
        self.ledger = Ledger()

    @abstractmethod
    def private_states(self) -> list[Tree]:
        """Return the clients' private states, as far as they are visible here."""

    @abstractmethod
    def clients(self, round: int) -> Participants:
        """Return all reachable clients in a round. Round -1 is before the first round."""


@dataclass
class Participants:
    """The clients that take part in one round (`core.method.Clients`)."""

    simulation: Backend
    number: int  # of the round
    positions: Tensor
    replies: dict[str, Tree] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)  # how often each step was mapped
    tape: Tape | None = None  # in a recorded round, collects values that are read or counted later
    sampled: bool = False  # whether positions were drawn on the device, unknown to Python

    @property
    def numbers(self) -> Tensor:
        return self.simulation.numbers[self.positions]

    @property
    def total(self) -> int:
        return len(self.simulation.federation)

    @property
    def round(self) -> int:
        if self.tape is None:
            return self.number
        if self.tape.shown is None:
            raise NotRecordable("what it does depends on the number of the round")
        return self.tape.shown

    @property
    def key(self) -> Tensor:
        return self._key("server", ROUND)

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    def map(self, step: Step, message: Message) -> Tree:
        sim, engine = self.simulation, self.simulation.engine
        call = self.calls.get(step.name, 0)
        self.calls[step.name] = call + 1
        base = self._key("step", step.name, ROUND, call)
        if self.sampled:
            assert isinstance(engine, Recordable)
            reply = engine.run_sampled(step, self.positions, message, fold(base, sim.numbers))
            who: Sequence[int] = ()
        else:
            # All clients take part in a recorded round without a draw.
            who = self.positions.tolist() if self.tape is None else range(self.total)
            numbers = sim.numbers if self.tape is not None else sim.numbers[self.positions]
            keys = fold(base, numbers)
            reply = engine.run(step, who, message, keys, self.number)
        down, up = message.bytes_for_one(self.total), num_bytes(reply) // len(self)
        if self.tape is not None:
            self.tape.traffic.append((step.name, self.sampled, down, up))
            tree = reply
            if not leaves(reply) and not step.keeps_state:
                assert isinstance(engine, Recordable)
                tree = take(engine.stacked_states(), self.positions)
            self.tape.watch(tree, step.name, sampled=self.sampled)
        else:
            self._stop_if_not_finite(step, reply)
            sim.ledger.add(self.number, step.name, who, down, up)
        self.replies[step.name] = reply
        return reply

    def sample(self, fraction: float) -> Participants:
        """Draw a share of the clients (rounded up) without replacement, by the round's key."""
        if not 0 < fraction <= 1:
            raise ConfigError(f"fraction {fraction} is not possible; give a number in (0, 1]")
        # Rounded first, so that 0.29 of 100 clients is 29 and not 30.
        count = max(1, -int(-round(len(self) * fraction, 9) // 1))
        if count == len(self):
            return replace(self, replies={})
        # Sort by hashes of the numbers, so that the draw does not depend on the clients' order.
        draw = fold(self._key("sample", ROUND), self.simulation.numbers[self.positions])
        chosen = torch.argsort(draw, stable=True)[:count]
        positions, sampled = self.positions[chosen].sort().values, self.tape is not None
        # The calls are shared: a step on all clients and then on a share gets fresh noise.
        return replace(self, positions=positions, replies={}, sampled=sampled)

    def require_finite(self, tree: Tree, problem: str) -> None:
        if self.tape is not None:
            self.tape.watch(tree_map(lambda leaf: leaf.unsqueeze(0), tree), problem=problem)
        elif not all_finite(tree):
            raise ServerDiverged(self.number, problem)

    def happens(self, condition: Tensor) -> bool:
        if self.tape is None:
            return bool(condition)
        self.tape.doubts.append(condition)
        return False

    def _key(self, *parts: KeyPart) -> Tensor:
        if self.tape is not None:
            return self.tape.key(*parts)
        return fold(self.simulation.root, *filled(parts, self.number))

    def _stop_if_not_finite(self, step: Step, reply: Tree) -> None:
        """Raise an error if a number is not finite. It names the first such client."""
        if leaves(reply):
            if all_finite(reply):
                return
            rows = [take(reply, row) for row in range(len(self))]
        else:
            # Nothing leaves the client (Local), so check its private state.
            engine = self.simulation.engine
            if step.keeps_state or (isinstance(engine, Recordable) and engine.states_finite()):
                return
            states = self.simulation.private_states()
            rows = [states[p] for p in self.positions.tolist()] if states else []
        for position, row in zip(self.positions.tolist(), rows, strict=False):
            if not all_finite(row):
                bad = next(name for name, leaf in named_leaves(row) if not all_finite(leaf))
                raise client_diverged(position, step.name, self.number, bad)


def client_diverged(position: int, step: str, number: int, name: str) -> StepError:
    """Return the error for a client with a number that is not finite."""
    problem = f"training diverged ('{name}' is not finite: the loss is nan); lower the learning "
    return StepError(position, step, number, f"{problem}rate or check the features")


class Simulation(Backend):
    """Clients on this machine, behind one engine. `EngineInputs` explains the options."""

    def __init__(
        self,
        federation: Federation,
        method: Method,
        *,
        engine: str | EngineFactory = "fused",  # a name among `ENGINES`, or a factory
        seed: int = 0,
        device: torch.device | str = "cpu",
        chunk: int = 0,
        runs_per_device: int = 1,
        batching: Batching | None = None,  # None: use the batching of the federation
        clock: Clock = OFF,
    ) -> None:
        batching = federation.batching if batching is None else batching
        views = dict(method.views)
        inputs = EngineInputs(federation, views, device, chunk, runs_per_device, batching, clock)
        numbers, root = torch.tensor(federation.numbers, device=device), make_key(seed, device)
        super().__init__(federation, numbers, root, engine_factory(engine)(inputs))

    def private_states(self) -> list[Tree]:
        states: list[Tree] = self.engine.export_states()
        return states

    def clients(self, round: int) -> Participants:
        everyone = torch.arange(len(self.federation), device=self.root.device)
        return Participants(self, round, everyone)
