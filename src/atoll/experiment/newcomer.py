"""A client that never trains: it is held out, and scored with the models of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import ConfigError, check_name
from atoll.core.federation import Federation
from atoll.core.graph import Graph, with_views
from atoll.core.method import Method
from atoll.experiment.history import BEST_CACHED
from atoll.experiment.metrics import METRICS, REGISTRY, label_of, score, spread
from atoll.experiment.model import SelectedModel
from atoll.experiment.rounds import Run

_PER_CLIENT = ("nodes", "edges", "graphs", "sets", "client_names")  # lists in `Federation.about`
DRAWN = "drawn"  # instead of a client's name: the data seed draws the client


@dataclass(frozen=True)
class FirstDay:
    """The scores of the other clients' models on a new client's test nodes (or graphs)."""

    client: str  # its name, or several names if every seed drew its own
    tested: int  # its test nodes (or graphs) in the first seed
    task: str  # "node" or "graph"
    metrics: Mapping[str, Mapping[str, Any]]  # mean, std and per_seed, by the metric's name
    models: int = 1  # 1: the global model; more: all clients' models, whose scores are averaged

    def sentence(self, metric: str) -> str:
        """Return the result as a sentence, the given metric first."""
        model = "global model has"
        if self.models > 1:
            worst = 100 * self.metrics["worst_accuracy"]["mean"]
            model = f"mean of {self.models} clients' models (the worst: accuracy {worst:.1f}) has"
        never = f"Client {self.client} never trained. On its first day the {model}"
        return f"{never} {words(self.metrics, metric)} on its {self.tested} test {self.task}s."


def words(metrics: Mapping[str, Mapping[str, Any]], metric: str) -> str:
    """Return `accuracy 78.1 ± 0.6, macro F1 70.0 ± 1.1 percent`, the given metric first."""
    found = []
    for name in dict.fromkeys((metric, "accuracy", "macro_f1")):
        if (one := metrics.get(name)) is not None:
            spread = "" if one["std"] is None else f" ± {100 * one['std']:.1f}"
            found.append(f"{label_of(name)} {100 * one['mean']:.1f}{spread}")
    return f"{', '.join(found)} percent" if found else ""


def set_apart(federation: Federation, wanted: str, seed: int = 0) -> tuple[Federation, Federation]:
    """Split off one client, by name, by number or drawn. Return the others, and this client."""
    names, count = federation.client_names, len(federation)
    if wanted == DRAWN and DRAWN not in names:
        wanted = names[np.random.default_rng([seed, count]).integers(count)]
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


def check_newcomer(method: Method, select: str, *, every: bool = False) -> None:
    """Refuse a method that has no model for a new client, unless `every` model is scored."""
    if not every and (kind := method.scored_as()) != "global":
        problem = f"{type(method).__name__} predicts with a {kind} model and has none for a client"
        hint = "choose a method with a global model: see `atoll methods`"
        raise ConfigError(f"{problem} that never trained; {hint}")
    check_kept(method, select, "a new client")


def check_kept(method: Method, select: str, what: str) -> None:
    """Refuse a method that is bound to its training nodes, and a run that keeps no model."""
    if why := method.why_bound():
        raise ConfigError(f"{type(method).__name__} cannot predict for {what}: {why}")
    if select == BEST_CACHED:
        raise ConfigError(f"a run that selects by test scores keeps no model for {what}")


def kept_model(run: Run) -> SelectedModel:
    """Return a finished run's selected model, on the CPU."""
    kept = run.keeper.selected(run.history) if run.keeper else None
    assert kept is not None
    return SelectedModel.of_export(kept.export())


def scores_on(
    run: Run, model: SelectedModel, graph: Graph, place: int | None, chosen: Tensor
) -> dict[str, float]:
    """Return every metric of a client's model on chosen nodes (or graphs) of a complete graph.

    `place` is the client whose model predicts, or None for the global model.
    """
    method, classes = run.experiment.method, run.experiment.federation.classes
    graph = with_views(replace(graph, since=None, edge_since=None), method.views)
    with torch.no_grad():
        logits = graph.at_roots(method.predict(graph, *model.of_client(place)))
    tested = graph.at_roots(chosen) > 0
    labels = graph.task.targets(graph)[tested].numpy()
    chances = logits[tested].double().softmax(-1).numpy()
    known = [name for name in REGISTRY if name in METRICS or classes == 2]
    positive = run.experiment.positive
    found = {name: score(name, labels, chances, positive) for name in known if len(labels)}
    return {name: value for name, value in found.items() if np.isfinite(value)}


def seed_scores(run: Run, newcomer: Federation) -> dict[str, float]:
    """Return every metric on a new client's test nodes: of the global model, or `over_models`."""
    model, graph = kept_model(run), newcomer.graphs[0]
    if run.experiment.method.scored_as() == "global":
        return scores_on(run, model, graph, None, graph.test)
    clients = range(len(run.history.nodes))
    return over_models([scores_on(run, model, graph, place, graph.test) for place in clients])


def over_models(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return unweighted means over models, and the worst accuracy."""
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return {**means, "worst_accuracy": min(row["accuracy"] for row in rows)}


def first_day(
    newcomers: Sequence[Federation], seeds: Sequence[Mapping[str, float]], models: int = 1
) -> FirstDay:
    """Return the result over all seeds, each with its newcomer."""
    graph, table = newcomers[0].graphs[0], {k: [s[k] for s in seeds if k in s] for k in seeds[0]}
    means = {name: float(np.mean(values)) for name, values in table.items()}
    found = {k: {"mean": means[k], "std": spread(v), "per_seed": v} for k, v in table.items()}
    names = " or ".join(dict.fromkeys(one.client_names[0] for one in newcomers))
    return FirstDay(names, int(graph.test.sum()), graph.task.name, found, models)
