"""The interface of an engine, and the registry of engines.

This module does not import torch, because the command line's help imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from atoll.core.errors import ConfigError, check_name

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.core.graph import Graph
    from atoll.core.message import Message
    from atoll.core.method import Step
    from atoll.core.tree import Tree
    from atoll.engines.prepare import EngineInputs


class Engine(Protocol):
    """Run client steps. An engine on this machine also owns the graphs and private states."""

    @property
    def name(self) -> str: ...
    def run(
        self, step: Step, positions: Sequence[int], message: Message, keys: Tensor, round: int
    ) -> Tree:
        """Return the replies of the clients at `positions`, stacked in that order."""

    def export_states(self) -> Tree: ...  # for a checkpoint: private states, or a record of them
    def import_states(self, states: Tree) -> None: ...  # continue from exported states


@runtime_checkable
class Recordable(Protocol):
    """An engine whose rounds can be recorded, of one run or of several at once.

    A program computes a step for a group of clients. A step changes nothing in the engine except
    the programs' private states, so that a recorded round can take and return them. The engine can
    run clients whose positions only the device knows.
    """

    graphs: Sequence[Graph]
    lazy: bool  # whether graphs are loaded on demand

    def run_sampled(self, step: Step, positions: Tensor, message: Message, keys: Tensor) -> Tree:
        """Return the stacked replies of the clients at `positions`, which only the device knows."""

    def stacked_states(self) -> Tree: ...  # of all clients, in the clients' order
    def states_finite(self) -> bool: ...  # whether all numbers of all states are finite
    def regroup(self) -> bool: ...  # stack states by program; False if only some clients have one
    def program_states(self) -> dict[Members, Tree]: ...  # of each program; None before its first
    def put_states(self, states: Mapping[Members, Tree]) -> None: ...  # from `program_states`
    def substituted(
        self, states: Mapping[Members, Tree], graphs: Mapping[Members, Graph] | None = None
    ) -> AbstractContextManager[None]:
        """Give clients these states, and these graphs if given, inside the block."""

    def read_by_programs(self) -> object: ...  # tensors besides their inputs; recordings keep these
    def forget_stacks(self) -> None: ...  # free stacked graphs; a program restacks them on demand
    def record_steps(self, after: int | None) -> None:
        """Record each step that runs more than `after` times from now on. None ends this."""


Members = tuple[int, ...]  # positions of the clients that share a program
EngineFactory = Callable[["EngineInputs"], Engine]
"""A function that makes an engine for the clients of one run."""


@dataclass(frozen=True)
class BuiltIn:
    """The factory of an engine of this package."""

    make: EngineFactory  # imports the engine's module, which needs torch
    at_once: bool = False  # whether several runs can be one program of this engine

    def __call__(self, inputs: EngineInputs) -> Engine:
        return self.make(inputs)


def _serial(inputs: EngineInputs) -> Engine:
    from atoll.engines.serial import Serial

    return Serial(inputs.graphs())


def _fused(inputs: EngineInputs) -> Engine:
    from atoll.engines.fused import Fused

    return Fused(inputs.graphs(), inputs.chunk)


def _wire(inputs: EngineInputs) -> Engine:
    from atoll.engines.wire import Wire, make_probe

    graphs = inputs.graphs()
    return Wire(graphs, make_probe(inputs.federation, dict(inputs.views), graphs[0].real))


ENGINES: dict[str, EngineFactory] = {
    "serial": BuiltIn(_serial),
    "wire": BuiltIn(_wire),
    "fused": BuiltIn(_fused, at_once=True),
}
"""The engines by name."""
AUTO = "auto"  # the name that lets Atoll choose the engine


def choose_engine(wish: str) -> tuple[str, str]:
    """Return the name of the engine to use, and the reason for the choice."""
    if wish == AUTO:
        return "fused", "all clients run as one program; steps that cannot are looped"
    check_name("engine", wish, (AUTO, *ENGINES))
    return wish, "as asked"


def engine_factory(wish: str | EngineFactory) -> EngineFactory:
    """Return the factory of a named engine, or the given factory."""
    if isinstance(wish, str):
        check_name("engine", wish, ENGINES)
        return ENGINES[wish]
    if not callable(wish):
        raise ConfigError(
            f"engine cannot be {wish!r}; give a name ({', '.join(ENGINES)}) or a function that "
            "takes EngineInputs and returns an engine"
        )
    return wish


def engine_name(wish: str | EngineFactory) -> str:
    """Return the name of an engine for tables and files."""
    return wish if isinstance(wish, str) else getattr(wish, "__name__", type(wish).__name__)


def runs_at_once(wish: str | EngineFactory) -> bool:
    """Return whether several runs can be one program. A factory declares this by `at_once`."""
    return bool(getattr(engine_factory(wish), "at_once", False))
