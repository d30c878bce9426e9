"""Losses: means over masks, against torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch.func import grad
from torch.nn import functional

from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, make_graph
from atoll.core.losses import (
    class_means,
    cross_entropy,
    log_probabilities,
    masked_mean,
    sq_distance,
    with_loss,
)


def labelled(train: list[int]) -> Graph:
    edges = torch.zeros(2, 0, dtype=torch.int64)
    y = torch.tensor([0, 2, 1, 2])
    return make_graph(torch.zeros(4, 1), edges, y, train=torch.tensor(train))


def logits() -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def test_class_means_by_hand():
    z = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 8.0], [7.0, 7.0]])
    means, count = class_means(z, torch.tensor([0, 2, 0, 1]), torch.tensor([1.0, 1.0, 1.0, 0.0]), 3)
    assert means.tolist() == [[3.0, 5.0], [0.0, 0.0], [3.0, 4.0]]  # the row of class 1 is masked
    assert count.tolist() == [2.0, 0.0, 1.0]


def test_masked_mean_by_hand():
    values = torch.tensor([1.0, 5.0, 9.0])
    assert float(masked_mean(values, torch.tensor([1.0, 0.0, 1.0]))) == 5
    assert float(masked_mean(values, torch.zeros(3))) == 0


def test_cross_entropy_equals_torch_on_the_training_nodes():
    out, graph = logits(), labelled([1, 0, 1, 1])
    chosen = torch.tensor([0, 2, 3])
    expected = functional.cross_entropy(out[chosen], graph.y[chosen])
    torch.testing.assert_close(cross_entropy(out, graph), expected)


def test_nodes_outside_the_mask_have_no_gradient():
    graph = labelled([1, 0, 1, 0])
    slope = grad(lambda out: cross_entropy(out, graph))(logits())
    assert slope[[1, 3]].abs().max() == 0
    assert (slope[[0, 2]].abs().sum(1) > 0).all()


def test_a_client_without_training_nodes_has_no_loss_and_no_gradient():
    graph = labelled([0, 0, 0, 0])
    assert float(cross_entropy(logits(), graph)) == 0
    assert not grad(lambda out: cross_entropy(out, graph))(logits()).any()


def test_labels_of_other_nodes_do_not_matter():
    graph = labelled([1, 0, 1, 0])
    other = replace(graph, y=torch.tensor([0, 0, 1, 0]))
    assert torch.equal(cross_entropy(logits(), graph), cross_entropy(logits(), other))


def test_squared_distance_of_trees_by_hand():
    a = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3.0)}
    b = {"w": torch.tensor([[0.0, 4.0]]), "b": torch.tensor(-1.0)}
    assert float(sq_distance(a, b)) == 1 + 4 + 16
    slope = grad(sq_distance)(a, b)
    assert slope["w"].tolist() == [[2.0, -4.0]]
    assert float(slope["b"]) == 8


def test_squared_distance_needs_trees_of_one_structure():
    with pytest.raises(ValueError, match="longer"):
        sq_distance([torch.zeros(1)], [torch.zeros(1), torch.zeros(1)])


def test_a_small_loss_beside_large_logits_is_not_rounded_away():
    graph = make_graph(
        torch.zeros(1, 1), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0]),
        train=torch.ones(1),
    )  # fmt: skip
    slopes = []
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([[1000.0, 990.0]], dtype=dtype, requires_grad=True)
        cross_entropy(logits, graph).backward()
        slopes.append(logits.grad.double())
    assert torch.allclose(*slopes, rtol=1e-2, atol=0)


def test_class_weights_equal_torch_also_where_they_are_small():
    out, graph = logits(), labelled([1, 0, 1, 1])
    for weights in ("1,10,3", "0.001,0.01,0.02"):
        weighted = with_loss(graph, 3, weights, None)
        each = torch.tensor([float(word) for word in weights.split(",")])
        known = graph.train > 0
        expected = functional.cross_entropy(out[known], graph.y[known], weight=each)
        torch.testing.assert_close(cross_entropy(out, weighted), expected)


def test_balanced_weights_are_scikit_learns_of_the_clients_own_training_labels():
    graph = labelled([1, 0, 1, 1])
    graph = replace(graph, y=torch.tensor([0, 2, 1, 0]))
    found = with_loss(graph, 3, "balanced", None).class_weights
    assert found is not None
    known = graph.y[graph.train > 0].numpy()
    theirs = compute_class_weight("balanced", classes=np.array([0, 1]), y=known)
    np.testing.assert_allclose(found[:2].numpy() * 3 / 2, theirs)  # of three classes two occur
    alone = with_loss(labelled([0, 0, 0, 0]), 3, "balanced", None)
    assert float(cross_entropy(logits(), alone)) == 0


def test_focal_loss_by_hand_with_a_finite_gradient():
    out, graph = logits().double(), labelled([1, 0, 1, 1])
    p = out.softmax(1)[torch.arange(4), graph.y]
    by_hand = ((1 - p) ** 1.5 * -p.log())[graph.train > 0].mean()
    focal = with_loss(graph, 3, None, "focal:1.5")
    torch.testing.assert_close(cross_entropy(out, focal), by_hand)
    sure = 100 * functional.one_hot(graph.y, 3).double()
    for text in ("focal", "focal:0.5"):
        other = with_loss(graph, 3, "balanced", text)
        assert grad(lambda rows, g=other: cross_entropy(rows, g))(sure).isfinite().all()
    assert with_loss(graph, 3, None, "cross_entropy").focal == 0


@pytest.mark.parametrize(
    ("weights", "loss", "words"),
    [
        ("even", None, "class_weights cannot be 'even'; give balanced, or one number per class"),
        ("1,-1,1", None, "class_weights cannot be '1,-1,1'"),
        ("0,0,0", None, "class_weights cannot be '0,0,0'"),
        ("1,nan,1", None, "class_weights cannot be '1,nan,1'"),
        ("1,2", None, "class_weights has 2 numbers, but the data have 3 classes"),
        (None, "focal:x", "loss cannot be 'focal:x'; give cross_entropy, focal or focal:GAMMA"),
        (None, "focal:0", "loss cannot be 'focal:0'"),
        (None, "hinge", "loss cannot be 'hinge'"),
    ],
)
def test_an_impossible_loss_is_one_sentence(weights, loss, words):
    with pytest.raises(ConfigError) as refused:
        with_loss(labelled([1, 1, 1, 1]), 3, weights, loss)
    assert words in str(refused.value)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_log_probabilities_are_those_of_torch(scale: float) -> None:
    found = log_probabilities(logits() * scale)
    torch.testing.assert_close(found, (logits() * scale).log_softmax(-1))
