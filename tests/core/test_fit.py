"""The epoch loop: one loss signature, the client's graph, and an error if either is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll.core.batching import WHOLE, Graphs
from atoll.core.errors import ConfigError
from atoll.core.fit import fit, minimise
from atoll.core.graph import Graph
from atoll.core.minibatch import with_batching
from atoll.core.optim import SGD
from atoll.core.random import fold, make_key
from atoll.core.tree import Tree
from atoll.testing import small_federation, small_graph_federation

ONE = small_federation().graphs[0]


def sizes(params: Tree, graph: Graph, key: Tensor) -> Tensor:
    return (params * graph.real.sum()).sum()


def test_the_loss_reads_the_graph_that_it_gets() -> None:
    model, _ = fit(sizes, torch.zeros(2), SGD(lr=1.0), None, 2, make_key(0), ONE)
    assert model.tolist() == [-2.0 * ONE.num_nodes] * 2


@pytest.mark.parametrize(
    ("loss", "graph"),
    [
        (lambda params, key: params.sum(), ONE),
        (lambda params, key: params.sum(), None),
        (sizes, None),
    ],
)
def test_an_old_call_gets_one_sentence(loss: Callable[..., Tensor], graph: Graph | None) -> None:
    says = r"^fit now takes the client's graph and a loss of it: .* loss\(params, graph, key\)$"
    with pytest.raises(ConfigError, match=says):
        fit(loss, torch.zeros(2), SGD(), None, 1, make_key(0), graph)


def test_a_loss_that_needs_the_whole_graph_refuses_mini_batches() -> None:
    graph = with_batching(small_graph_federation().graphs[1], Graphs(3))
    given = (sizes, torch.zeros(2), SGD(), None, 1, make_key(0))
    with pytest.raises(ConfigError, match=r"^mine mends it, so it cannot train on mini-batches; "):
        fit(*given, graph, needs_whole="mine mends it")
    fit(*given, replace(graph, batching=WHOLE), needs_whole="mine mends it")


def test_training_without_a_graph_has_a_key_for_every_step() -> None:
    keys: list[int] = []

    def loss(params: Tree, key: Tensor) -> Tensor:
        keys.append(int(key))
        return params.sum()

    model, _ = minimise(loss, torch.zeros(1), SGD(lr=0.5), None, 3, make_key(4))
    assert keys == [int(fold(make_key(4), number)) for number in range(3)]
    assert float(model) == -1.5
