"""What readers of a finished run need and nothing else in its folder holds.

- `federation.npz`, written before training: how the first seed's clients differ, by the measures of
  `atoll inspect`, so that nobody needs the data again. Left out for sets of graphs and for large
  federations (`MAX_CLIENTS`, `MAX_EDGES`), where it would cost more than a moment.
- `seed-N/facts.npz`, written when a seed is finished: the clients' sizes, which every mean over
  clients needs; seconds of each round; and, for methods that compare clients, how alike they seemed
  to the server, how it mixed their models, and its clusters.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from atoll.core.errors import DataError
from atoll.core.federation import Federation
from atoll.core.tree import Tree
from atoll.data.measure.heterogeneity import describe
from atoll.engines.checkpoint import write_atomically
from atoll.experiment.rounds import Run

FACTS = "facts.npz"
FEDERATION_FACTS = "federation.npz"
MAX_CLIENTS = 200
"""Most clients whose pairs are compared; there are K² of them."""
MAX_EDGES = 300_000
"""Most edges of all clients together that are looked at; about a second."""


@runtime_checkable
class Mixes(Protocol):
    """A method that gives every client a mixture of its own and publishes the weights."""

    def mixing(self, server: Tree) -> Tensor:
        """Whose models each client (row) got, by share, (N, N), or (F, N, N) for F factors."""


def save_federation_facts(federation: Federation, path: Path) -> None:
    """Measure what makes the clients differ, once, and write it down."""
    if path.exists() or not _measurable(federation):
        return
    found = describe(federation, random_graphs=0, path_sources=1)
    names = (
        "clients",
        "nodes",
        "roles",
        "edges",
        "isolated",
        "mean_degree",
        "labels",
        "homophily",
        "class_homophily",
        "edges_total",
        "edges_lost",
        "label_divergence",
        "feature_divergence",
        "structure_divergence",
    )
    _write(path, {name: np.asarray(getattr(found, name)) for name in names})


def _measurable(federation: Federation) -> bool:
    if federation.task != "node" or not 1 < len(federation) <= MAX_CLIENTS:
        return False
    return sum(graph.edges.shape[1] for graph in federation.graphs) <= MAX_EDGES


def save_seed_facts(run: Run, path: Path) -> None:
    """Write down what only the end of a seed tells."""
    history = run.history
    cached = [(i, number) for i, rounds in enumerate(history.cached) for number in rounds]
    found: dict[str, Any] = {
        "nodes": history.nodes,
        "counts": history.counts,
        "seconds": history.seconds,
        "cached": np.array(cached, dtype=np.int64).reshape(-1, 2),
    }
    if len(history.nodes) <= MAX_CLIENTS:
        found |= {k: v.double().cpu().numpy() for k, v in published(run).items()}
    _write(path, found)


def published(run: Run) -> dict[str, Tensor]:
    """What the server knows of how clients relate: similarity, mixing, cluster; maybe nothing."""
    method, server = run.experiment.method, run.server
    while hasattr(server, "base"):  # a plug on another method keeps what that one keeps
        method, server = method.base, server.base  # type: ignore[attr-defined]  # it has one
    found = {name: getattr(server, name, None) for name in ("similarity", "cluster")}
    if isinstance(method, Mixes):
        found["mixing"] = method.mixing(server)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def read_facts(path: Path) -> Mapping[str, np.ndarray]:
    """The arrays of such a file; nothing if it is not there."""
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"'{path}' cannot be read ({error})") from error


def _write(path: Path, arrays: Mapping[str, Any]) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(path, content.getvalue())
