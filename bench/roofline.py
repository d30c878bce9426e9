"""Peak bandwidth and arithmetic of this machine, and the lower bound of a round of FedAvg.

Bandwidth is STREAM's triad, and arithmetic is a large matrix product. Each is the best of several
repeats on the threads of the run. The floor of a round is the larger of bytes / bandwidth and flops
/ arithmetic, if every operation reads or writes each operand once, outside of the caches. A run
below the floor keeps its tensors in the caches. A run far above it pays for small operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from atoll.core.federation import Federation
from atoll.core.graph import Graph, Sparse, with_views
from atoll.nn.nets import GCN


def best_of(action: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest run."""
    found = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def machine_peaks(threads: int) -> dict[str, float]:
    """Bytes per second of a triad and flops per second of a product, in float32."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _peaks("cpu", 2048)
    finally:
        torch.set_num_threads(before)


def gpu_peaks() -> dict[str, float]:
    """Bytes per second of a triad and flops per second of a product on the GPU."""
    return _peaks("cuda", 8192)


def _peaks(device: str, width: int) -> dict[str, float]:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    a, b, c = (torch.ones(1 << 25, device=device) for _ in range(3))  # 128 MiB: beyond any cache
    triad = best_of(lambda: (torch.add(b, c, alpha=2.0, out=a), wait()))
    x, y, z = (torch.rand(width, width, device=device) for _ in range(3))
    product = best_of(lambda: (torch.mm(x, y, out=z), wait()))
    return {"bytes_per_s": 3 * a.nbytes / triad, "flops_per_s": 2 * width**3 / product}


@dataclass
class Work:
    """Sums of flops and bytes."""

    flops: float = 0.0
    bytes: float = 0.0

    def product(self, rows: int, inner: int, columns: int) -> None:
        """Add a dense product."""
        self.flops += 2 * rows * inner * columns
        self.bytes += 4 * (rows * inner + inner * columns + rows * columns)

    def sparse(self, entries: int, rows: int, inner: int, columns: int) -> None:
        """Add a sparse product: an index and a value for each entry, each operand once."""
        self.flops += 2 * entries * columns
        self.bytes += 8 * entries + 4 * (inner * columns + rows * columns)

    def elementwise(self, numbers: int, operands: int) -> None:
        """Add one flop for each number."""
        self.flops += numbers
        self.bytes += 4 * numbers * operands


def round_of_fedavg(
    federation: Federation, hidden: int = 64, epochs: int = 3, scored: int = 2
) -> Work:
    """Return the work of one round of FedAvg with a two-layer GCN, including scoring."""
    work, net = Work(), GCN(federation.features, federation.classes, hidden=hidden)
    for graph in federation.graphs:
        _add_client(work, with_views(graph, net.views), net, epochs, scored)
    return work


def _add_client(work: Work, graph: Graph, net: GCN, epochs: int, scored: int) -> None:
    nodes, width, hidden, classes = graph.num_nodes, net.features, net.hidden, net.classes
    parameters = width * hidden + hidden + hidden * classes + classes
    adjacency, x = graph.views["gcn"], graph.views.get("gcn_x", graph.views.get("x"))
    assert isinstance(adjacency, Sparse)
    edges = adjacency.values.shape[0]

    def first_layer() -> None:
        if isinstance(x, Sparse):
            work.sparse(x.values.shape[0], nodes, width, hidden)
        else:
            work.product(nodes, width, hidden)
        if "gcn_x" not in graph.views:
            work.sparse(edges, nodes, nodes, hidden)

    def forward(train: bool) -> None:
        first_layer()
        work.elementwise(nodes * hidden, 3 + 3 * train)  # bias, relu, dropout
        work.product(nodes, hidden, classes)
        work.sparse(edges, nodes, nodes, classes)
        work.elementwise(nodes * classes, 4)  # bias, loss

    for _ in range(epochs):
        forward(train=True)
        work.elementwise(nodes * classes, 3)
        work.sparse(edges, nodes, nodes, classes)
        work.product(hidden, nodes, classes)  # by the weight
        work.product(nodes, classes, hidden)  # by the activations
        work.elementwise(nodes * hidden, 5)
        first_layer()  # by its weight: the same entries, transposed
        work.elementwise(parameters, 7)  # Adam reads four and writes three
    for _ in range(scored):
        forward(train=False)
    work.elementwise(parameters, 2)  # the mean


def floor(work: Work, peaks: dict[str, float]) -> dict[str, Any]:
    """Return the lower bound of the seconds of some work on a machine with these peaks."""
    seconds = {
        "memory": work.bytes / peaks["bytes_per_s"],
        "arithmetic": work.flops / peaks["flops_per_s"],
    }
    bound = max(seconds, key=lambda name: seconds[name])
    return {
        "flops": work.flops,
        "bytes": work.bytes,
        "floor_seconds": seconds[bound],
        "bound_by": bound,
    }
