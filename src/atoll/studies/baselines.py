"""The baselines that `atoll compare` knows by name. They are not federated methods."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import islice
from typing import ClassVar

import msgspec
import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from atoll.core.errors import ConfigError, check_name
from atoll.core.federation import Federation
from atoll.core.graph import Graph, moved, with_views
from atoll.core.method import Method
from atoll.core.random import fold, make_key
from atoll.core.space import Value
from atoll.core.stages import rows_by_stage
from atoll.core.tree import Tree
from atoll.engines.base import choose_engine
from atoll.experiment.baseline import AnyBaseline, Baseline, pooled_graph
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig, resolve
from atoll.experiment.hardware import choose_device
from atoll.experiment.history import bins_metric, positive_of, selection_of
from atoll.experiment.model import SelectedModel
from atoll.experiment.problem import Problem
from atoll.experiment.rounds import Experiment
from atoll.methods.fedtad import FedTAD, Lesson
from atoll.present.tables import Column, Table, make_table


@dataclass(frozen=True)
class Majority(Baseline[Tensor]):
    """Always predicts the most frequent class of the client's own training nodes (or graphs)."""

    def fit(self, federation: Federation, seed: int) -> Tensor:
        """Return the fraction of each class among each client's training nodes, by client."""
        labels = [graph.y[graph.train > 0] for graph in federation.graphs]
        counts = [torch.bincount(own, minlength=federation.classes) for own in labels]
        shares = torch.stack(counts).double()
        return shares / shares.sum(1, keepdim=True).clamp(min=1)

    def predict(self, model: Tensor, client: int, graph: Graph) -> Tensor:
        # log(0) would make the loss infinite if a class occurs only in the test part
        return (model[client] + 1e-6).log().expand(graph.num_nodes, -1)


@dataclass(frozen=True)
class _Linear:
    """A client's linear model: its known classes, and the weights and the bias of each."""

    known: Tensor
    slope: Tensor
    offset: Tensor
    classes: int


@dataclass(frozen=True)
class Features(Baseline[list[_Linear]]):
    """Logistic regression on each client's own features, without edges or other clients."""

    c: float = 1.0  # inverse strength of the L2 penalty
    iterations: int = 500  # maximum iterations of the solver

    def fit(self, federation: Federation, seed: int) -> list[_Linear]:
        """Fit a linear model for each client."""
        _refuse_graphs("features", federation)
        return [self._fit_client(graph, federation.classes) for graph in federation.graphs]

    def _fit_client(self, graph: Graph, classes: int) -> _Linear:
        from sklearn.linear_model import LogisticRegression

        chosen = graph.train > 0
        labels, x = graph.y[chosen], graph.x.to_dense()[chosen].double()
        known = torch.unique(labels)
        if len(known) < 2:  # only one class
            known = known if len(known) else torch.zeros(1, dtype=torch.int64)
            return _Linear(known, x.new_zeros(1, x.shape[1]), x.new_zeros(1), classes)
        solver = LogisticRegression(C=self.c, max_iter=self.iterations).fit(x.numpy(), labels)
        slope, offset = torch.from_numpy(solver.coef_), torch.from_numpy(solver.intercept_)
        if len(known) == 2:  # scikit-learn stores one row for two classes
            slope, offset = torch.cat([-slope, slope]) / 2, torch.cat([-offset, offset]) / 2
        return _Linear(known, slope, offset, classes)

    def predict(self, model: list[_Linear], client: int, graph: Graph) -> Tensor:
        own = model[client]
        scores = graph.x.to_dense().double() @ own.slope.T + own.offset
        # A class that the client has never seen gets a probability of about one in a million.
        rest = scores.amin(1, keepdim=True) - 14.0
        return rest.repeat(1, own.classes).index_copy(1, own.known, scores)


def _refuse_graphs(name: str, federation: Federation) -> None:
    if federation.task.many_graphs:
        many = f"'{federation.name}' is a set of graphs; choose 'majority', or other data"
        raise ConfigError(f"the baseline '{name}' classifies nodes, but {many}")


@dataclass(frozen=True)
class Trees(Baseline[list[Tensor]]):
    """Gradient-boosted trees on each client's own features, without edges or other clients.

    It uses scikit-learn's HistGradientBoostingClassifier. The loss on the client's validation nodes
    selects the number of trees. A leaf contains at least a twentieth of the training nodes, or 20
    nodes if these are fewer. If the training nodes of a client have fewer than two classes, it
    predicts their class frequencies, as `majority` does.
    """

    iterations: int = 100  # maximum number of trees per class
    rate: float = 0.1  # learning rate

    neighbours: ClassVar[bool] = False  # whether the mean features of neighbours are added

    def fit(self, federation: Federation, seed: int) -> list[Tensor]:
        """Return the scores of each client's nodes."""
        _refuse_graphs("trees", federation)
        return [self.scores_of(graph, federation.classes, seed) for graph in federation.graphs]

    def predict(self, model: list[Tensor], client: int, graph: Graph) -> Tensor:
        return model[client]

    def scores_of(self, graph: Graph, classes: int, seed: int) -> Tensor:
        """Return the log probabilities of trees that learned from the training nodes, (N, C)."""
        from sklearn.ensemble import HistGradientBoostingClassifier
        from threadpoolctl import threadpool_limits

        train, val = graph.train.numpy() > 0, graph.val.numpy() > 0
        x, y = rows_by_stage(graph, self._inputs).numpy(), graph.y.numpy()
        counts = np.bincount(y[train], minlength=classes)
        chances = np.tile(counts / max(counts.sum(), 1), (len(y), 1))
        if (known := np.flatnonzero(counts)).size > 1:
            x = x[:, (x[train] != x[train][0]).any(0)]  # trees cannot use constant columns
            booster = HistGradientBoostingClassifier(
                learning_rate=self.rate,
                max_iter=self.iterations,
                min_samples_leaf=int(np.clip(train.sum() // 20, 1, 20)),
                early_stopping=False,
                random_state=seed,
            )
            with threadpool_limits(1, "openmp"):  # sums of several threads differ in the last bits
                booster.fit(x[train], y[train])
                trees = self.iterations
                if val.any():
                    stages = booster.staged_predict_proba(x[val])
                    every = (self._spread(stage, known, classes) for stage in stages)
                    rows = np.arange(int(val.sum()))
                    losses = [-np.log(one[rows, y[val]] + 1e-6).mean() for one in every]
                    trees = int(np.argmin(losses)) + 1
                found = next(islice(booster.staged_predict_proba(x), trees - 1, None))
            chances = self._spread(found, known, classes)
        return torch.from_numpy(np.log(chances + 1e-6))  # every class is possible

    def _spread(self, chances: np.ndarray, known: np.ndarray, classes: int) -> np.ndarray:
        """Expand the probabilities of the known classes to all classes."""
        every = np.zeros((len(chances), classes))
        every[:, known] = chances
        return every

    def _inputs(self, graph: Graph) -> Tensor:
        x = graph.x.to_dense().double().numpy()
        if not self.neighbours:
            return torch.from_numpy(x)
        (source, target), size = graph.edges.numpy(), graph.num_nodes
        adjacency = sp.csr_array((np.ones(source.size), (target, source)), shape=(size, size))
        degree = np.asarray(adjacency.sum(1)).reshape(-1, 1)
        with np.errstate(invalid="ignore"):  # a node without neighbours has missing values: NaN
            return torch.from_numpy(np.hstack([x, adjacency @ x / degree]))


@dataclass(frozen=True)
class NeighbourTrees(Trees):
    """Gradient-boosted trees on own features and the mean features of a node's neighbours."""

    neighbours = True


@dataclass(frozen=True)
class PooledTrees(Trees):
    """One set of trees for all clients, from their pooled rows: an upper bound without privacy."""

    pools = True

    def fit_in(self, problem: Problem, federation: Federation, seed: int) -> list[Tensor]:
        _refuse_graphs("trees", federation)
        whole = pooled_graph(problem, federation, seed)
        scores = self.scores_of(whole, federation.classes, seed)
        return _by_client(scores, federation)


@dataclass(frozen=True)
class PooledNeighbourTrees(PooledTrees):
    """The pooled trees with mean features of neighbours, also of neighbours at other clients."""

    neighbours = True


def _by_client(scores: Tensor, federation: Federation) -> list[Tensor]:
    return list(torch.split(scores, [graph.num_nodes for graph in federation.graphs]))


@dataclass(frozen=True)
class Oracle(Baseline[list[Tensor]]):
    """The methods' network, trained on all data in one place: an upper bound without privacy.

    The graph is whole and includes the edges between clients, if the data contain them. Rounds,
    epochs, network, optimizer and selection of the round are the same as for `local` on one client.
    """

    pools = True
    trains = "local"

    def fit(self, federation: Federation, seed: int) -> list[Tensor]:
        """Return the scores of each client's nodes."""
        config = RunConfig(data=federation.name, objects=("data",))
        return self.fit_in(Problem.of(config, federation), federation, seed)

    def fit_in(self, problem: Problem, federation: Federation, seed: int) -> list[Tensor]:
        _refuse_graphs("oracle" if self.trains == "local" else "fedtad-real", federation)
        task = federation.task.name
        config, rules = resolve(as_method(self.trains, problem.given), task)
        loss, device = (config.class_weights, config.loss), choose_device(config.device)
        method = build_method(config, federation.features, federation.classes, task)
        whole = pooled_graph(problem, federation, seed)
        method, clients = self._placed(method, whole, federation, device)
        run = Experiment(
            method,
            clients.with_loss(*loss),
            rounds=config.rounds or rules.rounds,
            fraction=config.fraction,
            seed=seed,
            engine=choose_engine(config.engine)[0],
            device=device,
            compat=config.compat,
            metric=bins_metric(config, federation),
            positive=positive_of(config, federation),
            keep=selection_of(config, rules, federation),
        ).run()
        kept = run.keeper.selected(run.history) if run.keeper else None
        assert kept is not None
        model = SelectedModel.of_export(kept.export())  # on the CPU
        noisy = "dropout-at-eval" in config.compat

        def logits(place: int, graph: Graph) -> Tensor:
            key = fold(make_key(seed), "score", place) if noisy else None
            return model.predict(method, with_views(graph, method.views), place, key)

        with torch.no_grad():
            found = [rows_by_stage(g, partial(logits, i)) for i, g in enumerate(clients.graphs)]
            return found if len(found) == len(federation) else _by_client(found[0], federation)

    def _placed(
        self, method: Method, whole: Graph, federation: Federation, device: torch.device | str
    ) -> tuple[Method, Federation]:
        """Return the method for training, and the clients that it trains on."""
        return method, replace(federation, graphs=(whole,), numbers=())

    def predict(self, model: list[Tensor], client: int, graph: Graph) -> Tensor:
        return model[client]


class _RealLesson(Lesson):
    """Distillation on a real graph without a generator. Nodes and teachers have equal weight."""

    @cached_property
    def weight(self) -> Tensor:
        real = self.drawn(None, self.share).real
        return self.share[:, :1] * real / real.sum()

    def drawn(self, generator: Tree, noise: Tensor) -> Graph:
        assert isinstance(self.method, _OnRealGraph)
        assert self.method.graph is not None
        return self.method.graph


@dataclass(frozen=True)
class _OnRealGraph(FedTAD):
    """FedTAD whose server has the graph of all clients."""

    graph: Graph | None = None

    def lesson(self, teachers: Tree, share: Tensor, personal: bool) -> Lesson:
        return _RealLesson(self, teachers, share, personal)


@dataclass(frozen=True)
class RealFedTAD(Oracle):
    """FedTAD-r-eq: its server distils on the real graph of all clients, so it has no privacy.

    FedTAD's paper shows it in Fig. 4a. The graph includes the edges between clients, if the data
    contain them. All teachers and all nodes have equal weight, and there is no generator.
    """

    trains = "fedtad"

    def _placed(
        self, method: Method, whole: Graph, federation: Federation, device: torch.device | str
    ) -> tuple[Method, Federation]:
        if whole.since is not None:
            raise ConfigError("fedtad-real needs all nodes from the start; choose another --split")
        settings = {field.name: getattr(method, field.name) for field in fields(FedTAD)}
        if settings["reliability"] not in ("topology", "equal"):  # the default, or the same weights
            raise ConfigError("fedtad-real weights clients equally; remove reliability")
        graph = moved(with_views(whole, method.net.views), device)
        settings |= {"reliability": "equal", "generator_steps": 0}
        return _OnRealGraph(**settings, graph=graph), federation


def as_method(name: str, config: RunConfig) -> RunConfig:
    """Return a baseline's configuration, with the method `name` in the place of the baseline."""
    objects = tuple(name for name in config.objects if name != "method")
    return msgspec.structs.replace(config, method=name, objects=objects)


def as_trained(config: RunConfig) -> RunConfig:
    """Return a configuration with the method that is trained, such as local for `oracle`.

    A method, and a baseline that trains no method, keep their configuration.
    """
    name = config.method if "method" in config.objects else ""
    trains = BASELINES[name].trains if name in BASELINES else ""
    return as_method(trains, config) if trains else config


BASELINES: Mapping[str, type[AnyBaseline]] = {
    "majority": Majority,
    "features": Features,
    "trees": Trees,
    "trees:neighbours": NeighbourTrees,
    "trees:pooled": PooledTrees,
    "trees:pooled-neighbours": PooledNeighbourTrees,
    "oracle": Oracle,
    "fedtad-real": RealFedTAD,
}
SHORTHANDS: Mapping[str, tuple[str, Mapping[str, Value]]] = {
    "mlp": ("local", {"net": "mlp"}),
    "mlp:federated": ("fedavg", {"net": "mlp"}),
}
"""Methods on a network that ignores edges. They show the value of the edges."""


def baseline_table() -> Table:
    """Make the table of all baselines."""
    rows = [(n, (inspect.getdoc(cls) or "").splitlines()[0]) for n, cls in BASELINES.items()]
    rows += [(name, f"Short for {shorthand(name)}: no edges.") for name in SHORTHANDS]
    columns = [Column("name", "left"), Column("description", "left", wrap=True)]
    caption = "A baseline is not a federated method; every table marks it."
    return make_table(columns, rows, title="Baselines, only for `atoll compare`", caption=caption)


def shorthand(name: str) -> str:
    """Return the long form of a shorthand, such as `local:net=mlp`."""
    method, settings = SHORTHANDS[name]
    return f"{method}:{','.join(f'{key}={value}' for key, value in settings.items())}"


def baseline_page(name: str) -> str:
    """Return the page of one baseline, or of a shorthand."""
    if name in SHORTHANDS:
        return f"{name} is short for {shorthand(name)}, a method without edges, in `atoll compare`"
    return (
        f"{name} is a baseline, not a federated method: atoll compare local fedavg {name}\n\n"
        f"{inspect.getdoc(BASELINES[name])}"
    )


def make_baseline(name: str, settings: Mapping[str, Value]) -> AnyBaseline:
    """Make a baseline with its settings, which are numbers."""
    cls = BASELINES[name.lower()]
    known = {field.name: getattr(cls, field.name) for field in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    given: dict[str, Value] = {}
    for key, value in settings.items():
        if not known:
            raise ConfigError(f"baseline '{name}' has no settings; remove {key}")
        check_name(f"setting of the baseline {name}", key, known)
        try:
            given[key] = type(known[key])(value)
        except ValueError:
            problem = f"{key} of the baseline {name} is '{value}'"
            raise ConfigError(f"{problem}; give a number such as {known[key]}") from None
    return cls(**given)
