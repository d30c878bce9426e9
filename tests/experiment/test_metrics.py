"""Metrics: scores of clients by hand, means over clients, and the client step that counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    brier_score_loss,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_recall_fscore_support,
    precision_score,
    recall_score,
    roc_auc_score,
)
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, make_graph
from atoll.core.message import ToAll, ToEach
from atoll.core.random import make_key
from atoll.core.score_bins import binned, middles
from atoll.core.task import ROLES, Scores
from atoll.core.tree import Tree
from atoll.engines.fused import Fused
from atoll.engines.serial import Serial
from atoll.experiment.metrics import (
    METRICS,
    POOLED,
    Evaluator,
    best_round,
    find_metric,
    from_confusion,
    mean_over_clients,
    per_class,
    spread,
)
from atoll.experiment.metrics import (
    score as score_of,
)
from atoll.experiment.rounds import score_numbers

CLASSES = 4
labels = st.integers(0, CLASSES - 1)


@given(st.lists(st.tuples(labels, labels), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_scores_equal_scikit_learn_even_if_classes_are_missing(pairs):
    truth, guess = (list(side) for side in zip(*pairs, strict=True))
    ours = from_confusion(confusion_matrix(truth, guess, labels=range(CLASSES)))
    assert ours["accuracy"] == pytest.approx(accuracy_score(truth, guess))
    for average in ("macro", "weighted"):
        theirs = f1_score(truth, guess, average=average, zero_division=0)
        assert ours[f"{average}_f1"] == pytest.approx(theirs), average


def test_many_confusions_at_once():
    counts = np.random.default_rng(0).integers(0, 9, (3, 5, CLASSES, CLASSES))
    whole = from_confusion(counts)
    for i, j in np.ndindex(3, 5):
        for name, value in from_confusion(counts[i, j]).items():
            assert whole[name].shape == (3, 5)
            assert whole[name][i, j] == value


def test_a_client_without_nodes_has_no_score_rather_than_a_perfect_one():
    empty = from_confusion(np.zeros((2, CLASSES, CLASSES)))
    assert all(np.isnan(values).all() for values in empty.values())


def test_scores_by_hand():
    # Class 0: two right, one taken for 1. Class 1: one right, one taken for 2. Class 2: none.
    scores = from_confusion(np.array([[2, 1, 0], [0, 1, 1], [0, 0, 0]]))
    f1 = [4 / 5, 2 / 4, 0.0]
    assert scores["accuracy"] == pytest.approx(3 / 5)
    assert scores["macro_f1"] == pytest.approx(sum(f1) / 3)
    assert scores["weighted_f1"] == pytest.approx((3 * f1[0] + 2 * f1[1]) / 5)


def test_means_are_weighted_and_leave_out_what_is_not_there():
    values = np.array([[0.5, np.nan, 1.0], [np.nan, np.nan, 0.25]])
    weight = np.array([1.0, 100.0, 3.0])
    assert mean_over_clients(values, weight).tolist() == [pytest.approx(0.875), 0.25]
    assert mean_over_clients(values, np.ones(3)).tolist() == [0.75, 0.25]


def test_a_mean_over_nobody_is_no_number():
    assert np.isnan(mean_over_clients(np.array([np.nan, np.nan]), np.ones(2)))
    assert np.isnan(mean_over_clients(np.array([0.5, 0.5]), np.zeros(2)))


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8),
    st.integers(0, 8),
    st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_adding_clients_without_a_number_changes_no_mean(scores, missing, seed):
    dice = np.random.default_rng(seed)
    values = np.concatenate([scores, np.full(missing, np.nan)])
    weight = dice.uniform(0.1, 9, len(values))
    order = dice.permutation(len(values))
    mean = mean_over_clients(values[order], weight[order])
    assert mean == pytest.approx(np.average(scores, weights=weight[: len(scores)]))


@pytest.mark.parametrize(
    ("validation", "best"),
    [
        ([0.1, 0.7, 0.7, 0.3], 1),
        ([0.7, 0.7], 0),
        ([np.nan, 0.2, 0.2], 1),
        ([0.3, np.nan, 0.9, np.nan], 2),
        ([np.nan, np.nan, np.nan], 2),
        ([0.0], 0),
    ],
)
def test_the_best_round_is_the_earliest_of_equals(validation, best):
    assert best_round(np.array(validation)) == best


def test_one_value_has_no_spread():
    assert spread([0.5]) is None
    assert spread([]) is None
    assert spread([1.0, 3.0]) == pytest.approx(2**0.5)
    assert spread(np.array([2.0, 2.0])) == 0.0


@dataclass(frozen=True)
class Reader:
    """Predicts the values in the features."""

    def predict(self, graph: Graph, message: Tree, state: Tree, key: Tensor | None = None) -> Any:
        return graph.x * message if key is None else graph.x * 0

    def derived_from(self, state: Tree) -> Tree:
        return None


def client(seed: int, nodes: int, classes: int, *, ties: bool = False) -> Graph:
    """Logits as features, random labels (some classes may be missing) and disjoint masks."""
    dice = torch.Generator().manual_seed(seed)
    logits = torch.randn(nodes, classes, generator=dice, dtype=torch.float64)
    if ties:
        logits = logits.round()
    y = torch.randint(max(1, classes - seed % 2), (nodes,), generator=dice)
    role = torch.randint(4, (nodes,), generator=dice)  # 3 is in no mask
    edges = torch.zeros(2, 0, dtype=torch.int64)
    masks = {name: role == number for number, name in enumerate(ROLES)}
    return make_graph(logits, edges, y, **masks)


def score(graph: Graph, **options: Any) -> Scores:
    evaluator = Evaluator(Reader(), **options)
    return evaluator.score(graph, torch.tensor(1.0), None, make_key(0))[0]


def expected_auc(truth: np.ndarray, score: np.ndarray) -> float:
    """One class against the rest, averaged over the classes that have both."""
    areas = [
        roc_auc_score(truth == c, score[:, c])
        for c in range(score.shape[1])
        if 0 < (truth == c).sum() < len(truth)
    ]
    return float(np.mean(areas)) if areas else -1.0


@given(st.integers(0, 999), st.integers(1, 40), st.integers(2, 5), st.booleans())
@example(345, 37, 5, True)
@settings(max_examples=60, deadline=None)
def test_counts_loss_and_auc_equal_scikit_learn(seed, nodes, classes, ties):
    graph = client(seed, nodes, classes, ties=ties)
    scores = score(graph, with_auc=True)
    p = torch.softmax(graph.x, -1).numpy()
    # Areas of the same numbers: rounding breaks a tie in p otherwise than in log p.
    log_p = torch.log_softmax(graph.x, -1).numpy()
    for number, role in enumerate(ROLES):
        chosen = getattr(graph, role).numpy() > 0
        truth, guess = graph.y.numpy()[chosen], p[chosen].argmax(-1)
        if not chosen.any():
            assert not scores.confusion[number].any()
            assert scores.auc[number] == -1
            continue
        counts = confusion_matrix(truth, guess, labels=range(classes))
        np.testing.assert_array_equal(scores.confusion[number].numpy(), counts)
        loss = log_loss(truth, p[chosen], labels=range(classes))
        assert float(scores.loss[number]) == pytest.approx(loss)
        assert float(scores.auc[number]) == pytest.approx(expected_auc(truth, log_p[chosen]))


def test_two_classes_have_the_usual_auc():
    graph = client(4, 60, 2)
    chosen = graph.test.numpy() > 0
    p = torch.softmax(graph.x, -1)[:, 1].numpy()
    usual = roc_auc_score(graph.y.numpy()[chosen], p[chosen])
    assert float(score(graph, with_auc=True).auc[2]) == pytest.approx(usual)


def test_scores_that_are_all_equal_have_half_the_area():
    graph = client(4, 60, 3)
    flat = replace(graph, x=torch.zeros_like(graph.x))
    torch.testing.assert_close(
        score(flat, with_auc=True).auc, torch.full((3,), 0.5, dtype=torch.float64)
    )


def test_without_being_asked_there_is_no_auc():
    assert score(client(4, 60, 3)).auc.tolist() == [-1, -1, -1]


def test_many_clients_at_once_are_scored_as_each_alone():
    graphs = [client(seed, nodes, 3) for seed, nodes in enumerate((40, 7, 1, 90))]
    step = Evaluator(Reader(), with_auc=True).score
    keys, positions = make_key(0).expand(4), [0, 1, 2, 3]
    message = ToEach(torch.tensor([1.0, 2.0, -1.0, 0.5]))
    fused = Fused(graphs).run(step, positions, message, keys, 0)
    serial = Serial(graphs).run(step, positions, message, keys, 0)
    for name in ("confusion", "loss", "auc"):
        torch.testing.assert_close(getattr(fused, name), getattr(serial, name))


def test_dropout_is_on_only_if_asked_for():
    graph = client(4, 60, 3)
    assert torch.equal(score(graph, with_dropout=True).confusion[:, :, 1:].sum(), torch.zeros(()))
    assert score(graph).confusion[:, :, 1:].sum() > 0


def test_numbers_have_a_place_for_every_metric_and_nothing_where_a_role_is_empty():
    graph = client(4, 60, 3)
    empty = replace(graph, test=torch.zeros_like(graph.test))
    positions = [0, 1]
    step = Evaluator(Reader(), with_auc=True).score
    keys = make_key(0).expand(2)
    replies = Serial([graph, empty]).run(step, positions, ToAll(torch.tensor(1.0)), keys, 0)
    table = score_numbers(replies)
    assert table.shape == (2, len(ROLES), len(METRICS))
    assert np.isnan(table[1, ROLES.index("test")]).all()
    assert not np.isnan(table[0]).any()
    assert not np.isnan(table[1, :2]).any()
    without = score_numbers(replace(replies, auc=torch.full((2, 3), -1.0)))
    assert np.isnan(without[..., METRICS.index("auc")]).all()


def scored(size: int = 500, share: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and log-odds that know something of them."""
    noise = np.random.default_rng(1)
    y = (noise.random(size) < share).astype(np.int64)
    return y, noise.normal(3 * y - 2.5, 1.0)


def both(z: np.ndarray) -> np.ndarray:
    """Probabilities of two classes, (N, 2), from the log-odds of the second."""
    positive = 1 / (1 + np.exp(-z))
    return np.stack([1 - positive, positive], axis=1)


def by_sklearn(y: np.ndarray, p: np.ndarray) -> dict[str, float]:
    order = np.argsort(-p)
    top = {share: y[order[: int(np.ceil(share * len(y)))]] for share in (0.01, 0.05)}
    edges = np.minimum((p * 15).astype(int), 14)
    groups = [np.flatnonzero(edges == group) for group in range(15)]
    return {
        "average_precision": average_precision_score(y, p),
        "recall@1%": top[0.01].sum() / y.sum(),
        "precision@1%": top[0.01].mean(),
        "recall@5%": top[0.05].sum() / y.sum(),
        "precision@5%": top[0.05].mean(),
        "precision": precision_score(y, p >= 0.5),
        "recall": recall_score(y, p >= 0.5),
        "f1": f1_score(y, p >= 0.5),
        "brier": brier_score_loss(y, p),
        "ece": sum(abs(y[g].sum() - p[g].sum()) for g in groups) / len(y),
    }


def test_metrics_of_a_positive_class_equal_scikit_learn():
    y, z = scored()
    for name, value in by_sklearn(y, both(z)[:, 1]).items():
        assert score_of(name, y, both(z)) == pytest.approx(value), name
    turned = both(z)[:, ::-1]
    expected = by_sklearn(y, both(z)[:, 1])["average_precision"]
    assert score_of("average_precision", 1 - y, turned, positive=0) == pytest.approx(expected)


def test_metrics_from_fixed_bins_are_near_scikit_learn():
    y, z = scored(4000)
    counts = binned(torch.from_numpy(z), torch.from_numpy(y), torch.ones(1, len(y)))[0].numpy()
    for name, value in by_sklearn(y, both(z)[:, 1]).items():
        of_bins = find_metric(name).of_bins
        assert of_bins is not None
        near = {"recall@1%": 2 / y.sum(), "precision@1%": 2 / 40}.get(name, 0.005)
        assert float(of_bins(counts, middles().numpy())) == pytest.approx(value, abs=near), name


def test_bins_of_several_clients_add_up_and_many_are_read_at_once():
    y, z = scored()
    masks = torch.stack([torch.arange(500) < 200, torch.arange(500) >= 200]).double()
    parts = binned(torch.from_numpy(z), torch.from_numpy(y), masks).numpy()
    whole = binned(torch.from_numpy(z), torch.from_numpy(y), torch.ones(1, 500)).numpy()[0]
    for name in POOLED:
        of_bins = find_metric(name).of_bins
        assert of_bins is not None
        each, middle = of_bins(parts, middles().numpy()), middles().numpy()
        assert [float(of_bins(part, middle)) for part in parts] == each.tolist()
        assert of_bins(parts.sum(0), middle) == of_bins(whole, middle)


def test_equal_scores_share_the_last_place_and_no_positives_are_no_number():
    y, flat = np.array([1, 0, 0, 1]), np.full((4, 2), 0.5)
    assert score_of("recall@25%", y, flat) == 0.25  # one of four is chosen, half of which are right
    assert score_of("precision@25%", y, flat) == 0.5
    for name in ("average_precision", "recall@1%", "recall"):
        assert np.isnan(score_of(name, np.zeros(4, dtype=int), flat)), name


def test_scores_of_arrays_equal_scikit_learn_with_many_classes():
    noise = np.random.default_rng(0)
    p = noise.dirichlet(np.ones(3), size=60)
    y = noise.integers(0, 3, 60)
    assert score_of("accuracy", y, p) == pytest.approx(accuracy_score(y, p.argmax(1)))
    assert score_of("macro_f1", y, p) == pytest.approx(f1_score(y, p.argmax(1), average="macro"))
    assert score_of("auc", y, p) == pytest.approx(roc_auc_score(y, p, multi_class="ovr"))
    assert score_of("loss", y, p) == pytest.approx(log_loss(y, p))
    with pytest.raises(ConfigError, match="'recall@1%' needs two classes, but there are 3"):
        score_of("recall@1%", y, p)
    theirs = precision_recall_fscore_support(y, p.argmax(1), zero_division=np.nan)
    ours = per_class(confusion_matrix(y, p.argmax(1), labels=range(3)))
    for name, expected in zip(("precision", "recall", "f1"), theirs, strict=False):
        np.testing.assert_allclose(ours[name], expected)


@pytest.mark.parametrize("name", ["recal", "recall@0%", "recall@101%", "recall@x%", "f2", "",
                                  "recall@\u0661%"])  # fmt: skip
def test_an_unknown_metric_is_one_sentence_with_the_list(name):
    with pytest.raises(ConfigError, match=r"unknown metric .* choose one of: accuracy, macro_f1"):
        find_metric(name)
