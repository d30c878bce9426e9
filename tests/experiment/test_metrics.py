"""Metrics: scores of clients by hand, means over clients, and the client step that counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, log_loss, roc_auc_score
from torch import Tensor

from atoll.core.graph import Graph, make_graph
from atoll.core.message import ToAll, ToEach
from atoll.core.random import make_key
from atoll.core.task import ROLES, Scores
from atoll.core.tree import Tree
from atoll.engines.fused import Fused
from atoll.engines.serial import Serial
from atoll.experiment.metrics import (
    METRICS,
    Evaluator,
    best_round,
    from_confusion,
    mean_over_clients,
    spread,
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
    # Three of class 0, one taken for 1; one of class 1, right; nobody of class 2, guessed once.
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
    """Predicts what stands in the features."""

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
