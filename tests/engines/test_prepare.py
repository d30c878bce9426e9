"""Clients' graphs are prepared once for all runs that want the same of them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from atoll.core.federation import LazyGraphs
from atoll.core.graph import Graph
from atoll.engines.prepare import EngineInputs, ready_graphs
from atoll.nn import NETS
from atoll.testing import CLASSES, FEATURES, small_federation

GCN = NETS["gcn"](FEATURES, CLASSES)
SAGE = NETS["sage"](FEATURES, CLASSES)


def _ones(widths: list[int], graph: Graph) -> Tensor:
    return torch.ones(graph.num_nodes, widths[0])


def test_clients_are_prepared_once_for_engines_that_want_the_same() -> None:
    federation = small_federation()
    first = EngineInputs(federation, GCN.views).graphs()
    assert EngineInputs(federation, dict(GCN.views), chunk=2).graphs() is first
    assert EngineInputs(federation, SAGE.views).graphs() is not first
    # Only those wanted last stay.
    assert len(ready_graphs(federation)) == len(federation)
    assert EngineInputs(federation, GCN.views).graphs() is not first
    # Two runs on a device have less memory each.
    inputs = EngineInputs(federation, GCN.views)
    one, two = (replace(inputs, runs_per_device=number).graphs() for number in (1, 2))
    assert one is not two
    assert not ready_graphs(federation.reordered(range(len(federation))))


def test_a_view_that_cannot_be_looked_up_is_made_each_time() -> None:
    inputs = EngineInputs(small_federation(), {"twice": partial(_ones, [2])})
    one, two = inputs.graphs(), inputs.graphs()
    assert one is not two
    assert torch.equal(one[0].views["twice"], two[0].views["twice"])


def test_prepared_graphs_go_with_their_federation() -> None:
    federation = small_federation()
    graph = weakref.ref(EngineInputs(federation, GCN.views).graphs()[0])
    assert graph() is not None
    del federation
    gc.collect()
    assert graph() is None


def test_graphs_that_are_too_many_to_keep_are_prepared_again(monkeypatch) -> None:
    federation = small_federation()
    monkeypatch.setattr("atoll.engines.prepare.READY_BYTES", 1)
    inputs = EngineInputs(federation, GCN.views)
    assert inputs.graphs() is not inputs.graphs()
    assert not ready_graphs(federation)


def test_graphs_that_are_made_lazily_stay_lazy() -> None:
    made = small_federation()
    federation = replace(made, graphs=LazyGraphs(len(made), made.graphs.__getitem__))
    assert isinstance(EngineInputs(federation, GCN.views).graphs(), LazyGraphs)
    assert not ready_graphs(federation)
