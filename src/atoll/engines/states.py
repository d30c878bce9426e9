"""Clients' private states between rounds, stacked as the last program left them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from atoll.core.tree import Tree, flatten, stack, take
from atoll.engines.base import Members


class PrivateStates:
    """Private states: stacked where a program left them, so that a steady roster copies nothing.

    A stack lives as long as one client's newest state is in it. A client that moves to another
    program leaves a stale row behind, which is never read again.

    Members of a program are one tuple, which is compared by identity first: to compare or hash its
    hundreds of numbers once per client would cost as the square of the clients.
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
        groups: dict[Hashable, list[int]] = {}
        kinds: dict[int, Hashable] = {}
        for position in bucket:
            home = self.home[position]
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
        """Each client's state."""
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
