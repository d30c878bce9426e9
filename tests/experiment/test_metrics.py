"""Metrics against scikit-learn, and means that leave out clients without a number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

from atoll.experiment.metrics import best_round, from_confusion, mean_over_clients, spread

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
