"""Baselines: honest numbers, the same tests, and a mark in every table."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import with_views
from atoll.core.optim import Adam
from atoll.core.random import make_key
from atoll.core.task import task_named
from atoll.core.tree import Tree, stack
from atoll.data.source import Source
from atoll.data.split import growth
from atoll.experiment.baseline import (
    NOT_FEDERATED,
    POOLED,
    pooled_graph,
    run_baseline,
    without_test,
)
from atoll.experiment.config import make_config
from atoll.experiment.folder import read_result
from atoll.experiment.problem import Problem
from atoll.methods import FedTAD, method_class
from atoll.nn import GCN
from atoll.report.collect import collect
from atoll.report.page import page
from atoll.studies.baselines import (
    Features,
    Majority,
    NeighbourTrees,
    Oracle,
    PooledTrees,
    RealFedTAD,
    Trees,
    make_baseline,
)
from atoll.studies.compare.comparison import read_request, run_request
from tests.experiment.pooled import DATA, Pooled, federation

SMALL = {"clients": 3, "rounds": 2, "seeds": 3, "set": {"hidden": 8}}


def test_majority_scores_the_share_of_each_client_s_largest_class() -> None:
    clients = federation()
    config = make_config(method="majority", data=clients.name, objects=["method", "data"])
    result = run_baseline(config, Majority(), data=clients)
    expected = [
        (graph.y[graph.test > 0] == graph.y[graph.train > 0].bincount().argmax()).double().mean()
        for graph in clients.graphs
    ]
    assert result.of_clients()[0] == pytest.approx(np.array(expected))
    assert result.scored == NOT_FEDERATED
    assert result.bytes() == {"up": 0, "down": 0}


def test_features_is_a_logistic_regression_on_each_client_s_own_rows() -> None:
    clients = federation()
    model = Features(c=0.5).fit(without_test(clients), seed=0)
    for place, graph in enumerate(clients.graphs):
        own = model[place]
        scores = Features().predict(model, place, graph)
        assert scores.shape == (graph.num_nodes, clients.classes)
        assert set(scores.argmax(1).tolist()) <= set(own.known.tolist())
        chosen = graph.train > 0
        right = (scores.argmax(1)[chosen] == graph.y[chosen]).double().mean()
        assert right > (graph.y[chosen].bincount().max() / chosen.sum())  # it has learnt something
    one_class = replace(clients.graphs[0], y=torch.full_like(clients.graphs[0].y, 4))
    alone = replace(clients, graphs=(one_class,))
    model = Features().fit(alone, seed=0)
    assert set(Features().predict(model, 0, one_class).argmax(1).tolist()) == {4}


@pytest.mark.parametrize("jobs", [1, 2])
def test_baselines_stand_in_a_comparison_marked_and_tested(tmp_path: Path, jobs: int) -> None:
    methods: list[Any] = ["majority", "local", "features:c=0.5"]
    found = atoll.compare(methods, DATA, out=tmp_path, jobs=jobs, **SMALL)
    assert [row.scored for row in found.tables[0].rows] == [
        NOT_FEDERATED, "personalised", NOT_FEDERATED,
    ]  # fmt: skip
    assert {test["name"] for test in found.tests()} == {"majority", "features:c=0.5"}
    assert {test["pairs"] for test in found.tests()} == {3}
    assert found.tables[0].about["rounds"] == 2  # a method's, not the baseline's
    text, note = repr(found), "Not federated, only for comparison: majority and features:c=0.5."
    assert "majority (not federated)" in text
    assert note in " ".join(text.split())
    assert note in found.markdown()
    assert "majority (not federated) & " in found.latex()
    rows = list(csv.DictReader((tmp_path / "compare.csv").read_text().splitlines()))
    assert {row["scored"] for row in rows if row["method"] == "majority"} == {NOT_FEDERATED}
    summary = json.loads((tmp_path / "compare.json").read_text())
    assert summary["tables"][0]["rows"][0]["scored"] == NOT_FEDERATED
    folder = tmp_path / "cells" / "lagoon-nodes=200-3c-majority"
    assert read_result(folder).scored == NOT_FEDERATED
    events = (tmp_path / "events.jsonl").read_bytes()
    again = run_request(read_request(tmp_path), tmp_path)  # as --resume does
    assert again.table() == found.table()
    assert (tmp_path / "events.jsonl").read_bytes() == events


def test_a_baseline_that_pools_data_is_called_so() -> None:
    found = atoll.compare([Pooled(), "local"], DATA, **{**SMALL, "set": {}})
    assert found.tables[0].rows[0].scored == POOLED
    text = " ".join(repr(found).split())
    assert "| Pooled (not federated, pools all data) |" in found.markdown()
    assert "Trained on the pooled data of all clients, without privacy: Pooled." in text


def test_trees_learn_what_a_line_cannot_and_validation_chooses_their_number() -> None:
    noise = np.random.default_rng(0)
    x = torch.from_numpy(noise.uniform(-1, 1, (900, 3)).astype(np.float32))
    y = (x[:, 0] * x[:, 1] > 0).long()  # exclusive or
    part = torch.arange(900) % 3
    edges = torch.stack([torch.arange(900), torch.arange(900).roll(1)])
    graph = atoll.core.graph.make_graph(x, edges, y, part == 0, part == 1, part == 2)
    clients = Federation((graph,), 2)
    scores = Trees().fit(without_test(clients), seed=0)
    right = (scores[0].argmax(1) == y)[part == 2].double().mean()
    line = Features().predict(Features().fit(without_test(clients), 0), 0, graph)
    assert right > 0.9 > (line.argmax(1) == y)[part == 2].double().mean()
    assert torch.equal(scores[0], Trees().fit(without_test(clients), seed=0)[0])
    rows = torch.where(part == 1)[0]
    blind = replace(without_test(clients).graphs[0], val=torch.zeros(900))  # all trees are used
    found = [Trees(iterations=trees).scores_of(blind, 2, 0) for trees in (1, 100)]
    losses = [-one[rows, y[rows]].mean().item() for one in found]
    assert -scores[0][rows, y[rows]].mean().item() <= min(losses) + 1e-12


def test_trees_see_neighbours_only_where_asked() -> None:
    noise = np.random.default_rng(0)
    x = torch.from_numpy(noise.normal(size=(600, 2)).astype(np.float32))
    order = torch.arange(600)
    edges = torch.stack([order[:-1], order[1:]])  # a node's neighbour is the one before it
    y = torch.cat([torch.zeros(1), (x[:-1, 0] > 0)]).long()
    part = order % 3
    graph = atoll.core.graph.make_graph(x, edges, y, part == 0, part == 1, part == 2)
    clients = without_test(Federation((graph,), 2))
    own, both = (kind().fit(clients, 0)[0].argmax(1) == y for kind in (Trees, NeighbourTrees))
    assert both[part == 2].double().mean() > 0.95
    assert own[part == 2].double().mean() < 0.7


def test_a_client_with_one_class_or_no_training_nodes_has_the_shares_of_its_classes() -> None:
    clients = federation()
    first = clients.graphs[0]
    one_class = replace(first, y=torch.full_like(first.y, 4))
    empty = replace(first, train=torch.zeros_like(first.train))
    scores = Trees().fit(replace(clients, graphs=(one_class, empty)), seed=0)
    assert scores[0].exp()[0].tolist() == pytest.approx([0, 0, 0, 0, 1, 0], abs=2e-6)
    assert scores[1].softmax(1)[0].tolist() == pytest.approx([1 / 6] * 6)


def test_the_pooled_graph_has_all_nodes_and_the_edges_between_clients() -> None:
    source = atoll.load(DATA, clients=3)
    config = make_config(method="m", data=DATA, clients=3, objects=["method"])
    problem = Problem.of(config)
    clients = problem.federation(0)
    whole = pooled_graph(problem, clients, 0)
    assert whole.edges.shape[1] == problem.undivided(0).edges.shape[1]  # type: ignore[union-attr]
    ids = torch.cat([graph.ids for graph in clients.graphs]).long()
    pairs = {tuple(pair) for pair in ids[whole.edges].T.tolist()}
    assert pairs == {tuple(pair) for pair in problem.undivided(0).edges.T.tolist()}  # type: ignore[union-attr]
    dense = whole.x if isinstance(whole.x, torch.Tensor) else whole.x.to_dense()
    wanted = source.x.toarray() if hasattr(source.x, "toarray") else source.x
    assert np.array_equal(dense.numpy(), wanted[ids.numpy()])
    divided = Problem.of(make_config(method="m", data="d", objects=["method", "data"]), clients)
    alone = pooled_graph(divided, clients, 0)
    assert alone.edges.shape[1] == sum(graph.edges.shape[1] for graph in clients.graphs)


def test_in_a_split_in_time_the_pooled_graph_grows_as_the_clients_do() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 3)).astype(np.float32), rng.integers(0, 2, 90)
    edges = rng.integers(0, 90, (2, 300))
    column = {"day": rng.permutation(90), "client": np.arange(90) % 3}
    source = Source("days", x, edges, y, 2, columns=column, edge_time=rng.integers(0, 90, 300))
    how: dict[str, Any] = {"partition": "column:client", "split": "time:day"}
    config = make_config(method="m", data="days", objects=["method", "data"], **how)
    problem = Problem.of(config, source)
    clients = problem.federation(0)
    whole = pooled_graph(problem, clients, 0)
    simple = problem.undivided(0)
    assert simple is not None
    ids = torch.cat([graph.ids for graph in clients.graphs]).long().numpy()
    grows = growth(simple, "time:day", None)
    assert grows is not None
    since = grows.of_nodes(simple)
    assert whole.since.tolist() == since[ids].tolist()  # type: ignore[union-attr]
    stage = dict(zip(map(tuple, simple.edges.T), grows.of_edges(simple, since), strict=True))
    found = map(tuple, ids[whole.edges.numpy()].T)
    assert [stage[pair] for pair in found] == whole.edge_since.tolist()  # type: ignore[union-attr]
    rows = ["fedavg", "trees:neighbours:iterations=3", "oracle"]
    table = atoll.compare(rows, source, rounds=2, seeds=2, **how).tables[0]
    assert all(row.finished for row in table.rows)


def test_the_oracle_is_local_training_on_one_client() -> None:
    made = {"rounds": 3, "set": {"hidden": 8}, "seed": 2}
    alone = atoll.partition(atoll.load(DATA, clients=3), "random", clients=1, seed=2)
    local = atoll.run("local", alone, **made)
    config = make_config(method="oracle", data="d", objects=["method", "data"], **made)
    result = run_baseline(config, Oracle(), data=alone)
    assert result.scored == POOLED
    assert result.metrics()["test_accuracy"] == local.metrics()["test_accuracy"]
    assert result.metrics()["val_accuracy"] == local.metrics()["val_accuracy"]


def test_the_oracle_is_scored_with_dropout_where_methods_are() -> None:
    made = {"method": "oracle", "data": DATA, "clients": 3, "objects": ["method"], "rounds": 5}
    noisy = make_config(**made, compat=["dropout-at-eval"])
    scores = [run_baseline(one, Oracle()).metrics() for one in (make_config(**made), noisy, noisy)]
    assert scores[0]["test_loss"] != scores[1]["test_loss"]
    assert scores[1]["test_loss"] == scores[2]["test_loss"]


def test_fedtad_on_the_real_graph_is_a_baseline_that_pools_all_data() -> None:
    # Without distillation it is FedAvg; with it, its server reads a graph with all edges.
    rows = ["fedavg", "fedtad-real:distil_steps=0", "fedtad-real:distil_lr=0.1"]
    found = atoll.compare(rows, DATA, **{**SMALL, "seeds": 2})
    average, silent, taught = found.tables[0].rows
    assert (average.scored, silent.scored, taught.scored) == ("global", POOLED, POOLED)
    assert average.scores.tolist() == pytest.approx(silent.scores.tolist(), abs=1e-12)
    assert average.scores.tolist() != taught.scores.tolist()


def test_fedtad_on_the_real_graph_learns_the_teachers_mean_on_all_edges() -> None:
    config = make_config(method="fedtad-real", data=DATA, clients=3, objects=["method"])
    problem, baseline = Problem.of(config), RealFedTAD()
    clients = problem.divide(0).federation
    whole = pooled_graph(problem, clients, 0)
    inside = sum(graph.edges.shape[1] for graph in clients.graphs)
    assert whole.edges.shape[1] > inside
    net = GCN(clients.features, clients.classes, hidden=8)
    made = FedTAD(net, distil_steps=1, iterations=1, distil_lr=1e-3)
    method, same = baseline._placed(made, whole, clients, "cpu")
    assert same is clients
    models = [net.init(make_key(k)) for k in range(4)]
    lesson = method.lesson(stack(models[:3]), torch.full((3, clients.classes), 1 / 3), False)
    assert float(lesson.weight.sum()) == pytest.approx(1)
    assert lesson.weight.shape == (3, whole.num_nodes)
    graph = with_views(whole, net.views)

    def gap(student: Tree) -> float:
        taught = torch.stack([net(model, graph) for model in models[:3]])
        return float((net(student, graph) - taught).abs().mean())

    moments = Adam().init(models[3])
    after, _ = lesson.teach(None, models[3], moments, torch.zeros(1), make_key(0))
    assert gap(after) < gap(models[3])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dp": "clip=1,noise=1"}, "differential privacy protects federated training"),
        ({"split": "inductive"}, "needs all nodes from the start"),
        ({"set": {"reliability": "nodes"}}, "remove reliability"),
    ],
)
def test_fedtad_on_the_real_graph_is_refused(options: dict[str, Any], problem: str) -> None:
    given = {"method": "fedtad-real", "data": DATA, "clients": 3, "rounds": 2}
    config = make_config(**given, objects=["method"], **options)
    with pytest.raises(ConfigError, match=problem):
        run_baseline(config, RealFedTAD())


def test_no_run_and_no_federation_knows_the_oracle_of_fedtad() -> None:
    with pytest.raises(ConfigError, match="unknown method 'fedtad-real'"):
        method_class("fedtad-real")


def test_trees_mlp_and_oracle_stand_in_a_comparison_and_its_report(tmp_path: Path) -> None:
    rows = ["local", "mlp", "mlp:federated", "trees:iterations=5", "trees:pooled:iterations=5"]
    rows += ["trees:neighbours:iterations=5", "oracle:epochs=5"]
    found = atoll.compare(rows, DATA, out=tmp_path, **SMALL)
    assert not found.failed
    table = found.tables[0]
    scored = {row.method: row.scored for row in table.rows}
    assert list(scored.values()) == [
        "personalised", "personalised", "global", NOT_FEDERATED, POOLED, NOT_FEDERATED, POOLED,
    ]  # fmt: skip
    assert scored[table.reference] != POOLED  # type: ignore[index]
    assert not {"oracle:epochs=5", "trees:pooled:iterations=5"} & set(table.best)
    oracle = read_result(tmp_path / "cells" / "lagoon-nodes=200-3c-oracle-epochs=5")
    assert oracle.config.set == {} or oracle.config.set["epochs"] == "5"
    mlp = read_result(tmp_path / "cells" / "lagoon-nodes=200-3c-mlp")
    assert (mlp.config.method, mlp.config.set["net"]) == ("local", "mlp")
    text = page(collect([tmp_path]))
    assert "oracle:epochs=5 (not federated, pools all data) pools all data, which" in text
    assert "points compared with the best of the others" in text
    assert "has a hyper-parameter" not in text
    with pytest.raises(ConfigError, match="hyper-parameter of local 'mu'"):
        atoll.compare(["local", "oracle:mu=1"], DATA, **SMALL)


def test_a_comparison_says_so_if_trees_win() -> None:
    noise = np.random.default_rng(0)
    x = noise.uniform(-1, 1, (400, 2)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    ends = noise.integers(0, 400, (2, 1600))
    source = Source("xor", x, ends, y, 2).undirected_simple()
    options = {"clients": 2, "partition": "random", "rounds": 2, "seeds": 2}
    found = atoll.compare(["fedavg", "trees"], source, **options)
    said = "trees needs no federation, and no federated method here has a higher mean."
    assert said in found.sentences()


def test_what_a_baseline_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="baseline 'majority' has no settings; remove mu"):
        atoll.compare(["local", "majority:mu=1"], DATA, **SMALL)
    with pytest.raises(ConfigError, match=r"c of the baseline features is 'x'; give a number such"):
        make_baseline("features", {"c": "x"})
    with pytest.raises(ConfigError, match="setting of the baseline features 'd'"):
        make_baseline("features", {"d": "1"})
    with pytest.raises(ConfigError, match="the baseline 'features' classifies nodes"):
        Features().fit(SimpleNamespace(task=task_named("graph"), name="PROTEINS"), seed=0)  # type: ignore[arg-type]
    graphs: Any = SimpleNamespace(task=task_named("graph"), name="PROTEINS")
    problem = Problem.of(make_config(method="m", objects=["method"]))
    for name, kind in {"trees": PooledTrees, "oracle": Oracle}.items():
        with pytest.raises(ConfigError, match=f"the baseline '{name}' classifies nodes, but 'PRO"):
            kind().fit_in(problem, graphs, seed=0)
    with pytest.raises(ConfigError, match="rate of the baseline trees:pooled is 'x'; give a"):
        make_baseline("trees:pooled", {"rate": "x"})
