"""Messages of the server: the same tree for all clients, or one row of a stacked tree for each.

`Clients.map` takes a message, and the engine delivers it. `bytes_for_one` counts the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from atoll.core.tree import Tree, num_bytes, take


@dataclass(frozen=True, eq=False)
class ToAll:
    """The same tree for every client."""

    tree: Tree

    def for_one(self, position: int) -> Tree:
        return self.tree

    def bytes_for_one(self, total: int) -> int:
        return num_bytes(self.tree)


@dataclass(frozen=True, eq=False)
class ToEach:
    """A stacked tree with a row for every client of the federation. Participants get their rows."""

    tree: Tree

    def for_one(self, position: int) -> Tree:
        return take(self.tree, position)

    def rows(self, positions: Tensor) -> Tree:
        return take(self.tree, positions)

    def bytes_for_one(self, total: int) -> int:
        return num_bytes(self.tree) // max(total, 1)


Message = ToAll | ToEach
