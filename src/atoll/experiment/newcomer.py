"""A client that never trains: it is set apart, and scored with the global model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from atoll.core.errors import ConfigError, check_name
from atoll.core.federation import Federation
from atoll.core.graph import with_views
from atoll.core.method import Method
from atoll.experiment.history import BEST_CACHED
from atoll.experiment.metrics import METRICS, REGISTRY, label_of, score, spread
from atoll.experiment.model import SelectedModel
from atoll.experiment.rounds import Run

_PER_CLIENT = ("nodes", "edges", "graphs", "sets", "client_names")  # lists in `Federation.about`


@dataclass(frozen=True)
class FirstDay:
    """What a new client gets: scores of the global model on its test nodes (or graphs)."""

    client: str
    tested: int  # its test nodes (or graphs) in the first seed
    task: str  # "node" or "graph"
    metrics: Mapping[str, Mapping[str, Any]]  # mean, std and per_seed, by the metric's name

    def sentence(self, metric: str) -> str:
        """The result in plain words, the given metric first."""
        words = []
        for name in dict.fromkeys((metric, "accuracy", "macro_f1")):
            if (found := self.metrics.get(name)) is not None:
                spread = "" if found["std"] is None else f" ± {100 * found['std']:.1f}"
                words.append(f"{label_of(name)} {100 * found['mean']:.1f}{spread}")
        never = f"Client {self.client} never trained. On its first day the global model has"
        return f"{never} {', '.join(words)} percent on its {self.tested} test {self.task}s."


def set_apart(federation: Federation, wanted: str) -> tuple[Federation, Federation]:
    """The clients without one, given by its name or number, and that one alone."""
    names, count = federation.client_names, len(federation)
    if wanted not in names and wanted in map(str, range(count)):
        wanted = names[int(wanted)]
    check_name("client to hold out", wanted, names)
    if count == 1:
        raise ConfigError("the only client cannot be held out; give at least two clients")
    place = names.index(wanted)
    others = [position for position in range(count) if position != place]

    def chosen(order: Sequence[int], **more: object) -> Federation:
        about = {**federation.about, "clients": len(order), **more}
        about |= {k: [about[k][i] for i in order] for k in _PER_CLIENT if k in about}
        some = federation.reordered(order)
        return replace(some, numbers=tuple(range(len(order))), about=about)

    return chosen(others), chosen([place], client_names=names)


def check_newcomer(method: Method, select: str) -> None:
    """Refuse a method that has no model for a new client, and a run that keeps none."""
    if (kind := method.scored_as()) != "global":
        problem = f"{type(method).__name__} predicts with a {kind} model and has none for a client"
        hint = "choose a method with a global model: see `atoll methods`"
        raise ConfigError(f"{problem} that never trained; {hint}")
    if why := method.why_bound():
        raise ConfigError(f"{type(method).__name__} cannot predict for a new client: {why}")
    if select == BEST_CACHED:
        raise ConfigError("a run that selects by test scores keeps no model for a new client")


def seed_scores(run: Run, newcomer: Federation) -> dict[str, float]:
    """Every metric of a finished run's selected model on a new client's test nodes (or graphs)."""
    kept = run.keeper.selected(run.history) if run.keeper else None
    assert kept is not None
    model, method = SelectedModel.of_export(kept.export()), run.experiment.method  # on the CPU
    graph = with_views(replace(newcomer.graphs[0], since=None, edge_since=None), method.views)
    with torch.no_grad():
        logits = graph.at_roots(method.predict(graph, *model.of_client(None)))
    tested = graph.at_roots(graph.test) > 0
    labels = graph.task.targets(graph)[tested].numpy()
    chances = logits[tested].double().softmax(-1).numpy()
    known = [name for name in REGISTRY if name in METRICS or newcomer.classes == 2]
    positive = run.experiment.positive
    found = {name: score(name, labels, chances, positive) for name in known if len(labels)}
    return {name: value for name, value in found.items() if np.isfinite(value)}


def first_day(newcomer: Federation, seeds: Sequence[Mapping[str, float]]) -> FirstDay:
    """The result over all seeds."""
    graph, table = newcomer.graphs[0], {k: [s[k] for s in seeds if k in s] for k in seeds[0]}
    means = {name: float(np.mean(values)) for name, values in table.items()}
    found = {k: {"mean": means[k], "std": spread(v), "per_seed": v} for k, v in table.items()}
    return FirstDay(newcomer.client_names[0], int(graph.test.sum()), graph.task.name, found)
