"""Nodes that arrive after training (split `unseen`): clients train without them.

Each client's graph in training is the subgraph of its other nodes. After the run, the kept model of
the selected round predicts on the whole graph, where new nodes have old neighbours. A score is the
mean over clients, weighted by the nodes that it counts. Clients without such nodes are excluded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation, each
from atoll.core.graph import Graph
from atoll.core.method import Method
from atoll.core.stages import at_stage
from atoll.data.source import MISSING, UNSEEN
from atoll.experiment.metrics import METRICS, mean_over_clients, spread
from atoll.experiment.newcomer import check_kept, kept_model, scores_on, words
from atoll.experiment.rounds import Run

KINDS = {"unseen_node": UNSEEN, "missing_class": MISSING}
ABOUT = {
    "unseen_node": "New nodes of classes that their client knows",
    "missing_class": "New nodes of classes without a training node at their client",
}
Scores = dict[str, dict[str, float]]  # by kind and metric


@dataclass(frozen=True)
class Unseen:
    """The scores of one kind of new nodes over all seeds."""

    kind: str  # one of `KINDS`
    tested: int  # such nodes in the first seed
    metrics: Mapping[str, Mapping[str, Any]]  # mean, std and per_seed, by the metric's name

    def sentence(self, metric: str) -> str:
        """Return the result as a sentence, the given metric first."""
        scores = words(self.metrics, metric)
        return f"{ABOUT[self.kind]} ({self.tested}): {scores or 'no score'}."


def part_unseen(federation: Federation) -> tuple[Federation, Federation | None]:
    """Return the clients without new nodes, and the whole clients, or None if no node is new."""
    if not str(federation.about.get("split", "")).startswith("unseen"):
        return federation, None
    small = each(partial(at_stage, stage=0), federation.graphs)
    counts = {
        name: [int(_of(graph, role).sum()) for graph in federation.graphs]
        for name, role in KINDS.items()
    }
    lacking = [torch.unique(graph.y[_of(graph, MISSING)]).tolist() for graph in federation.graphs]
    about = {
        **federation.about,
        "nodes": [graph.num_nodes for graph in small],
        "edges": [int(graph.edges.shape[1]) for graph in small],
        "unseen": {**counts, "missing_classes": lacking},
    }
    return replace(federation, graphs=small, about=about), federation


def _of(graph: Graph, role: int) -> Tensor:
    """Return the nodes with a role of `KINDS`, (N,) bool."""
    assert graph.since is not None
    return torch.eq(graph.since, role)


def all_tested(newcomer: Federation) -> Federation:
    """Return a new client whose labelled nodes are all scored."""

    def change(graph: Graph) -> Graph:
        assert graph.since is not None
        labelled = graph.train + graph.val + graph.test + (graph.since >= UNSEEN)
        return replace(graph, test=labelled.to(graph.test))

    return replace(newcomer, graphs=each(change, newcomer.graphs))


def check_unseen(method: Method, select: str, evaluate: str | None) -> None:
    """Refuse a method that cannot predict new nodes, and a run whose scored model is not kept."""
    check_kept(method, select, "new nodes")
    if evaluate == "local":
        why = "the deployed model predicts new nodes, but --evaluate local scores another"
        raise ConfigError(f"{why}; remove --evaluate, or choose another --split")


def unseen_scores(run: Run, whole: Federation) -> Scores:
    """Return the scores (`METRICS`) of a run's selected model for each kind of new nodes."""
    model, found = kept_model(run), {}
    for kind, role in KINDS.items():
        rows, counts = list[dict[str, float]](), list[int]()
        for place, graph in enumerate(whole.graphs):
            chosen = _of(graph, role)
            counts.append(int(chosen.sum()))
            rows.append(scores_on(run, model, graph, place, chosen) if counts[-1] else {})
        found[kind] = mean_scores(rows, counts)
    return found


def mean_scores(rows: Sequence[Mapping[str, float]], counts: Sequence[int]) -> dict[str, float]:
    """Return means over clients, weighted by nodes, of those `METRICS` that some client has."""
    table = {name: np.array([row.get(name, np.nan) for row in rows]) for name in METRICS}
    known = {name: values for name, values in table.items() if not np.isnan(values).all()}
    return {k: float(mean_over_clients(v, np.array(counts))) for k, v in known.items()}


def over_seeds(whole: Federation, seeds: Sequence[Scores]) -> dict[str, Unseen]:
    """Return the result over all seeds, for each kind."""
    result = {}
    for kind, role in KINDS.items():
        names = dict.fromkeys(name for one in seeds for name in one[kind])
        table = {name: [one[kind][name] for one in seeds if name in one[kind]] for name in names}
        metrics = {
            name: {"mean": float(np.mean(v)), "std": spread(v), "per_seed": v}
            for name, v in table.items()
        }
        tested = sum(int(_of(graph, role).sum()) for graph in whole.graphs)
        result[kind] = Unseen(kind, tested, metrics)
    return result
