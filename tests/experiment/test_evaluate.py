"""Scoring on a client: the same numbers as scikit-learn's, alone and for many clients at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, log_loss, roc_auc_score
from torch import Tensor

from atoll.core.graph import Graph, make_graph
from atoll.core.message import ToAll, ToEach
from atoll.core.random import make_key
from atoll.core.task import ROLES, Scores
from atoll.core.tree import Tree
from atoll.engines.fused import Fused
from atoll.engines.serial import Serial
from atoll.experiment.evaluate import Evaluator
from atoll.experiment.metrics import METRICS
from atoll.experiment.rounds import score_numbers


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
