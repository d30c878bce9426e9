"""State of the fused engine between programs: private states, recordings, derived trees."""

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

MOST_KEPT = 256  # most cached lists of positions, and most recordings
MOST_DERIVED = 1 << 29  # most bytes of cached derived trees
Program = Callable[..., tuple[Tree, Tree]]
"""(message, private states, keys) -> (replies, new private states) of clients that run at once."""


def at_once(
    step: Step, graphs: Graph, message: Tree, states: Tree, keys: Tensor, shared: bool
) -> tuple[Tree, Tree]:
    """Run the step for all clients at once. If `shared`, all clients get the same message."""

    # A shared message is closed over, so `vmap` computes only once what depends only on it.
    def one(graph: Graph, state: Tree, key: Tensor, received: Tree = message) -> Tree:
        reply, state = step(graph, received, state, key)
        return reply, None if step.keeps_state else state

    own = () if shared else (message,)
    found: tuple[Tree, Tree] = vmap_trees(one, graphs, states, keys, *own)
    return found


class PrivateStates:
    """Private states, stacked by program. While the programs stay the same, nothing is copied.

    A stack lives as long as it contains one client's newest state. A client that moves to another
    program leaves a stale row behind. Members of a program are one tuple, compared by identity
    first: comparing hundreds of numbers once per client would take quadratic time.
    """

    def __init__(self, size: int) -> None:
        # For each client the stack and the row of its state, or None before its first state.
        self.home: list[tuple[Members, int] | None] = [None] * size
        self.stacks: dict[Members, Tree] = {}
        self.living: dict[Members, int] = {}  # how many clients' newest states a stack holds

    def get(self, members: Members) -> Tree:
        """Return the members' stacked states, or None before their first states."""
        homes = [self.home[position] for position in members]
        if homes[0] is None:
            return None
        if all(h is not None and (h[0] is members or h[0] == members) for h in homes):
            return self.stacks[members]
        return stack([self._one(p) for p in members])

    def put(self, members: Members, state: Tree) -> None:
        """Store the members' stacked states."""
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
        """Split a bucket into groups whose states have equal structure, or that have no state."""
        homes = [self.home[position] for position in bucket]
        if len({None if home is None else id(home[0]) for home in homes}) == 1:
            return [bucket]
        groups: dict[Hashable, list[int]] = {}
        kinds: dict[int, Hashable] = {}
        for position, home in zip(bucket, homes, strict=True):
            if home is not None and id(home[0]) not in kinds:
                # All states in a stack need equal structure and equal values besides tensors.
                flat, spec = flatten(self.stacks[home[0]])
                fixed = (Tensor if isinstance(leaf, Tensor) else leaf for leaf in flat)
                kinds[id(home[0])] = spec, tuple(fixed)
            groups.setdefault(None if home is None else kinds[id(home[0])], []).append(position)
        return [bucket] if len(groups) == 1 else [tuple(group) for group in groups.values()]

    @property
    def begun(self) -> bool:
        """Whether all clients have a private state, or no client has one."""
        return len({home is None for home in self.home}) == 1

    def export(self) -> list[Tree]:
        return [self._one(position) for position in range(len(self.home))]

    def replace(self, states: Sequence[Tree]) -> None:
        """Replace all states by the given ones."""
        self.home, self.stacks, self.living = [None] * len(states), {}, {}
        for position, state in enumerate(states):
            if state is not None:
                self.put((position,), stack([state]))

    def _one(self, position: int) -> Tree:
        home = self.home[position]
        return None if home is None else take(self.stacks[home[0]], home[1])


class Derived:
    """Cached trees that clients derive from their graphs and private states (`Method.derive`)."""

    # Valid as long as the sources are the same unchanged memory. Not used on a GPU, where
    # deriving a tree again costs less than carrying it through recordings.
    def __init__(self) -> None:
        self.kept: dict[Members, tuple[list[Tensor], list[tuple[int, int]], Tree]] = {}

    def added(self, owner: Any, members: Members, graph: Graph, states: Tree) -> Graph:
        """Return the graph with its derived tree, if the owner of the step derives one."""
        # Not a protocol, because `isinstance` of a protocol costs more than a small operation.
        derives = getattr(owner, "derived_from", None)
        if derives is None or (part := derives(states)) is None:
            return graph
        sources = leaves(part)
        # While the sources are stored here, no other tensor can have their address.
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
                self.kept.clear()  # drop trees of old rosters
            if num_bytes(found) > MOST_DERIVED:
                return replace(graph, derived=found)
            self.kept[members] = sources, mark, found
        return replace(graph, derived=self.kept[members][2])


class RecordedSteps:
    """Programs of steps. A program that runs more than `after` times is recorded."""

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
        except TypeError:  # a method with a list among its hyper-parameters is not hashable
            return program(*inputs)
        if recording is None:
            new = known not in self.recordings
            if new and self.seen[known] >= self.after and len(self.recordings) < MOST_KEPT:
                return self._rehearse(step, known, program, *inputs)
            if new and len(self.seen) < 10 * MOST_KEPT:
                self.seen[known] += 1  # the same draw of clients may never occur again
            return program(*inputs)
        # The next replay overwrites these outputs, and the server may keep them, so copy them.
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
            # Without a recording the program gives the same result, or the real error.
            log.info("step %s is not recorded: %s", step.name, reason)
            self.recordings[known] = None
            self.pool = None  # the failed recording may have left allocations in it
            return program(*inputs)
        return found
