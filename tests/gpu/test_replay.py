"""On a GPU a replayed round is the round itself, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.methods import METHODS
from atoll.nn import NETS
from atoll.study.experiment import Experiment
from atoll.testing import small_federation

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    # Torch warns in a thread of its own that it sets up cuBLAS there, and stumbles over an error.
    pytest.mark.filterwarnings("default"),
]

SHORTER = {"fedsage+": {"generator_epochs": 2, "exchanges": 2, "wide": 8}}
NOT_WHOLE = {"adafgl", "fedsage+", "gcfl"}
"""Methods whose rounds are not all alike; their steps are recorded one by one."""


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", METHODS)
def test_replays_are_exact(name: str, fraction: float) -> None:
    federation, method = small_federation(), METHODS[name]
    net = NETS[(*method.nets, "gcn")[0]](federation.features, federation.classes)
    made = method(net, **SHORTER.get(name, {}))
    eager, replayed = (
        Experiment(
            made, federation, rounds=12, seed=3, fraction=fraction, device="cuda", replay=replay
        ).run()
        for replay in (False, True)
    )
    for scored, scores in eager.history.scores.items():
        np.testing.assert_array_equal(scores, replayed.history.scores[scored])
    assert list(eager.ledger.rows()) == list(replayed.ledger.rows())
    assert replayed.replay is not None
    assert bool(replayed.replay.takes) == (name not in NOT_WHOLE)
