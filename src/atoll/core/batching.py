"""Batching: the part of a client's training data that one optimizer step sees.

An engine attaches a `Batching` to each graph, and `fit` obeys it. A new kind of batch needs one
class in this file and one case in `minibatch.py`.
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
    """Every step sees up to `size` of a client's small training graphs. No small graph is cut.

    `room` is the padded number of nodes of a batch, then of entries of each sparse view. If it is
    empty, batches are not padded. A GPU can record only steps of one shape.
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
    """Return the batching for the option `batch_size`. 0 means all graphs in one step."""
    if batch_size < 0:
        raise ConfigError(f"batch_size is {batch_size}; give 0 (all at once) or a number of graphs")
    return Graphs(batch_size) if batch_size else WHOLE


def batch_size_of(batching: Batching) -> int:
    """Return the option `batch_size` that `batching_of` would turn into this value."""
    return batching.size if isinstance(batching, Graphs) else 0
