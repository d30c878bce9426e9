"""Which clients share a program: those of one kind and similar size, so that padding is small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from atoll.core.graph import Graph
from atoll.core.tree import structure
from atoll.engines.base import Members

CHUNK = 256
"""Clients per program unless the user chooses another number."""

MOST_NODES = 1 << 15
"""Nodes per program on a CPU: beyond, a program gains nothing, and its tensors leave the caches."""


class Outline(NamedTuple):
    """The properties of a client that decide which clients share a program."""

    kind: int  # number of the graph's structure; only graphs of one kind can be stacked
    nodes: int
    alone: bool  # with mini-batches, each client takes its own number of steps


def outline(graphs: Sequence[Graph]) -> list[Outline]:
    """All clients' outlines; the order of the clients does not change the numbers of kinds."""
    found = [(structure(graph), graph.num_nodes, graph.batching.cuts) for graph in graphs]
    kinds = {spec: i for i, spec in enumerate(sorted({spec for spec, *_ in found}, key=str))}
    return [Outline(kinds[spec], nodes, alone) for spec, nodes, alone in found]


def make_buckets(
    outlines: Sequence[Outline], positions: Sequence[int], chunk: int, nodes: float = math.inf
) -> list[Members]:
    """Group clients so that padding wastes at most a quarter, or too little to matter.

    A bucket has at most `chunk` clients; one of several clients has at most `nodes` nodes.
    """
    buckets: list[list[int]] = []
    total = 0
    for position in sorted(positions, key=lambda p: (*outlines[p][:2], p)):
        kind, size, alone = outlines[position]
        current = buckets[-1] if buckets else []
        waste = (len(current) + 1) * size - (total + size)
        fits = (
            current
            and len(current) < chunk
            and total + size <= nodes
            and not alone
            and outlines[current[0]].kind == kind
            and waste <= max(0.25 * (total + size), 4096)
        )
        if fits:
            current.append(position)
            total += size
        else:
            buckets.append([position])
            total = size
    return [tuple(sorted(bucket)) for bucket in buckets]
