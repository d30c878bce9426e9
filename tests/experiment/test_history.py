"""A history starts with the sizes, continues from a checkpoint, and has a selected round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import atoll
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.engines.ledger import Ledger
from atoll.experiment.baseline import Baseline, run_baseline
from atoll.experiment.config import make_config, resolve
from atoll.experiment.folder import open_run
from atoll.experiment.history import BEST_CACHED, History, Improvements, Selection, empty_history
from atoll.experiment.metrics import METRICS, POOLED, score
from atoll.experiment.predict import predict
from atoll.experiment.run import Stopped
from atoll.experiment.threshold import Threshold
from atoll.present.terminal import alert_line
from atoll.testing import small_federation
from tests.experiment.conftest import StopAt


def test_a_history_begins_with_the_sizes_of_the_clients() -> None:
    federation = small_federation()
    history = empty_history(federation)
    assert history.rounds == 0
    assert history.nodes.tolist() == [graph.num_nodes for graph in federation.graphs]
    for counts, graph in zip(history.counts, federation.graphs, strict=True):
        assert counts.tolist() == [int(m.sum()) for m in (graph.train, graph.val, graph.test)]


def test_a_history_continues_from_a_checkpoint() -> None:
    history = empty_history(small_federation())
    tables = torch.rand(2, len(history.nodes), 3, len(METRICS), dtype=torch.float64)
    scores = {"deployed": tables, "local": torch.zeros(0)}
    ledger = Ledger()
    ledger.add(0, "train", [0, 1], down=7, up=11)
    seconds = torch.tensor([0.5, 0.25])
    history.restore({"scores": scores, "seconds": seconds, "ledger": ledger.export()})
    assert history.ledger.entries == ledger.entries
    assert (history.rounds, history.seconds) == (2, [0.5, 0.25])
    found = history.array("deployed", "loss", "val")
    np.testing.assert_array_equal(found, tables[:, :, 1, METRICS.index("loss")].numpy())
    with pytest.raises(ValueError, match="need at least one array"):
        history.array("local", "loss", "val")  # none was scored
    # Rounds that come, and rounds that take the place of others, are seen.
    history.scores["deployed"].append(tables[0].numpy())
    assert len(history.array("deployed", "loss", "val")) == 3
    history.scores["deployed"] = [tables[1].numpy()] * 3
    np.testing.assert_array_equal(history.array("deployed", "loss", "val")[0], found[1])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_improvements_find_the_rounds_that_the_selection_picks(data):
    rounds, clients = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    value = st.sampled_from([0.0, 0.25, 0.5, float("nan")])
    size = rounds * clients * 15
    numbers = np.array(data.draw(st.lists(value, min_size=size, max_size=size)))
    tables = list(numbers.reshape(rounds, clients, 3, 5))
    for table in tables[1:]:  # a client has a metric in all rounds, or in none
        table[np.isnan(tables[0])] = np.nan
        table[np.isnan(table) & ~np.isnan(tables[0])] = 0.0
    history = History(
        counts=np.array(data.draw(st.lists(st.integers(1, 9), min_size=clients, max_size=clients)))[
            :, None
        ].repeat(3, 1),
        nodes=np.arange(1, clients + 1),
        scores={"deployed": tables, "local": tables},
        seconds=[0.0] * rounds,
    )
    select = data.draw(st.sampled_from(["best-val", "best-val-per-client", "last"]))
    rule = Selection("deployed", data.draw(st.sampled_from(["accuracy", "auc"])), "tests", select)
    found, improvements = np.full(clients, -1), Improvements(rule, rounds)
    for number in range(rounds):
        found[improvements.of(history, number)] = number
    assert found.tolist() == rule.rounds(history).tolist()


def test_no_round_improves_where_test_scores_select():
    rule = Selection("deployed", "accuracy", "tests", BEST_CACHED)
    history = History(counts=np.ones((2, 3)), nodes=np.ones(2))
    assert not Improvements(rule, 1).of(history, 0).any()


TWO: dict[str, Any] = {
    "data": "lagoon:nodes=150,classes=2,label_skew=0",
    "clients": 2,
    "rounds": 4,
    "epochs": 1,
    "set": {"hidden": 8},
}
TRUTH: list[Tensor] = []


def test_a_pooled_metric_selects_the_round_and_its_model_is_kept(tmp_path: Path) -> None:
    result = atoll.run("fedavg", metric="average_precision", out=tmp_path / "run", **TWO)
    assert result.metric == "average_precision"
    curve = result.curve(role="val")[0]
    found = result.metrics()
    assert found["best_round"]["mean"] == np.argmax(curve)
    assert found["val_average_precision"]["mean"] == curve.max()
    assert open_run(tmp_path / "run").model().rounds.tolist() == [np.argmax(curve)] * 2
    assert {f"test_{name}" for name in POOLED} <= set(found)
    assert result.of_clients("average_precision").shape == (1, 2)


class Guess(Baseline[None]):
    """Knows the truth, with noise."""

    def fit(self, federation: Federation, seed: int) -> None:
        return None

    def predict(self, model: None, client: int, graph: Graph) -> Tensor:
        noise = torch.from_numpy(np.random.default_rng(client).normal(size=(graph.num_nodes, 2)))
        return noise + 1.5 * torch.stack([1 - TRUTH[client], TRUTH[client]], dim=1)


@pytest.mark.parametrize("positive", [0, 1])
def test_a_pooled_metric_is_that_of_all_clients_nodes_together(positive: int) -> None:
    clients = atoll.partition(atoll.load(TWO["data"], clients=2))
    TRUTH[:] = [graph.y.double() for graph in clients.graphs]
    names = ["method", "data"]
    chosen = {"metric": "average_precision", "positive": str(positive), "objects": names}
    config = make_config(method="guess", data=clients.name, **chosen)
    found = run_baseline(config, Guess(), data=clients).metrics()
    labels, probabilities = [], []
    for client, graph in enumerate(clients.graphs):
        test = graph.test > 0
        labels.append(graph.y[test].numpy())
        logits = Guess().predict(None, client, graph)[test]
        probabilities.append(logits.softmax(1).numpy())
    for name in POOLED:
        exact = score(name, np.concatenate(labels), np.concatenate(probabilities), positive)
        assert found[f"test_{name}"]["mean"] == pytest.approx(exact, abs=0.01), name


def test_engines_agree_on_bins() -> None:
    values = [
        atoll.run("fedavg", engine=name, metric="average_precision", **TWO).metrics()
        for name in ("fused", "serial")
    ]
    for name in ("test_average_precision", "test_brier", "test_recall@1%"):
        one, two = (found[name]["mean"] for found in values)
        assert one == pytest.approx(two, abs=1e-3), name


def test_files_and_a_stop_keep_the_numbers(tmp_path: Path) -> None:
    whole = atoll.run("fedavg", metric="f1", out=tmp_path / "whole", **TWO).metrics()
    read = atoll.read_result(tmp_path / "whole").metrics()
    assert {k: v["mean"] for k, v in read.items()} == pytest.approx(
        {k: v["mean"] for k, v in whole.items()}, rel=1e-5
    )
    with pytest.raises(Stopped):
        atoll.run("fedavg", metric="f1", out=tmp_path / "cut", observer=StopAt(2), **TWO)
    assert atoll.resume(tmp_path / "cut").metrics() == whole


def test_a_run_without_a_chosen_metric_counts_no_bins() -> None:
    result = atoll.run("fedavg", **TWO)
    assert result.metric == "accuracy"
    assert "test_average_precision" not in result.metrics()
    assert result.seeds[0].history.columns == METRICS


def test_the_confusion_matrix_has_every_test_node_once() -> None:
    result = atoll.run("fedavg", seeds=2, **TWO)
    counts = result.confusion()
    assert counts is not None
    assert counts.sum() == sum(seed.history.counts[:, 2].sum() for seed in result.seeds)
    right = np.diagonal(counts).sum() / counts.sum()
    assert right == pytest.approx(result.metrics()["test_accuracy_by_tests"]["mean"], abs=0.01)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "recal@1%"}, "unknown metric 'recal@1%'; choose one of: accuracy"),
        ({"metric": "brier"}, "brier is better when lower; choose one of: accuracy"),
        ({"metric": "f1", "data": "lagoon:nodes=150"}, "f1 is computed for two classes, but"),
        ({"metric": "auc", "data": "lagoon:nodes=150"}, "auc is computed for two classes, but"),
        ({"metric": "f1", "positive": "fraud"}, "unknown class 'fraud'"),
        ({"positive": "1", "data": "lagoon:nodes=150"}, "--positive is for two classes, but"),
        ({"metric": "f1", "evaluate": "local", "fraction": 0.5}, "choose --evaluate deployed"),
        ({"threshold": "f1"}, "threshold cannot be 'f1'; give one of max_f1"),
        ({"threshold": "max_f1", "data": "lagoon:nodes=150"}, "a threshold is for two classes"),
        ({"threshold": "max_f1", "evaluate": "local"}, "remove one of the two"),
    ],
)
def test_a_metric_that_does_not_fit_is_one_sentence(options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        atoll.run("fedavg", **{**TWO, **options})
    assert words in str(refused.value)


def test_a_run_chooses_its_threshold_on_validation_nodes(tmp_path: Path) -> None:
    clients = atoll.partition(atoll.load(TWO["data"], clients=2))
    options = {"rounds": 3, "epochs": 1, "threshold": "max_f1", "positive": "0"}
    result = atoll.run("fedavg", clients, seeds=2, out=tmp_path / "run", **options)
    found = result.metrics()
    val = np.concatenate([graph.val.numpy() > 0 for graph in clients.graphs])
    positive = np.concatenate([graph.y.numpy() == 0 for graph in clients.graphs])
    for place in range(2):
        threshold = Threshold.of(open_run(tmp_path / "run").model(place).about)
        assert threshold is not None
        assert (threshold.rule, threshold.positive) == ("max_f1", 0)
        assert found["threshold"]["per_seed"][place] == threshold.value
        # The same from the probabilities of the saved model.
        alerts = predict(tmp_path / "run", clients, seed=place).alerts
        assert alerts is not None
        hits = (alerts & positive & val).sum()
        assert threshold.recall == pytest.approx(hits / (positive & val).sum(), abs=0.03)
        assert threshold.precision == pytest.approx(hits / (alerts & val).sum(), abs=0.03)
    assert {"threshold_precision", "threshold_recall", "threshold_alerts"} <= set(found)
    assert atoll.read_result(tmp_path / "run").metrics()["threshold"] == found["threshold"]
    (said,) = alert_line(result)
    assert said.startswith("alert if the probability is at least ")
    assert "(max_f1 on validation nodes): test precision" in said


def test_a_rule_that_no_threshold_satisfies_is_said() -> None:
    result = atoll.run("fedavg", threshold="recall@precision=1", **TWO)
    for rounds in result.seeds[0].history.pooled["deployed_bins"]:
        rounds[:] = 1  # as many positives as negatives everywhere
    assert "threshold" not in result.metrics()
    said = "no threshold reaches recall@precision=1 on the validation nodes"
    assert alert_line(result) == [f"{said}, so the model has no threshold"]


def test_a_pooled_metric_needs_one_round_for_all_clients() -> None:
    with pytest.raises(ConfigError, match="protocol fediih picks a round for each client; choose"):
        resolve(make_config(data="cora", protocol="fediih", metric="f1"))
