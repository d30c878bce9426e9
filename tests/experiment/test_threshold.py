"""Thresholds: each rule equals a search through all thresholds of scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, precision_recall_curve

from atoll.core.errors import ConfigError
from atoll.core.score_bins import bin_of, binned, lower_edges
from atoll.experiment.threshold import RULES, Threshold, choose, parse_rule

Labelled = tuple[np.ndarray, np.ndarray]


@st.composite
def labelled(draw: st.DrawFn) -> Labelled:
    """Log-odds and labels with at least one positive."""
    size = draw(st.integers(2, 40))
    z = draw(st.lists(st.floats(-20, 20, width=32), min_size=size, max_size=size))
    y = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    return np.array(z), np.array([1, *y[1:]])


def counted(found: Labelled) -> np.ndarray:
    z, y = map(torch.from_numpy, found)
    return binned(z, y, torch.ones(1, len(y)))[0].numpy()


def of_bins(found: Labelled) -> np.ndarray:
    """Scores as the bins know them: the probability at which each bin begins."""
    return lower_edges()[bin_of(torch.from_numpy(found[0]))].numpy()


@settings(max_examples=30, deadline=None)
@given(labelled())
def test_max_f1_and_the_bounded_rules_are_the_best_of_scikit_learns_curve(found: Labelled) -> None:
    precision, recall, _ = precision_recall_curve(found[1], of_bins(found))
    precision, recall = precision[:-1], recall[:-1]  # the last point has no threshold
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
    chosen = choose(parse_rule("max_f1"), counted(found), 1)
    assert chosen is not None
    both = chosen.precision + chosen.recall
    assert 2 * chosen.precision * chosen.recall / both == pytest.approx(f1.max())
    for text, wanted, bound in (
        ("recall@precision=0.6", recall, precision),
        ("precision@recall=0.6", precision, recall),
    ):
        chosen = choose(parse_rule(text), counted(found), 1)
        if (bound < 0.6).all():
            assert chosen is None
        else:
            assert chosen is not None
            value = getattr(chosen, text.partition("@")[0])
            assert value == pytest.approx(wanted[bound >= 0.6].max())


@settings(max_examples=30, deadline=None)
@given(labelled())
def test_the_cost_rule_has_the_lowest_cost_of_all_thresholds(found: Labelled) -> None:
    chosen = choose(parse_rule("cost:3,1"), counted(found), 1)
    assert chosen is not None
    scores = of_bins(found)

    def cost(threshold: float) -> float:
        matrix = confusion_matrix(found[1], scores >= threshold, labels=[0, 1])
        return float(3 * matrix[1, 0] + matrix[0, 1])

    assert cost(chosen.value) == min(cost(value) for value in [*scores, 2.0])
    assert chosen.alerts == pytest.approx((scores >= chosen.value).mean())


def test_of_equal_thresholds_the_one_with_the_fewest_alerts_is_chosen() -> None:
    found = np.array([-3.0, 2.0]), np.array([0, 1])
    chosen = choose(parse_rule("max_f1"), counted(found), 1)
    assert chosen is not None
    assert chosen.value == of_bins(found)[1]


def test_nothing_is_chosen_without_a_positive() -> None:
    found = np.array([-3.0, 2.0]), np.array([0, 0])
    assert all(choose(parse_rule(t), counted(found), 1) is None for t in ("max_f1", "cost:1,1"))


def test_a_threshold_is_read_back_from_the_content_of_a_model_file() -> None:
    one = Threshold("max_f1", 0.25, 1, 0.5, 0.75, 0.1)
    assert Threshold.of({"threshold": one.plain()}) == one
    assert Threshold.of({"round": 3}) is None
    assert Threshold.of(None) is None


@pytest.mark.parametrize(
    "text",
    ["f1", "recall@precision=2", "recall@recall=0.5", "precision@recall=x", "cost:1", "cost:0,1",
     "cost:inf,1", "recall@precision=nan", "recall@precision= 0.5", "cost:1,1 ", "cost:1.2.3,1",
     "recall@precision=\u0660.\u0665", "cost:\u0661,1"],
)  # fmt: skip
def test_another_rule_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=f"threshold cannot be '{text}'; give one of max_f1"):
        parse_rule(text)


def test_every_rule_of_the_table_can_be_written() -> None:
    for text in RULES:
        written = text.replace("=P", "=0.9").replace("=R", "=0.9").replace("FN,FP", "10,1")
        assert parse_rule(written).text == written
