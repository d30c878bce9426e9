"""A federation on one machine: rounds, participants, keys, the ledger, and an engine underneath."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.core.errors import ConfigError, StepError, unknown
from atoll.core.federation import Federation, Lazily, each
from atoll.core.graph import Distinct, Graph, Matrix, Sparse, View, cast, moved, with_views
from atoll.core.message import Message
from atoll.core.method import Method, Step
from atoll.core.minibatch import with_parts
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree, all_finite, leaves, named_leaves, num_bytes, take, tree_map
from atoll.engines.fused import Fused
from atoll.engines.ledger import Ledger
from atoll.engines.recording import ROUND, NotRecordable, Tape, filled
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

    def export_states(self) -> Any:
        """Every client's private state, for a checkpoint, or where to find it."""

    def import_states(self, states: Any) -> None:
        """Continue from what `export_states` gave."""


class Backend(Protocol):
    """What `Participants` need: the clients' numbers, the root of all keys, a ledger, an engine."""

    @property
    def federation(self) -> Sized:
        """The clients; only how many there are counts here."""

    @property
    def numbers(self) -> Tensor:
        """Each client's own number, (K,) int64."""

    @property
    def root(self) -> Tensor:
        """The root key."""

    @property
    def ledger(self) -> Ledger:
        """Where traffic is noted."""

    @property
    def engine(self) -> Engine:
        """What runs steps."""

    def private_states(self) -> list[Tree]:
        """The clients' private states, as far as they can be seen from here."""

    def clients(self, round: int) -> Participants:
        """All clients that can be reached, in the given round; -1 is the time before the first."""


class Simulation:
    """Clients on this machine, behind one engine.

    Args:
        federation: The clients' graphs.
        method: Whose views the clients precompute.
        engine: "serial", "wire" or "fused".
        seed: Root of all keys.
        device: Where tensors live.
        chunk: Most clients in one program of the fused engine; 0 chooses.
        beside: How many simulations share the device's memory, itself included.
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
        beside: int = 1,
    ) -> None:
        views = dict(method.views)
        self.federation = federation
        self.graphs = kept_ready(federation, views, device, beside)
        self.numbers = torch.tensor(federation.numbers, device=device)
        self.root = make_key(seed, device)
        self.ledger = Ledger()
        self.engine = self._engine(engine, self.graphs, views, chunk)

    def _engine(self, name: str, graphs: Any, views: dict[str, View], chunk: int) -> Engine:
        if name == "serial":
            return Serial(graphs)
        if name == "wire":
            return Wire(graphs, make_probe(self.federation, views, graphs[0].real))
        if name == "fused":
            return Fused(graphs, chunk)
        raise unknown("engine", name, ENGINES)

    def private_states(self) -> list[Tree]:
        """Every client's private state."""
        states: list[Tree] = self.engine.export_states()
        return states

    def clients(self, round: int, tape: Tape | None = None) -> Participants:
        """All clients, in the given round; -1 is the time before the first."""
        everyone = torch.arange(len(self.federation), device=self.root.device)
        return Participants(self, round, everyone, tape=tape)


READY_BYTES = 2 << 30
"""Most bytes of graphs that stay prepared while nobody trains on them."""


def kept_ready(
    federation: Federation, views: Mapping[str, View], device: torch.device | str, beside: int
) -> Sequence[Graph]:
    """`prepared` graphs of a federation; those that were wanted last are found again."""
    recipes = tuple((name, _recipe(views[name])) for name in sorted(views))
    wanted = recipes, torch.device(device), torch.get_default_dtype(), beside
    try:
        found = federation.ready.get(wanted)
    except TypeError:  # a view that is made with a list cannot be looked up
        return prepared(federation.graphs, views, device, beside)
    if found is not None:
        return found
    federation.ready.clear()
    graphs = prepared(federation.graphs, views, device, beside)
    if not isinstance(graphs, Lazily) and num_bytes(list(graphs)) <= READY_BYTES:
        federation.ready[wanted] = graphs
    return graphs


def prepared(
    graphs: Sequence[Graph],
    views: Mapping[str, View],
    device: torch.device | str = "cpu",
    beside: int = 1,
) -> Sequence[Graph]:
    """Clients' graphs as steps want them: views filled in, in the default type, on the device.

    `beside` as in `Simulation`.
    """
    dtype = torch.get_default_dtype()

    def one(graph: Graph) -> Graph:
        # Views are made where they are used: which product is cached depends on the device.
        there = cast(graph, dtype=graph.real.dtype, device=device)
        ready: Graph = cast(with_views(there, views), dtype=dtype, device=device)
        return ready

    cuda = torch.device(device).type == "cuda"
    if cuda and not isinstance(graphs, Lazily):
        graphs = moved(tuple(graphs), device)
    placed = each(one, graphs)
    if cuda:
        placed = with_dense_views(placed, beside)
    # Most graphs of a client train: predicting them to score the others would cost much.
    return each(with_parts, placed)


DENSE_BYTES = 16 << 30
"""Most bytes of matrices, of all runs at once, that are stored with their zeros on a GPU."""

DENSE_NODES = 640
"""Most nodes of a client whose adjacency is multiplied with its zeros on a GPU."""


def with_dense_views(graphs: Sequence[Graph], beside: int = 1) -> tuple[Graph, ...]:
    """Feature views, and adjacencies of small clients, with all their zeros, where memory allows.

    A program of several runs has the graphs of each: `beside` is how many share the memory.

    A frequent word is a very long row of the transpose, which one thread block of a GPU walks alone
    (Coauthor CS, 10 clients, FedAvg on an H200: 0.41 s a round with sparse features, 0.04 dense).
    A sparse product has the same trouble with a node of many neighbours: 40 us on Cora in ten
    clients where the dense one takes 8.
    """
    views = [view for graph in graphs for view in graph.views.values()]
    features = sum(math.prod(view.shape) for view in views if _has_features(view))
    squares = [view for view in views if isinstance(view, Sparse) and view.square]
    cells, wide = sum(math.prod(view.shape) for view in squares), graphs[0].real.element_size()
    most = DENSE_BYTES // (beside * wide)
    small = max(graph.num_nodes for graph in graphs) <= DENSE_NODES and cells <= most

    def dense(view: Matrix) -> Matrix:
        if isinstance(view, Sparse) and view.square:
            return replace(view, dense=view.to_dense()) if small else view
        if isinstance(view, Tensor) or features > most:
            return view
        return view.to_dense()

    return tuple(
        replace(graph, views={name: dense(view) for name, view in graph.views.items()})
        for graph in graphs
    )


def _recipe(view: View) -> Any:
    """What makes two views the same: a partial function is like no other, even if made alike."""
    if not isinstance(view, partial):
        return view
    return view.func, view.args, tuple(sorted(view.keywords.items()))


def _has_features(view: Matrix) -> bool:
    return isinstance(view, Distinct) or (isinstance(view, Sparse) and not view.square)


@dataclass
class Participants:
    """The clients that take part in one round (`core.method.Clients`).

    Attributes:
        number: The number of the round.
        positions: Which clients take part.
        replies: Last reply of each step in this round, for scoring.
        calls: How often each step was mapped in this round.
        tape: Where a round that is to be recorded leaves what it must not read or count itself.
        drawn: Whether the positions were drawn on the device, so that Python does not know them.
    """

    simulation: Backend
    number: int
    positions: Tensor
    replies: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    tape: Tape | None = None
    drawn: bool = False

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

    def map(self, step: Step, message: Message) -> Any:
        """Run the step on every participant; replies come back stacked, in client order."""
        sim, engine = self.simulation, self.simulation.engine
        call = self.calls.get(step.name, 0)
        self.calls[step.name] = call + 1
        base = self._key("step", step.name, ROUND, call)
        if self.drawn:
            assert isinstance(engine, Fused)
            reply = engine.run_drawn(step, self.positions, message, fold(base, sim.numbers))
            who: Sequence[int] = ()
        else:
            # Who takes part in a round that is recorded, and was not drawn, is everybody.
            who = self.positions.tolist() if self.tape is None else range(self.total)
            keys = fold(base, sim.numbers[self.positions])
            reply = engine.run(step, who, message, keys, self.number)
        down, up = message.bytes_for_one(self.total), num_bytes(reply) // len(self)
        if self.tape is not None:
            self.tape.traffic.append((step.name, self.drawn, down, up))
            told = reply if leaves(reply) or step.keeps_state else self._states()
            self.tape.watch(told, step.name, drawn=self.drawn)
        else:
            self._stop_if_not_finite(step, reply)
            sim.ledger.add(self.number, step.name, who, down, up)
        self.replies[step.name] = reply
        return reply

    def sample(self, fraction: float) -> Participants:
        """A share of the clients, rounded up, drawn by the round's key without replacement."""
        if not 0 < fraction <= 1:
            raise ConfigError(f"fraction {fraction} is not possible; give a number in (0, 1]")
        # Rounded first, so that 0.29 of 100 clients is 29 and not 30.
        count = max(1, -int(-round(len(self) * fraction, 9) // 1))
        if count == len(self):
            return replace(self, replies={})
        # Ranks of hashes, not of positions: the draw does not depend on the clients' order.
        draw = fold(self._key("sample", ROUND), self.simulation.numbers[self.positions])
        chosen = torch.argsort(draw, stable=True)[:count]
        # Calls are counted together: a step mapped on all and then on a share gets fresh noise.
        return replace(
            self,
            positions=self.positions[chosen].sort().values,
            replies={},
            drawn=self.tape is not None,
        )

    def require_finite(self, tree: Tree, problem: str) -> None:
        """Stop with the given sentence if a tensor of the server's own is not finite."""
        if self.tape is not None:
            self.tape.watch(tree_map(lambda leaf: leaf.unsqueeze(0), tree), problem=problem)
        elif not all_finite(tree):
            raise server_diverged(self.number, problem)

    def _key(self, *parts: Any) -> Tensor:
        if self.tape is not None:
            return self.tape.key(*parts)
        return fold(self.simulation.root, *filled(parts, self.number))

    def _states(self) -> Tree:
        engine = self.simulation.engine
        assert isinstance(engine, Fused)
        return take(engine.stacked_states(), self.positions)

    def _stop_if_not_finite(self, step: Step, reply: Tree) -> None:
        """Name the first client whose numbers are no numbers any more."""
        silent = not leaves(reply)
        if not silent and all_finite(reply):
            return
        positions = self.positions.tolist()
        if silent:
            # Nothing leaves the client (Local): then its private state must tell.
            states = self.simulation.private_states() if not step.keeps_state else []
            rows = [states[p] for p in positions] if states else []
        else:
            rows = [take(reply, row) for row in range(len(positions))]
        for position, row in zip(positions, rows, strict=False):
            if not all_finite(row):
                bad = next(name for name, leaf in named_leaves(row) if not all_finite(leaf))
                raise client_diverged(position, step.name, self.number, bad)


def client_diverged(position: int, step: str, number: int, name: str) -> StepError:
    """A client's numbers are no numbers any more."""
    return StepError(
        position,
        step,
        number,
        f"training diverged ('{name}' is not finite: the loss is nan); lower the learning rate or "
        "check the features",
    )


def server_diverged(number: int, problem: str) -> ConfigError:
    """A tensor of the server's own is not finite any more."""
    return ConfigError(f"round {number}: {problem}")
