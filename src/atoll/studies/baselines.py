"""The baselines that `atoll compare` knows by name; none of them is a federated method."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from atoll.core.errors import ConfigError, unknown
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.core.space import Value
from atoll.experiment.baseline import AnyBaseline, Baseline
from atoll.present.tables import Column, Table, make_table


@dataclass(frozen=True)
class Majority(Baseline[Tensor]):
    """Predicts for every node the most frequent class among the client's own training nodes."""

    def fit(self, federation: Federation, seed: int) -> Tensor:
        """The share of each class among each client's training nodes, (K, C)."""
        labels = [graph.y[graph.train > 0] for graph in federation.graphs]
        counts = [torch.bincount(own, minlength=federation.classes) for own in labels]
        shares = torch.stack(counts).double()
        return shares / shares.sum(1, keepdim=True).clamp(min=1)

    def predict(self, model: Tensor, client: int, graph: Graph) -> Tensor:
        # log(0) would make the loss infinite where a class is new in the test part
        return (model[client] + 1e-6).log().expand(graph.num_nodes, -1)


@dataclass(frozen=True)
class _Linear:
    """A client's classes, with the slope and the offset of each."""

    known: Tensor
    slope: Tensor
    offset: Tensor
    classes: int


@dataclass(frozen=True)
class Features(Baseline[list[_Linear]]):
    """Logistic regression on each client's own features, without edges and without the others."""

    c: float = 1.0  # inverse strength of the L2 penalty
    iterations: int = 500  # most iterations of the solver

    def fit(self, federation: Federation, seed: int) -> list[_Linear]:
        """A linear model for each client."""
        if federation.task.many_graphs:
            raise ConfigError(
                f"the baseline 'features' classifies nodes, but '{federation.name}' is a set of "
                "graphs; choose 'majority', or other data"
            )
        return [self._fit_client(graph, federation.classes) for graph in federation.graphs]

    def _fit_client(self, graph: Graph, classes: int) -> _Linear:
        from sklearn.linear_model import LogisticRegression

        chosen = graph.train > 0
        labels, x = graph.y[chosen], _dense(graph)[chosen].double()
        known = torch.unique(labels)
        if len(known) < 2:  # nothing to separate
            known = known if len(known) else torch.zeros(1, dtype=torch.int64)
            return _Linear(known, x.new_zeros(1, x.shape[1]), x.new_zeros(1), classes)
        solver = LogisticRegression(C=self.c, max_iter=self.iterations).fit(x.numpy(), labels)
        slope, offset = torch.from_numpy(solver.coef_), torch.from_numpy(solver.intercept_)
        if len(known) == 2:  # scikit-learn keeps one row for two classes
            slope, offset = torch.cat([-slope, slope]) / 2, torch.cat([-offset, offset]) / 2
        return _Linear(known, slope, offset, classes)

    def predict(self, model: list[_Linear], client: int, graph: Graph) -> Tensor:
        own = model[client]
        scores = _dense(graph).double() @ own.slope.T + own.offset
        # A class that the client has never seen gets a probability of about one in a million.
        rest = scores.amin(1, keepdim=True) - 14.0
        return rest.repeat(1, own.classes).index_copy(1, own.known, scores)


def _dense(graph: Graph) -> Tensor:
    return graph.x if isinstance(graph.x, Tensor) else graph.x.to_dense()


BASELINES: Mapping[str, type[AnyBaseline]] = {"majority": Majority, "features": Features}


def baseline_table() -> Table:
    """Every baseline with one line."""
    return make_table(
        [Column("name", "left"), Column("what it does", "left", wrap=True)],
        [(name, (inspect.getdoc(cls) or "").splitlines()[0]) for name, cls in BASELINES.items()],
        title="Baselines, only for `atoll compare`",
        caption="A baseline is not a federated method; every table marks it.",
    )


def baseline_page(name: str) -> str:
    """Everything about one baseline."""
    return (
        f"{name} is a baseline, not a federated method: atoll compare local fedavg {name}\n\n"
        f"{inspect.getdoc(BASELINES[name])}"
    )


def make_baseline(name: str, settings: Mapping[str, Value]) -> AnyBaseline:
    """A baseline with its settings, which are numbers."""
    cls = BASELINES[name.lower()]
    known = {field.name: getattr(cls, field.name) for field in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    given: dict[str, Value] = {}
    for key, value in settings.items():
        if not known:
            raise ConfigError(f"baseline '{name}' has no settings; leave out {key}")
        if key not in known:
            raise unknown(f"setting of the baseline {name}", key, known)
        try:
            given[key] = type(known[key])(value)
        except ValueError:
            raise ConfigError(
                f"{key} of the baseline {name} is '{value}'; give a number such as {known[key]}"
            ) from None
    return cls(**given)
