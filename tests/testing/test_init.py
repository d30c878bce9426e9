"""The federations and cases of the contract. `tests/contract` contains the planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import atoll
from atoll import Averaging, Clients, Graph, ToAll, Tree
from atoll.core.dp import Noised
from atoll.engines.base import ENGINES
from atoll.methods import FedAvg
from atoll.nn import GCN
from atoll.testing import (
    CLASSES,
    FEATURES,
    Case,
    ContractBroken,
    check_client_order,
    check_frozen,
    check_method,
    double_precision,
    relabelled,
    small_federation,
    small_graph_federation,
)


def test_relabelled_graphs_are_the_same_graphs() -> None:
    graph = small_federation().graphs[0]
    moved = relabelled(graph, 7)
    back = torch.argsort(moved.ids)
    assert not torch.equal(moved.ids, graph.ids)
    assert torch.equal(moved.x[back], graph.x)
    assert torch.equal(moved.y[back], graph.y)
    pairs = {tuple(pair) for pair in moved.ids[moved.edges].T.tolist()}
    assert pairs == {tuple(pair) for pair in graph.ids[graph.edges].T.tolist()}


def test_federations_have_every_class_and_isolated_nodes() -> None:
    for graph in small_federation().graphs:
        assert set(graph.y[graph.train > 0].tolist()) == set(range(CLASSES))
        assert graph.num_nodes - 1 not in graph.edges.flatten().tolist()
    assert small_graph_federation().task.many_graphs


def test_the_serial_run_of_a_case_is_made_once() -> None:
    with double_precision():
        case = Case(FedAvg(GCN(FEATURES, CLASSES, hidden=5)), small_federation(), rounds=1)
        assert case.serial is case.serial
        check_client_order(case)
        scores = case.serial.history.scores
        scores[next(iter(scores))][-1] += np.arange(4)[:, None, None]
        with pytest.raises(ContractBroken, match="the order of the clients changes the"):
            check_client_order(case)


def test_a_class_without_the_decorator_is_not_frozen() -> None:
    class Loose(FedAvg):
        pass

    with pytest.raises(ContractBroken, match="Loose must be a frozen dataclass"):
        check_frozen(Loose(GCN(FEATURES, CLASSES)))


@dataclass(frozen=True)
class Contrast(Averaging):
    """Rows of length one, also of nodes whose embedding is zero."""

    normalize: ClassVar[Callable[[Tensor], Tensor]] = staticmethod(torch.nn.functional.normalize)

    def loss(self, params: Tree, graph: Graph, key: Tensor) -> Tensor:
        logits = self.net(params, graph, key)
        rows = type(self).normalize(logits)
        both = graph.train[:, None] * graph.train
        return graph.task.loss(logits, graph) - (rows @ rows.T * both).sum() / both.sum()


@dataclass(frozen=True)
class FiniteContrast(Contrast):
    """The same with a finite gradient."""

    normalize = staticmethod(atoll.unit)


def test_an_exploding_gradient_is_named_as_the_cause() -> None:
    with pytest.raises(
        ContractBroken, match=r"reach \de\+\d\d: a gradient explodes.* use atoll.unit"
    ):
        check_method(Contrast)
    check_method(FiniteContrast)


@dataclass(frozen=True)
class NoReturn(FedAvg):
    def round(self, server: Tree, clients: Clients) -> Tree:
        super().round(server, clients)  # and no `return`


@dataclass(frozen=True)
class NoStart(FedAvg):
    def init(self, clients: Clients) -> Tree:
        super().init(clients)


@dataclass(frozen=True)
class Fails(FedAvg):
    def round(self, server: Tree, clients: Clients) -> Tree:
        clients.map(self.train, ToAll(server))
        raise TypeError("a typing slip")


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        (NoReturn, "round of NoReturn returned None; return the server's next state"),
        (NoStart, "init of NoStart returned None; return the server's first state"),
    ],
)
def test_a_server_without_a_state_is_named(method: type[FedAvg], problem: str) -> None:
    with pytest.raises(ContractBroken, match=problem):
        check_method(method)
    made, federation = method(GCN(FEATURES, CLASSES)), small_federation()
    for engine in ENGINES:
        with pytest.raises(atoll.ConfigError, match=f"^{problem}$"):
            atoll.Experiment(made, federation, rounds=2, engine=engine).run()


def test_a_private_method_without_a_state_is_named_by_its_base() -> None:
    method = Noised(GCN(FEATURES, CLASSES), NoReturn(GCN(FEATURES, CLASSES)), 1.0, 1.0)
    with pytest.raises(atoll.ConfigError, match="round of NoReturn returned None"):
        atoll.Experiment(method, small_federation(), rounds=1).run()


def test_an_error_of_the_server_names_its_line() -> None:
    with pytest.raises(ContractBroken, match=r"TypeError in test_init\.py line \d+: a typing slip"):
        check_method(Fails)
