"""A federation on one machine: rounds, participants, keys, the ledger, and an engine underneath."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.core.batches import held_out
from atoll.core.errors import ConfigError, StepError, unknown
from atoll.core.federation import Federation, each
from atoll.core.graph import Graph, Sparse, View, cast, with_views
from atoll.core.message import Message
from atoll.core.method import Method, Step
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree, all_finite, leaves, named_leaves, num_bytes, take
from atoll.engines.fused import Fused
from atoll.engines.ledger import Ledger
from atoll.engines.serial import Serial
from atoll.engines.wire import Wire, make_probe

ENGINES = ("serial", "wire", "fused")


class Engine(Protocol):
    """Runs steps and owns the private states."""

    @property
    def name(self) -> str:
        """The engine's name."""

    def run(
        self, step: Step, positions: Sequence[int], message: Message, keys: Tensor, round: int
    ) -> Tree:
        """Replies of the clients at `positions`, stacked in that order."""

    def export_states(self) -> list[Tree]:
        """Every client's private state, for a checkpoint."""

    def import_states(self, states: Sequence[Tree]) -> None:
        """Continue from stored private states."""


class Simulation:
    """Clients on this machine, behind one engine.

    Args:
        federation: The clients' graphs.
        method: Whose views the clients precompute.
        engine: "serial", "wire" or "fused".
        seed: Root of all keys.
        device: Where tensors live.
        chunk: Most clients in one program of the fused engine; 0 chooses.
    """

    def __init__(
        self,
        federation: Federation,
        method: Method,
        *,
        engine: str = "fused",
        seed: int = 0,
        device: torch.device | str = "cpu",
        chunk: int = 0,
    ) -> None:
        dtype = torch.get_default_dtype()
        views = dict(method.views)

        def prepared(graph: Graph) -> Graph:
            # Views are made where they are used: which product is cached depends on the device.
            there = cast(graph, dtype=graph.real.dtype, device=device)
            ready: Graph = cast(with_views(there, views), dtype=dtype, device=device)
            return ready

        graphs = each(prepared, federation.graphs)
        if torch.device(device).type == "cuda":
            graphs = with_dense_features(graphs)
        # Most graphs of a client train: predicting them to score the others would cost much.
        graphs = each(lambda g: replace(g, held_out=held_out(g)) if g.batch_size else g, graphs)
        self.federation = federation
        self.numbers = torch.tensor(federation.numbers, device=device)
        self.root = make_key(seed, device)
        self.ledger = Ledger()
        self.engine = self._engine(engine, graphs, views, chunk)

    def _engine(self, name: str, graphs: Any, views: dict[str, View], chunk: int) -> Engine:
        if name == "serial":
            return Serial(graphs)
        if name == "wire":
            return Wire(graphs, make_probe(self.federation, views, graphs[0].real))
        if name == "fused":
            return Fused(graphs, chunk)
        raise unknown("engine", name, ENGINES)

    def clients(self, round: int) -> Participants:
        """All clients, in the given round; -1 is the time before the first."""
        everyone = torch.arange(len(self.federation), device=self.root.device)
        return Participants(self, round, everyone)


DENSE_BYTES = 16 << 30
"""Most bytes of feature matrices that are stored with their zeros on a GPU."""


def with_dense_features(graphs: Sequence[Graph]) -> tuple[Graph, ...]:
    """Feature views with all their zeros, where memory allows.

    A frequent word is a very long row of the transpose, which one thread block of a GPU walks alone
    (Coauthor CS, 10 clients, FedAvg on an H200: 0.41 s a round with sparse features, 0.04 dense).
    """
    views = [view for graph in graphs for view in graph.views.values()]
    features = [view for view in views if isinstance(view, Sparse) and not view.square]
    size = sum(math.prod(view.shape) * view.values.element_size() for view in features)
    if size > DENSE_BYTES:
        return tuple(graphs)

    def dense(view: Tensor | Sparse) -> Tensor | Sparse:
        return view.to_dense() if isinstance(view, Sparse) and not view.square else view

    return tuple(
        replace(graph, views={name: dense(view) for name, view in graph.views.items()})
        for graph in graphs
    )


@dataclass
class Participants:
    """The clients that take part in one round (`core.method.Clients`).

    Attributes:
        replies: Last reply of each step in this round, for scoring.
    """

    simulation: Simulation
    round: int
    positions: Tensor
    replies: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return len(self.simulation.federation)

    @property
    def key(self) -> Tensor:
        return fold(self.simulation.root, "server", self.round)

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    def map(self, step: Step, message: Message) -> Any:
        """Run the step on every participant; replies come back stacked, in client order."""
        sim, positions = self.simulation, self.positions.tolist()
        call = self.calls.get(step.name, 0)
        self.calls[step.name] = call + 1
        base = fold(sim.root, "step", step.name, self.round, call)
        keys = fold(base, sim.numbers[self.positions])
        reply = sim.engine.run(step, positions, message, keys, self.round)
        self._stop_if_not_finite(step, reply)
        up = num_bytes(reply) // len(self)
        down = message.bytes_for_one(self.total)
        sim.ledger.add(self.round, step.name, positions, down, up)
        self.replies[step.name] = reply
        return reply

    def sample(self, fraction: float) -> Participants:
        """A share of the clients, rounded up, drawn by the round's key without replacement."""
        if not 0 < fraction <= 1:
            raise ConfigError(f"fraction {fraction} is not possible; give a number in (0, 1]")
        # Rounded first, so that 0.29 of 100 clients is 29 and not 30.
        count = -int(-round(len(self) * fraction, 9) // 1)
        # Ranks of hashes, not of positions: the draw does not depend on the clients' order.
        sim = self.simulation
        draw = fold(fold(sim.root, "sample", self.round), sim.numbers[self.positions])
        chosen = torch.argsort(draw, stable=True)[: max(1, count)]
        # Calls are counted together: a step mapped on all and then on a share gets fresh noise.
        positions = self.positions[chosen].sort().values
        return Participants(sim, self.round, positions, calls=self.calls)

    def _stop_if_not_finite(self, step: Step, reply: Tree) -> None:
        """Name the first client whose numbers are no numbers any more."""
        silent = not leaves(reply)
        if not silent and all_finite(reply):
            return
        positions = self.positions.tolist()
        if silent:
            # Nothing leaves the client (Local): then its private state must tell.
            states = self.simulation.engine.export_states() if not step.keeps_state else []
            rows = [states[p] for p in positions] if states else []
        else:
            rows = [take(reply, row) for row in range(len(positions))]
        for position, row in zip(positions, rows, strict=False):
            if not all_finite(row):
                bad = next(name for name, leaf in named_leaves(row) if not all_finite(leaf))
                raise StepError(
                    position, step.name, self.round,
                    f"training diverged ('{bad}' is not finite: the loss is nan); lower the "
                    "learning rate or check the features",
                )  # fmt: skip
