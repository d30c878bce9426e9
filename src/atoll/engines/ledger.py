"""A ledger of the traffic: messages and bytes, per round, step and client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from atoll.core.tree import Tree

SCORE = "score"  # the evaluation step's name


class Entry(NamedTuple):
    """One step on several clients: each received `down` bytes and sent `up` bytes."""

    round: int
    step: str
    runs: tuple[tuple[int, int], ...]  # ranges of clients: first, last + 1, ascending
    down: int
    up: int

    @property
    def clients(self) -> list[int]:
        return [client for first, end in self.runs for client in range(first, end)]

    @property
    def size(self) -> int:
        return sum(end - first for first, end in self.runs)


@dataclass
class Ledger:
    """All entries of a run. Evaluation counts separately, because it is not training traffic."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, round: int, step: str, clients: Sequence[int], down: int, up: int) -> None:
        """Add an entry: each of the clients received `down` bytes and sent `up` bytes."""
        self.entries.append(Entry(round, step, _runs(clients), down, up))

    def total(self, direction: str) -> int:
        """Return the bytes of training, "up" or "down", over all rounds and clients."""
        return sum(row[direction] for step, row in self.by_step().items() if step != SCORE)

    def by_step(self) -> dict[str, dict[str, int]]:
        """Return, for each step, the numbers of "messages" and of bytes "down" and "up"."""
        table: dict[str, dict[str, int]] = {}
        for entry in self.entries:
            row = table.setdefault(entry.step, {"messages": 0, "down": 0, "up": 0})
            for name, each in (("messages", 1), ("down", entry.down), ("up", entry.up)):
                row[name] += each * entry.size
        return table

    def by_round(self, rounds: int) -> tuple[list[int], list[int]]:
        """Return the bytes of training by round, as lists (down, up). Round 0 includes `init`."""
        down, up = [0] * rounds, [0] * rounds
        for entry in self.entries:
            if entry.step != SCORE:
                down[max(0, entry.round)] += entry.down * entry.size
                up[max(0, entry.round)] += entry.up * entry.size
        return down, up

    def rows(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield round, step, client, bytes down, bytes up."""
        for entry in self.entries:
            for client in entry.clients:
                yield entry.round, entry.step, client, entry.down, entry.up

    def export(self) -> Tree:
        """Return plain values for a checkpoint."""
        return [[e.round, e.step, torch.tensor(e.runs), e.down, e.up] for e in self.entries]

    def restore(self, exported: Tree) -> None:
        """Continue from the value of `export`."""
        self.entries = [
            Entry(round, step, tuple(map(tuple, runs.tolist())), down, up)
            for round, step, runs, down, up in exported
        ]


def _runs(clients: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Convert ascending numbers to ranges of consecutive numbers."""
    if len(clients) and clients[-1] - clients[0] == len(clients) - 1:
        return ((clients[0], clients[-1] + 1),)
    cuts = [i for i in range(1, len(clients)) if clients[i] != clients[i - 1] + 1]
    bounds = pairwise([0, *cuts, len(clients)])
    return tuple((clients[first], clients[end - 1] + 1) for first, end in bounds)
