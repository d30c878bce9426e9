"""Tasks: targets, loss and scores. A new task is one class."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.core.losses import cross_entropy, masked_mean
from atoll.core.random import make_key, normal
from atoll.core.task import NODES, ROLES, TASKS, Classification, Task, task_named
from atoll.data.split import SPLITS
from atoll.engines.base import ENGINES
from atoll.experiment.metrics import METRICS
from atoll.experiment.rounds import Experiment
from atoll.methods import METHODS, FedAvg
from atoll.nn import GCN, NETS, nets_for
from atoll.testing import CLASSES, FEATURES, small_federation, small_graph_federation


@pytest.mark.parametrize("task", TASKS.values())
def test_the_names_of_splits_and_metrics_exist(task: Task) -> None:
    assert set(task.splits) <= set(SPLITS)
    assert set(task.metrics) <= set(METRICS)
    assert str(task) == task.name
    assert TASKS[task.name] is task


def test_an_unknown_task_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="unknown task 'nodes'; did you mean 'node'"):
        task_named("nodes")


@pytest.mark.parametrize("federation", [small_federation(), small_graph_federation()])
def test_targets_loss_and_score_are_of_what_is_classified(federation: Federation) -> None:
    for number, graph in enumerate(federation.graphs):
        task, logits = graph.task, normal(make_key(number), (graph.num_nodes, CLASSES))
        rows = graph.at_roots(torch.arange(graph.num_nodes))
        assert torch.equal(task.targets(graph), graph.y[rows])
        assert float(task.loss(logits, graph)) == float(cross_entropy(logits, graph))
        found = task.score(logits, graph)
        right = (logits.argmax(-1) == graph.y).to(logits.dtype)
        for role, name in enumerate(ROLES):
            mask = getattr(graph, name)
            assert float(found.confusion[role].sum()) == float(mask.sum())
            assert float(found.confusion[role].diagonal().sum()) == float((right * mask).sum())
        torch.testing.assert_close(found.loss[0], task.loss(logits, graph))
        assert found.auc.tolist() == [-1.0] * 3


def test_methods_and_networks_name_known_tasks() -> None:
    for cls in METHODS.values():
        assert cls.tasks
        assert set(cls.tasks) <= set(TASKS)
    assert sorted(name for task in TASKS for name in nets_for(task)) == sorted(NETS)


class Squares(Classification):
    """Logits that are near the one-hot labels: another loss, the same scores."""

    name = "square"

    def loss(self, outputs: Tensor, graph: Graph) -> Tensor:
        truth = torch.nn.functional.one_hot(graph.y, outputs.shape[-1]).to(outputs.dtype)
        return masked_mean((outputs - truth).square().sum(-1), graph.train)


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> Federation:
    monkeypatch.setitem(TASKS, "square", Squares())
    graphs = tuple(replace(graph, task_name="square") for graph in small_federation().graphs)
    return Federation(graphs, CLASSES)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_new_task_reaches_a_method_without_its_file(squares: Federation, engine: str) -> None:
    class Net(GCN):
        task = "square"

    class Method(FedAvg):
        tasks = ("square",)

    assert repr(squares).endswith("9 to 22 squares, 11 features, 3 classes>")
    experiment = Experiment(
        Method(Net(FEATURES, CLASSES, dropout=0.0), epochs=1), squares, rounds=1, engine=engine
    )
    graph = squares.graphs[0]
    prepared = squares.prepared(experiment.method.views).graphs[0]
    params = experiment.method.net.init(make_key(0))
    found = experiment.method.loss(params, prepared, None)
    logits = experiment.method.net(params, prepared)
    assert float(found) == float(Squares().loss(logits, graph)) != float(NODES.loss(logits, graph))
    assert experiment.run().history.scores["deployed"][0].shape == (4, 3, len(METRICS))


def test_a_method_for_another_task_is_refused(squares: Federation) -> None:
    with pytest.raises(ConfigError, match="FedAvg classifies nodes and graphs, but the clients"):
        Experiment(FedAvg(GCN(FEATURES, CLASSES)), squares, rounds=1).run()
