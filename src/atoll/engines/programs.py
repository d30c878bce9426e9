"""What the fused engine keeps between programs: private states, recordings, derived trees."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.core.graph import Graph
from atoll.core.method import Step
from atoll.core.tree import Tree, flatten, leaves, num_bytes, stack, take
from atoll.core.vmap.stacks import vmap_trees
from atoll.engines.base import Members
from atoll.engines.recording import Recording, copied, new_pool, no_reads, shapes

log = logging.getLogger(__name__)

MOST_KEPT = 256  # lists of positions, and recordings
MOST_DERIVED = 1 << 29  # bytes of what clients derive that are kept
Program = Callable[..., tuple[Tree, Tree]]
"""(message, private states, keys) -> (replies, new private states) of clients that run at once."""


def at_once(
    step: Step, graphs: Graph, message: Tree, states: Tree, keys: Tensor, shared: bool
) -> tuple[Tree, Tree]:
    """The step for all clients at once; one message is for all of them if `shared`."""

    # A shared message is closed over: `vmap` then computes what depends on it only, once.
    def one(graph: Graph, state: Tree, key: Tensor, received: Tree = message) -> Tree:
        reply, state = step(graph, received, state, key)
        return reply, None if step.keeps_state else state

    own = () if shared else (message,)
    found: tuple[Tree, Tree] = vmap_trees(one, graphs, states, keys, *own)
    return found


class PrivateStates:
    """Private states: stacked where a program left them, so that a steady roster copies nothing.

    A stack lives as long as one client's newest state is in it. A client that moves to another
    program leaves a stale row behind. Members of a program are one tuple, compared by identity
    first: comparing its hundreds of numbers once per client would cost the square of the clients.
    """

    def __init__(self, size: int) -> None:
        # For each client the stack and the row of its state; None before it has one.
        self.home: list[tuple[Members, int] | None] = [None] * size
        self.stacks: dict[Members, Tree] = {}
        self.living: dict[Members, int] = {}  # how many clients' newest states a stack holds

    def get(self, members: Members) -> Tree:
        """The members' states, stacked; None if they have none yet."""
        homes = [self.home[position] for position in members]
        if homes[0] is None:
            return None
        if all(h is not None and (h[0] is members or h[0] == members) for h in homes):
            return self.stacks[members]
        return stack([self._one(p) for p in members])

    def put(self, members: Members, state: Tree) -> None:
        """Keep the members' states, stacked."""
        for row, position in enumerate(members):
            old = self.home[position]
            if old is not None and old[0] is members:
                continue
            if old is not None:
                self.living[old[0]] -= 1
                if not self.living[old[0]]:
                    del self.living[old[0]], self.stacks[old[0]]
            self.living[members] = self.living.get(members, 0) + 1
            self.home[position] = (members, row)
        self.stacks[members] = state

    def same_structure(self, bucket: Members) -> list[Members]:
        """Split a bucket where members' states differ in kind (some may have none yet)."""
        homes = [self.home[position] for position in bucket]
        if len({None if home is None else id(home[0]) for home in homes}) == 1:
            return [bucket]
        groups: dict[Hashable, list[int]] = {}
        kinds: dict[int, Hashable] = {}
        for position, home in zip(bucket, homes, strict=True):
            if home is not None and id(home[0]) not in kinds:
                # Structure and everything that is not a tensor must be equal in a stack.
                flat, spec = flatten(self.stacks[home[0]])
                fixed = (Tensor if isinstance(leaf, Tensor) else leaf for leaf in flat)
                kinds[id(home[0])] = spec, tuple(fixed)
            groups.setdefault(None if home is None else kinds[id(home[0])], []).append(position)
        return [bucket] if len(groups) == 1 else [tuple(group) for group in groups.values()]

    @property
    def begun(self) -> bool:
        """Whether all clients have a private state, or none."""
        return len({home is None for home in self.home}) == 1

    def export(self) -> list[Tree]:
        return [self._one(position) for position in range(len(self.home))]

    def replace(self, states: Sequence[Tree]) -> None:
        """Forget all states, and keep the given ones."""
        self.home, self.stacks, self.living = [None] * len(states), {}, {}
        for position, state in enumerate(states):
            if state is not None:
                self.put((position,), stack([state]))

    def _one(self, position: int) -> Tree:
        home = self.home[position]
        return None if home is None else take(self.stacks[home[0]], home[1])


class Derived:
    """What clients derive from their graphs and private states (`Method.derive`), for programs."""

    # Kept as long as its sources are the same memory, untouched. Not on a GPU, where to derive it
    # again costs less than to carry it through recordings.
    def __init__(self) -> None:
        self.kept: dict[Members, tuple[list[Tensor], list[tuple[int, int]], Tree]] = {}

    def added(self, owner: Any, members: Members, graph: Graph, states: Tree) -> Graph:
        """The graph with what its clients derive, if the owner of a step derives anything."""
        # Not a protocol: `isinstance` of one costs more than a small operation.
        derives = getattr(owner, "derived_from", None)
        if derives is None or (part := derives(states)) is None:
            return graph
        sources = leaves(part)
        # As long as the sources are kept here, no other tensor lies in their place.
        mark = [(leaf.data_ptr(), leaf._version) for leaf in sources]
        if members not in self.kept or self.kept[members][1] != mark:
            self.kept.pop(members, None)
            with torch.no_grad():
                if len(members) > 1:
                    found = vmap_trees(owner.derive, graph, part)
                else:  # a bucket of one has a plain graph
                    found = owner.derive(graph, take(part, 0))
            kept = sum(num_bytes(tree) for _, _, tree in self.kept.values())
            if kept + num_bytes(found) > MOST_DERIVED:
                self.kept.clear()  # of rosters that have gone, or there is too much to keep
            if num_bytes(found) > MOST_DERIVED:
                return replace(graph, derived=found)
            self.kept[members] = sources, mark, found
        return replace(graph, derived=self.kept[members][2])


class RecordedSteps:
    """Programs of steps, recorded when they come again after so many times."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.seen: Counter[Hashable] = Counter()
        self.recordings: dict[Hashable, Recording | None] = {}
        self.pool = new_pool(torch.cuda.is_available())

    def run(
        self, step: Step, members: Members, shared: bool, program: Program, *inputs: Tree
    ) -> tuple[Tree, Tree]:
        """Replay the program, or run it if it is new or cannot be recorded."""
        known = (step, members, shared, *shapes(inputs))
        try:
            recording = self.recordings.get(known)
        except TypeError:  # a method with a list among its hyper-parameters
            return program(*inputs)
        if recording is None:
            new = known not in self.recordings
            if new and self.seen[known] >= self.after and len(self.recordings) < MOST_KEPT:
                return self._rehearse(step, known, program, *inputs)
            if new and len(self.seen) < 10 * MOST_KEPT:
                self.seen[known] += 1  # drawn clients may never come together again
            return program(*inputs)
        # The next replay overwrites what this one gives, and the server may keep it.
        reply, states = recording(*inputs)
        return copied(reply), copied(states)

    def _rehearse(
        self, step: Step, known: Hashable, program: Program, *inputs: Tree
    ) -> tuple[Tree, Tree]:
        try:
            with no_reads(inputs[-1].device) as watch:
                found = program(*inputs)
            keeps = watch.besides(inputs)
            self.recordings[known] = Recording(program, *inputs, pool=self.pool, keeps=keeps)
        except Exception as reason:
            # Without a recording the program gives the same result, or the true error.
            log.info("step %s is not recorded: %s", step.name, reason)
            self.recordings[known] = None
            self.pool = None  # what failed may have left something in it
            return program(*inputs)
        return found
