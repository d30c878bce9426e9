"""FedLoG's settings, as reconstructed: new nodes change no training, and have separate scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import ConfigError
from atoll.core.graph import with_views
from atoll.data.source import MISSING, UNSEEN
from atoll.experiment.config import make_config
from atoll.experiment.folder import RunFolder, read_result
from atoll.experiment.metrics import mean_over_clients
from atoll.experiment.problem import Problem, save_divided
from atoll.experiment.unseen import mean_scores
from atoll.report.collect import collect
from atoll.report.page import page

DATA = "lagoon:nodes=300"
SMALL: dict[str, Any] = {"clients": 4, "rounds": 3, "set": {"hidden": 8}}


def test_means_have_the_weights_of_the_card() -> None:
    rows = [{"accuracy": 0.8}, {"accuracy": 0.5}, {}]
    assert mean_scores(rows, [10, 30, 0]) == {"accuracy": pytest.approx(0.575)}
    assert mean_scores([{}, {}], [0, 0]) == {}
    # Validation picks the round with the validation nodes as weights, not those of missing classes.
    scores, counts = np.array([0.9, 0.5]), np.array([100, 10])
    assert mean_over_clients(scores, counts) == pytest.approx(0.863636, abs=1e-6)
    assert mean_over_clients(scores, np.array([0, 40])) == pytest.approx(0.5)  # the public code's


def test_training_has_no_unseen_node_and_testing_has_all_of_them() -> None:
    problem = Problem.of(make_config(data=DATA, protocol="fedlog", clients=4))
    made = problem.divide(0)
    assert made.whole is not None
    assert made.newcomer is not None
    assert len(made.federation) == len(made.whole) == 3
    assert made.federation.client_names == made.whole.client_names
    about = made.federation.about["unseen"]
    for place, (small, whole) in enumerate(
        zip(made.federation.graphs, made.whole.graphs, strict=True)
    ):
        assert small.since is None
        hidden = set(whole.ids[whole.since > 0].tolist())
        assert hidden
        assert hidden.isdisjoint(small.ids.tolist())
        assert small.num_nodes + len(hidden) == whole.num_nodes
        assert about["unseen_node"][place] == int((whole.since == UNSEEN).sum())
        missing = whole.y[whole.since == MISSING].unique().tolist()
        assert about["missing_classes"][place] == missing
        assert len(missing) == 1
        assert not (small.y[small.train > 0] == missing[0]).any()
        assert made.federation.about["nodes"][place] == small.num_nodes
    newcomer = made.newcomer.graphs[0]
    assert newcomer.test.all()  # all nodes of the new client count


@pytest.mark.parametrize("method", ["fedavg", "fedpub", "reef"])
def test_unseen_nodes_change_no_bit_of_the_training(method: str) -> None:
    source = atoll.load(DATA, clients=4)
    dense = source.x if isinstance(source.x, np.ndarray) else source.x.toarray()
    config = make_config(data=source.name, objects=["data"], split="unseen")
    whole = Problem.of(config, replace(source, x=dense)).divide(0).whole
    assert whole is not None

    def changed(graph: atoll.Graph) -> atoll.Graph:
        new = graph.since > 0
        x = torch.where(new[:, None], 7.0, graph.x)
        y = torch.where(new, (graph.y + 1) % whole.classes, graph.y)
        weight = torch.where(new[graph.edges].any(0), 3.0, graph.edge_weight)
        return replace(graph, x=x, y=y, edge_weight=weight)

    other = replace(whole, graphs=tuple(map(changed, whole.graphs)))
    before, after = (atoll.run(method, one, rounds=3) for one in (whole, other))
    assert before.metrics() == after.metrics()
    assert before.unseen["missing_class"] != after.unseen["missing_class"]


def test_one_run_has_four_scores(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = atoll.run("fedavg", DATA, protocol="fedlog", seeds=2, out=out, **SMALL)
    assert list(result.unseen) == ["unseen_node", "missing_class"]
    assert result.first_day is not None
    assert "test_accuracy" in result.metrics()
    method = atoll.methods.FedAvg(net=atoll.nn.GCN(600, 6, hidden=8))
    for seed in (0, 1):
        whole = Problem.of(make_config(data=DATA, protocol="fedlog", clients=4)).divide(seed).whole
        assert whole is not None
        params = RunFolder(out).model(seed).deployed[0]
        for kind, role in (("unseen_node", UNSEEN), ("missing_class", MISSING)):
            hits = total = 0
            for graph in whole.graphs:
                chosen = graph.since == role
                plain = replace(graph, since=None, edge_since=None)
                logits = method.net(params, with_views(plain, method.views))
                hits += int((logits.argmax(-1) == graph.y)[chosen].sum())
                total += int(chosen.sum())
            found = result.unseen[kind].metrics["accuracy"]["per_seed"][seed]
            assert found == pytest.approx(hits / total)
    again = read_result(out)
    assert again.unseen == result.unseen
    assert again.first_day == result.first_day
    assert atoll.resume(out).unseen == result.unseen
    (first, second, third) = result.after_training()
    assert first.startswith("New nodes of classes that their client knows (")
    assert second.startswith("New nodes of classes without a training node at their client (")
    assert third.startswith("Client ")
    shown = page(collect([out]))
    assert all(line in shown for line in (first, second, third))


def test_without_a_global_model_every_client_predicts_for_the_new_one() -> None:
    result = atoll.run("local", DATA, protocol="fedlog", **SMALL)
    found = result.first_day
    assert found is not None
    assert found.models == 3
    assert found.metrics["worst_accuracy"]["mean"] <= found.metrics["accuracy"]["mean"]
    assert "the mean of 3 clients' models (the worst: accuracy" in found.sentence("accuracy")
    assert result.unseen["missing_class"].metrics["accuracy"]["mean"] < 0.2  # no such class yet


def test_a_file_keeps_the_unseen_nodes_and_the_new_client(tmp_path: Path) -> None:
    given = make_config(data=DATA, protocol="fedlog", clients=4)
    file, _ = save_divided(given, tmp_path / "f.atoll")
    plain = atoll.run("fedavg", DATA, protocol="fedlog", **SMALL)
    kept = atoll.run("fedavg", str(file), rounds=3, set={"hidden": 8})
    assert kept.unseen == plain.unseen
    assert kept.first_day == plain.first_day


@pytest.mark.parametrize(
    ("method", "options", "problem"),
    [
        ("fedgnn", {}, "FedGNN cannot predict for new nodes"),
        ("fedavg", {"evaluate": "local"}, "the deployed model predicts new nodes"),
        ("fedavg", {"compat": ["test-selection"]}, "keeps no model for new nodes"),
    ],
)
def test_what_cannot_be_scored_is_refused(method: str, options: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        atoll.run(method, DATA, protocol="fedlog", **SMALL, **options)
