"""Counts what crosses: messages and bytes, per round, step and client."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SCORE = "score"
"""The evaluation step's name."""


class Entry(NamedTuple):
    """One step on some clients: one message down to and one reply up from each of them."""

    round: int
    step: str
    clients: Sequence[int]
    down: int
    up: int


@dataclass
class Ledger:
    """All entries of a run. Evaluation is kept apart: what it moves is not training traffic."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, round: int, step: str, clients: Sequence[int], down: int, up: int) -> None:
        """Note that each of the clients got `down` bytes and sent `up` bytes."""
        self.entries.append(Entry(round, step, clients, down, up))

    def total(self, direction: str) -> int:
        """Bytes of training traffic, "up" or "down", over all rounds and clients."""
        return sum(row[direction] for step, row in self.by_step().items() if step != SCORE)

    def by_step(self) -> dict[str, dict[str, int]]:
        """Messages and bytes of each step."""
        table: dict[str, dict[str, int]] = {}
        for entry in self.entries:
            row = table.setdefault(entry.step, {"messages": 0, "down": 0, "up": 0})
            row["messages"] += len(entry.clients)
            row["down"] += entry.down * len(entry.clients)
            row["up"] += entry.up * len(entry.clients)
        return table

    def rows(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Round, step, client, bytes down, bytes up."""
        for entry in self.entries:
            for client in entry.clients:
                yield entry.round, entry.step, client, entry.down, entry.up

    def write_csv(self, path: Path) -> None:
        """The ledger as a table that anybody can check."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["round", "step", "client", "bytes_down", "bytes_up"])
            writer.writerows(self.rows())

    def export(self) -> list[Any]:
        """Plain values for a checkpoint."""
        return [[e.round, e.step, list(e.clients), e.down, e.up] for e in self.entries]

    def restore(self, exported: list[Any]) -> None:
        """Continue from what `export` gave."""
        self.entries = [Entry(*row) for row in exported]
