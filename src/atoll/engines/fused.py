"""The fused engine: one tensor program for many clients, `vmap` of a step over stacked graphs.

Clients of similar size share a bucket, with padded graphs (`engines.stacking`). A bucket of one
client runs the step without `vmap`. On a CPU with several threads, buckets run in parallel. A step
that declares `vectorize=False` runs client by client.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor

from atoll.core.errors import AtollError, StepError, described
from atoll.core.federation import LazyGraphs
from atoll.core.graph import Graph
from atoll.core.message import Message, ToAll, ToEach
from atoll.core.method import Step
from atoll.core.tree import Tree, all_finite, concat, inside_transform, take, tree_map
from atoll.core.vmap.varied import Undecided
from atoll.engines import stacking
from atoll.engines.base import Members
from atoll.engines.programs import MOST_KEPT, Derived, PrivateStates, RecordedSteps, at_once
from atoll.engines.recording import NotRecordable
from atoll.engines.serial import Serial

log = logging.getLogger(__name__)


class Fused:
    """Run a step on whole buckets of clients. Private states stay stacked between rounds."""

    name = "fused"

    def __init__(self, graphs: Sequence[Graph], chunk: int = 0) -> None:
        self.graphs = graphs
        self.lazy = isinstance(graphs, LazyGraphs)
        self.chunk = chunk or stacking.CHUNK
        self.looped = Serial(graphs)
        self.stacked: dict[Members, Graph] = {}
        self.buckets: dict[Members, list[Members]] = {}
        self.states = PrivateStates(len(graphs))
        self.places: dict[Members, Tensor] = {}
        self.recorded: RecordedSteps | None = None
        self.derived = Derived()

    @cached_property
    def outlines(self) -> list[stacking.Outline]:
        return stacking.outline(self.graphs)

    def run(
        self, step: Step, positions: Sequence[int], message: Message, keys: Tensor, round: int
    ) -> Tree:
        if not step.vectorize:
            return self._loop(step, positions, message, keys, round)
        where = {position: row for row, position in enumerate(positions)}
        programs = self.programs(positions)

        def one(members: Members) -> tuple[Tree, Tree]:
            rows = tuple(where[p] for p in members)
            own = keys if rows == tuple(range(len(keys))) else keys[self._index(rows)]
            return self._run_bucket(step, members, message, own, round)

        done = self._in_parallel(one, programs)
        if not step.keeps_state:
            for members, (_, state) in zip(programs, done, strict=True):
                self.states.put(members, state)
        replies = concat([reply for reply, _ in done])
        rows = _rows(programs, positions)
        return replies if rows == tuple(range(len(rows))) else take(replies, self._index(rows))

    def run_sampled(self, step: Step, positions: Tensor, message: Message, keys: Tensor) -> Tree:
        # All clients compute, and the results of clients that were not drawn are dropped: on a GPU
        # the program of all clients takes as long as a program of a few small ones.
        everyone = range(len(self.graphs))
        self.regroup()
        before = dict(self.states.stacks)
        replies = self.run(step, everyone, message, keys, -1)
        if not step.keeps_state and before.keys() != self.states.stacks.keys():
            raise NotRecordable("private states begin in it")
        if not step.keeps_state:
            here = torch.zeros(len(self.graphs), dtype=torch.bool, device=positions.device)
            here = here.index_fill(0, positions, True)
            for members, stacked in self.states.stacks.items():
                chosen = partial(_where, here[self._index(members)])
                self.states.stacks[members] = tree_map(chosen, stacked, before[members])
        return take(replies, positions)

    def regroup(self) -> bool:
        # Look up all positions here, because a recorded round must not copy them to the device.
        programs = self.programs()
        for members in programs:
            if self.states.home[members[0]] is not None:
                self.states.put(members, self.states.get(members))
            self._index(members)
        self._index(_rows(programs, range(len(self.graphs))))
        return self.states.begun

    def programs(self, positions: Sequence[int] | None = None) -> list[Members]:
        """Return the groups of clients that share a program, of all clients or of `positions`."""
        roster = tuple(range(len(self.graphs)) if positions is None else positions)
        split = self.states.same_structure
        return [members for bucket in self._buckets(roster) for members in split(bucket)]

    def program_states(self) -> dict[Members, Tree]:
        return {members: self.states.stacks.get(members) for members in self.programs()}

    def put_states(self, states: Mapping[Members, Tree]) -> None:
        for members, state in states.items():
            if state is not None:
                self.states.put(members, state)

    @contextmanager
    def substituted(
        self, states: Mapping[Members, Tree], graphs: Mapping[Members, Graph] | None = None
    ) -> Iterator[None]:
        # A recording calls the round as a function of states. Under the `vmap` over several runs,
        # states and graphs are tensors of that `vmap`, which must not outlive it.
        own_states, own_graphs = self.states, self.stacked
        self.states = PrivateStates(len(self.graphs))
        self.put_states(states)
        if graphs is not None:
            self.stacked = dict(graphs)
        try:
            yield
        finally:
            self.states = own_states
            if graphs is not None:
                self.stacked = own_graphs

    def record_steps(self, after: int | None) -> None:
        self.recorded = None if after is None else self.recorded or RecordedSteps(after)

    def read_by_programs(self) -> object:
        return dict(self.stacked), dict(self.places)

    def forget_stacks(self) -> None:
        self.stacked.clear()

    def _index(self, numbers: Members) -> Tensor:
        """Return numbers as a cached tensor, because Python would wait for each copy to a GPU."""
        if numbers not in self.places:
            if len(self.places) >= MOST_KEPT + 2 * len(self.graphs):
                self.places.clear()
            self.places[numbers] = torch.tensor(numbers, device=self.graphs[0].y.device)
        return self.places[numbers]

    def _in_parallel(
        self, one: Callable[[Members], tuple[Tree, Tree]], programs: Sequence[Members]
    ) -> list[tuple[Tree, Tree]]:
        """Run every program once: on a CPU in parallel threads, the largest first, else in turn."""
        # Programs of small tensors use a second core better than one program's operations do.
        threads = torch.get_num_threads()
        # Transforms are known only to their own thread.
        if threads == 1 or len(programs) == 1 or self._on_gpu or inside_transform():
            return [one(members) for members in programs]
        for members in programs:
            self._graph(members)  # created before the threads need it
        size = {m: sum(self.outlines[p].nodes for p in m) for m in programs}
        try:
            flushed = sys.float_info.min / 2 == 0
            with ThreadPoolExecutor(threads, initializer=_settle, initargs=(flushed,)) as pool:
                begun = {m: pool.submit(one, m) for m in sorted(programs, key=lambda m: -size[m])}
                return [begun[members].result() for members in programs]
        finally:
            torch.set_num_threads(threads)  # MKL applies a thread's own setting to all threads

    def _run_bucket(
        self, step: Step, members: Members, message: Message, keys: Tensor, round: int
    ) -> tuple[Tree, Tree]:
        try:
            state = self.states.get(members)
            with torch.no_grad():
                return self._program(step, members, message, state, keys)
        except (AtollError, NotRecordable, Undecided):
            raise
        except Exception as error:
            problem = f"{described(error)} (in a program of {len(members)} clients)"
            if "vmap" in str(error):
                problem += (
                    "; one program trains all clients, so a step cannot select rows by a mask or "
                    "read a number: multiply by the mask (atoll.masked_mean), or write "
                    "@client_step(vectorize=False)"
                )
            raise StepError(members[0], step.name, round, problem) from error

    def _program(
        self, step: Step, members: Members, message: Message, states: Tree, keys: Tensor
    ) -> tuple[Tree, Tree]:
        """Compute one bucket as a function of tensors only, so that it can be recorded."""
        graph = self._graph(members)
        if not self._on_gpu and self.recorded is None and not inside_transform():
            graph = self.derived.added(step.owner, members, graph, states)
        tree, shared = message.tree, isinstance(message, ToAll)
        # A bucket of all clients already has the rows in order, so nothing is copied.
        if isinstance(message, ToEach) and len(members) < len(self.graphs):
            tree = message.rows(self._index(members))

        def program(tree: Tree, states: Tree, keys: Tensor) -> tuple[Tree, Tree]:
            if len(members) > 1:
                return at_once(step, graph, tree, states, keys, shared)
            # `vmap` would cost time and cannot cut mini-batches. The results are stacked here.
            received = tree if shared else take(tree, 0)
            found = step(graph, received, take(states, 0), keys[0])
            stacked: tuple[Tree, Tree] = tree_map(lambda leaf: leaf.unsqueeze(0), found)
            return stacked

        if self.recorded is None:
            return program(tree, states, keys)
        return self.recorded.run(step, members, shared, program, tree, states, keys)

    def _loop(
        self, step: Step, positions: Sequence[int], message: Message, keys: Tensor, round: int
    ) -> Tree:
        if inside_transform():
            raise NotRecordable(f"step {step.name} runs client by client")
        log.info("step %s declares vectorize=False: its clients run one by one", step.name)
        self.looped.import_states(self.states.export())
        replies = self.looped.run(step, positions, message, keys, round)
        if not step.keeps_state:
            self.states.replace(self.looped.export_states())
        return replies

    def _buckets(self, positions: Members) -> list[Members]:
        """Return the buckets of some clients. Cache the last ones, and those of all clients."""
        if positions not in self.buckets:
            kept = {p: found for p, found in self.buckets.items() if len(p) == len(self.graphs)}
            nodes = math.inf if self._on_gpu else stacking.MOST_NODES
            made = stacking.make_buckets(self.outlines, positions, self.chunk, nodes)
            self.buckets = {**kept, positions: made}
            wanted = {members for found in self.buckets.values() for members in found}
            self.stacked = {m: graph for m, graph in self.stacked.items() if m in wanted}
        return self.buckets[positions]

    def _graph(self, members: Members) -> Graph:
        """Return the members' stacked graphs, or the only member's graph.

        Graphs that are loaded on demand are stacked in a temporary file.
        """
        if members not in self.stacked:
            if len(members) == 1 and not self.lazy:
                return self.graphs[members[0]]
            if len(self.stacked) >= 2 * max(1, sum(map(len, self.buckets.values()))):
                self.stacked.clear()  # buckets were split repeatedly
            made = [self.graphs[p] for p in members]
            graph = stacking.stack_graphs(made) if len(made) > 1 else made[0]
            self.stacked[members] = stacking.on_disk(graph) if self.lazy else graph
        return self.stacked[members]

    def stacked_states(self) -> Tree:
        whole = concat(list(self.states.stacks.values()))
        return take(whole, self._index(_rows(self.states.stacks, range(len(self.graphs)))))

    def states_finite(self) -> bool:
        return all_finite(list(self.states.stacks.values()))

    @cached_property
    def _on_gpu(self) -> bool:
        return self.graphs[0].y.is_cuda

    def export_states(self) -> list[Tree]:
        return self.states.export()

    def import_states(self, states: Sequence[Tree]) -> None:
        self.states.replace(states)


def _rows(programs: Iterable[Members], positions: Iterable[int]) -> Members:
    """Return the row of each of `positions` in the concatenated members of all programs."""
    row = {position: i for i, position in enumerate(chain.from_iterable(programs))}
    return tuple(row[position] for position in positions)


def _where(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(chosen.reshape(-1, *[1] * (new.dim() - 1)), new, old)


def _settle(flushed: bool) -> None:
    """Set up a thread for one program: one core, and denormals as in the main thread."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(flushed)
