"""Counts what crosses between server and clients: messages and bytes, per round, step and client."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """One step on one client: one message down, one reply up."""

    round: int
    step: str
    client: int
    down: int
    up: int


@dataclass
class Ledger:
    """All entries of a run. Evaluation is kept apart: what it moves is not training traffic."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, round: int, step: str, clients: Sequence[int], down: int, up: Sequence[int]) -> None:
        self.entries += [
            Entry(round, step, client, down, size) for client, size in zip(clients, up, strict=True)
        ]

    def total(self, direction: str) -> int:
        """Bytes of training traffic, `up` or `down`."""
        return sum(getattr(e, direction) for e in self.entries if e.step != SCORE)

    def by_step(self) -> dict[str, dict[str, int]]:
        """Messages and bytes of each step."""
        table: dict[str, dict[str, int]] = {}
        for entry in self.entries:
            row = table.setdefault(entry.step, {"messages": 0, "down": 0, "up": 0})
            row["messages"] += 1
            row["down"] += entry.down
            row["up"] += entry.up
        return table

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Entry._fields)
            writer.writerows(self.entries)

    @staticmethod
    def of(rows: Iterable[Sequence[object]]) -> Ledger:
        """A ledger from stored rows."""
        return Ledger([Entry(*row) for row in rows])  # type: ignore[arg-type]  # rows were entries


SCORE = "score"
"""The evaluation step's name."""
