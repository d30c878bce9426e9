"""Every registered method keeps the contract."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from atoll.core.batching import WHOLE, Graphs
from atoll.core.minibatch import with_batching
from atoll.core.task import GRAPHS
from atoll.core.tree import leaves
from atoll.engines import prepare
from atoll.experiment.rounds import Experiment
from atoll.methods import METHODS
from atoll.nn import GraphGIN
from atoll.testing import (
    CLASSES,
    FEATURES,
    check_method,
    double_precision,
    small_graph_federation,
)

# The same steps, a few times instead of very many.
SHORTER = {"fedsage+": {"generator_epochs": 2, "exchanges": 2, "wide": 8}}
# Their later rounds differ from the first two. For others, the second reads all from the first.
THREE_ROUNDS = ("adafgl", "fedsage+", "gcfl")


@pytest.mark.parametrize("name", METHODS)
def test_contract(name):
    method = METHODS[name]
    make = partial(method, **SHORTER[name]) if name in SHORTER else method
    check_method(make, rounds=3 if name in THREE_ROUNDS else 2)


FOR_GRAPHS = [
    name for name, method in METHODS.items() if GRAPHS.name in getattr(method, "tasks", ())
]


@pytest.mark.parametrize("batching", [WHOLE, Graphs(3)], ids=["whole", "batches"])
@pytest.mark.parametrize("name", FOR_GRAPHS)
def test_the_prepared_training_graphs_change_no_number(name, batching, monkeypatch):
    """An engine prepares the training graphs once. Without them, steps cut the whole graph."""
    method = METHODS[name](GraphGIN(FEATURES, CLASSES, hidden=5, dropout=0.4), epochs=2)
    with double_precision():
        asked = Experiment(method, small_graph_federation(), 3, engine="serial", batching=batching)
        ours = asked.run()

        def plain(graph, batching):
            return replace(with_batching(graph, batching), training=None, held_out=None)

        monkeypatch.setattr(prepare, "with_batching", plain)
        theirs = replace(asked, federation=small_graph_federation()).run()
    for scored in ("deployed", "local"):
        for role in ("val", "test"):
            both = [run.history.array(scored, "loss", role) for run in (ours, theirs)]
            np.testing.assert_allclose(*both, rtol=1e-9)
    for mine, other in zip(leaves(ours.server), leaves(theirs.server), strict=True):
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10)
