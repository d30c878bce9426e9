"""How an epoch's steps see a client's training data: an engine attaches it to each graph.

Another way of cutting is one more class here and one more case in `minibatch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from atoll.core.errors import ConfigError


@dataclass(frozen=True)
class Whole:
    """Every step sees the whole graph."""

    cuts: ClassVar[bool] = False


@dataclass(frozen=True)
class Graphs:
    """A step sees `size` of a client's small training graphs, each one uncut.

    With `room`, the most nodes and the most entries of each sparse view that a batch can have, all
    batches are padded to that: on a GPU, steps of one shape can be recorded.
    """

    size: int
    room: tuple[int, ...] = ()
    cuts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"Graphs has size {self.size}; give at least 1, or use Whole()")


Batching = Whole | Graphs
WHOLE = Whole()


def batching_of(batch_size: int) -> Batching:
    """What the option `batch_size` stands for; 0 is all graphs at once."""
    if batch_size < 0:
        raise ConfigError(f"batch_size is {batch_size}; give 0 (all at once) or a number of graphs")
    return Graphs(batch_size) if batch_size else WHOLE


def batch_size_of(batching: Batching) -> int:
    """The option `batch_size` that stands for a value."""
    return batching.size if isinstance(batching, Graphs) else 0
