"""On a GPU a replayed round is the round itself, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from atoll.core.batching import WHOLE, Batching, Graphs
from atoll.core.dp import Noised
from atoll.core.task import GRAPHS
from atoll.core.tree import leaves, tree_map
from atoll.experiment.metrics import METRICS
from atoll.experiment.rounds import Experiment
from atoll.experiment.sweep import Sweep
from atoll.methods import METHODS
from atoll.nn import NETS
from atoll.testing import (
    double_precision,
    relabelled,
    small_federation,
    small_graph_federation,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    # Torch warns in a separate thread that it sets up cuBLAS there, and fails if that is an error.
    pytest.mark.filterwarnings("default"),
]

SHORTER = {
    "adafgl": {"federated_rounds": 4},
    "fedsage+": {"generator_epochs": 2, "exchanges": 6, "wide": 8},
}
MAKES_MUCH_OF_ROUNDING = ("adafgl", "fedtad")
"""Their models start from the same numbers but for rounding, and Adam makes much of little: a node
in ten may be classified otherwise, and the loss hardly differs. In float64 nothing does."""
NOT_WHOLE = {("adafgl", 0.5)}
"""Methods whose servers read numbers; their steps are recorded one by one."""


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
    # Which kernel multiplies FedGTA's small mixing matrix depends on where its factors lie.
    tolerance = 1e-6 if (name, fraction) == ("fedgta", 0.5) else 0
    for scored, scores in eager.history.scores.items():
        np.testing.assert_allclose(scores, replayed.history.scores[scored], rtol=0, atol=tolerance)
    assert list(eager.ledger.rows()) == list(replayed.ledger.rows())
    assert replayed.replay is not None
    whole = replayed.replay.how == "rounds are recorded and replayed"
    assert whole == ((name, fraction) not in NOT_WHOLE)


@pytest.mark.parametrize("batching", [WHOLE, Graphs(3)], ids=["whole", "batches"])
@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if GRAPHS.name in m.tasks])
def test_replays_of_sets_of_graphs_are_exact(name: str, batching: Batching) -> None:
    """And they agree with a CPU, which neither pads mini-batches nor records rounds."""
    federation = small_graph_federation()
    made = METHODS[name](NETS["gin-graph"](federation.features, federation.classes, hidden=8))
    how = {"rounds": 6, "seed": 3, "batching": batching}
    with double_precision():
        eager, replayed, cpu = (
            Experiment(made, federation, device=device, replay=replay, **how).run()
            for device, replay in (("cuda", False), ("cuda", True), ("cpu", None))
        )
    for scored, scores in eager.history.scores.items():
        np.testing.assert_array_equal(scores, replayed.history.scores[scored])
        np.testing.assert_allclose(scores, cpu.history.scores[scored], atol=1e-6)


@pytest.mark.parametrize("similarity", ["cosine", "gradient-norms"])
def test_rounds_in_which_a_cluster_splits_are_played_anew(similarity: str) -> None:
    federation = small_federation((9, 13, 17, 22, 12))
    net = NETS["gcn"](federation.features, federation.classes)
    rules = {"eps1": 1e9, "eps2": 0.0, "min_round": 3, "min_size": 1, "seq_length": 3}
    made = METHODS["gcfl"](net, similarity=similarity, **rules)
    eager, replayed = (
        Experiment(made, federation, rounds=14, seed=3, device="cuda", replay=replay).run()
        for replay in (False, True)
    )
    assert int(eager.server.cluster.max()) == 4
    assert replayed.replay is not None
    assert replayed.replay.how == "rounds are recorded and replayed"
    for one, other in zip(leaves(eager.server), leaves(replayed.server), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["fedtad", "fedath", "fediih", "fedsage"])
def test_a_run_repeats_itself(name: str) -> None:
    federation, method = small_federation(), METHODS[name]
    net = NETS[(*method.nets, "gcn")[0]](federation.features, federation.classes)
    asked = Experiment(method(net), federation, rounds=6, seed=3, device="cuda")
    first = asked.run()
    for again in (asked.run() for _ in range(3)):
        for scored, scores in first.history.scores.items():
            np.testing.assert_array_equal(scores, again.history.scores[scored])


def test_replays_of_private_rounds_are_exact() -> None:
    federation = small_federation()
    net = NETS["gcn"](federation.features, federation.classes)
    made = Noised(net=net, base=METHODS["fedavg"](net), clip=0.5, noise=0.3)
    eager, replayed, cpu = (
        Experiment(
            made, federation, rounds=6, seed=3, fraction=0.5, device=device, replay=replay
        ).run()
        for device, replay in (("cuda", False), ("cuda", True), ("cpu", None))
    )
    assert replayed.replay is not None
    assert replayed.replay.how == "rounds are recorded and replayed"
    for one, other, there in zip(
        *(leaves(run.server) for run in (eager, replayed, cpu)), strict=True
    ):
        assert torch.equal(one, other)
        torch.testing.assert_close(one.cpu(), there, rtol=1e-3, atol=1e-3)


def together_as_alone(
    asked: list[Experiment], tolerance: float = 1e-4, metrics: Sequence[str] = METRICS
) -> None:
    which = [METRICS.index(name) for name in metrics]
    sweep = Sweep(asked)
    for run in sweep.runs:
        run.start()
    while not all(run.finished for run in sweep.runs):
        sweep.advance()
    assert not sweep.apart
    sweep.finish()
    for run, alone in zip(sweep.runs, [experiment.run() for experiment in asked], strict=True):
        for scored, scores in alone.history.scores.items():
            ours = np.stack(run.history.scores[scored])
            np.testing.assert_allclose(
                ours[..., which], np.stack(scores)[..., which], atol=tolerance
            )


def three_seeds(name: str) -> list[Experiment]:
    first, method = small_federation(), METHODS[name]
    turned = tuple(relabelled(graph, 5) for graph in reversed(first.graphs))
    net = NETS[(*method.nets, "gcn")[0]](first.features, first.classes)
    made = method(net, **SHORTER.get(name, {}))
    return [
        Experiment(made, federation, rounds=9, seed=seed, device="cuda")
        for seed, federation in enumerate([first, replace(first, graphs=turned), first])
    ]


@pytest.mark.parametrize("name", METHODS)
def test_seeds_at_once(name: str) -> None:
    if name in MAKES_MUCH_OF_ROUNDING:
        together_as_alone(three_seeds(name), 3e-2, ["loss"])
    else:
        together_as_alone(three_seeds(name))


@pytest.mark.parametrize("name", MAKES_MUCH_OF_ROUNDING)
def test_seeds_at_once_but_for_rounding(name: str) -> None:
    with double_precision():
        together_as_alone(three_seeds(name), 1e-6)


GRIDS = {
    "fedavg": ("optimizer", lambda o, x: replace(o, lr=0.01 * x, weight_decay=1e-3 * (x - 1))),
    "fedprox": ("mu", lambda _, x: 0.01 * x),
    "scaffold": ("optimizer", lambda o, x: replace(o, lr=0.1 * x)),
    "moon": ("tau", lambda _, x: 0.2 * x),
    "fedopt": ("server_lr", lambda _, x: 0.01 * x),
    "fedgta": ("net", lambda n, x: replace(n, dropout=0.2 * (x - 1))),
    "fedpub": ("net", lambda n, x: replace(n, dropout=0.2 * (x - 1))),
}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", GRIDS)
def test_points_of_a_grid_at_once(name: str, fraction: float) -> None:
    federation, method = small_federation(), METHODS[name]
    net = NETS[(*method.nets, "gcn")[0]](federation.features, federation.classes)
    field, change = GRIDS[name]
    made = method(net)
    asked = [
        Experiment(
            replace(made, **{field: change(getattr(made, field), x)}), federation, rounds=8,
            seed=seed, fraction=fraction, device="cuda",
        )
        for x in (1.0, 2.0, 3.0)
        for seed in range(2)
    ]  # fmt: skip
    together_as_alone(asked)


def test_training_scores_that_are_due_now_and_then() -> None:
    federation = small_federation()
    method = METHODS["fedavg"](NETS["gcn"](federation.features, federation.classes))
    runs = [
        Experiment(method, federation, rounds=9, train_every=3, device="cuda", replay=replay).run()
        for replay in (False, True)
    ]
    for scored, scores in runs[0].history.scores.items():
        np.testing.assert_array_equal(scores, runs[1].history.scores[scored])


@dataclass(frozen=True)
class CountsInMainMemory(METHODS["fedavg"]):
    """Keeps a number outside the GPU."""

    def init(self, clients):
        return {"model": super().init(clients), "count": torch.zeros(())}

    def round(self, server, clients):
        model = super().round(server["model"], clients)
        scale = 1 - 0.01 * server["count"]
        return {
            "model": tree_map(lambda leaf: leaf * scale, model),
            "count": server["count"] + 1,
        }

    def deploy(self, server):
        return super().deploy(server["model"])


def test_a_number_in_main_memory_is_not_frozen() -> None:
    federation = small_federation()
    method = CountsInMainMemory(NETS["gcn"](federation.features, federation.classes))
    runs = [
        Experiment(method, federation, rounds=8, device="cuda", replay=replay).run()
        for replay in (False, True)
    ]
    for scored, scores in runs[0].history.scores.items():
        np.testing.assert_array_equal(scores, runs[1].history.scores[scored])


FULL = """
import torch
from atoll.engines.recording import Recording, new_pool

number = torch.zeros(1, device="cuda")
held = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)]
torch.cuda.empty_cache()
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
try:
    Recording(lambda x: (x + 1,), number, pool=new_pool(True))
except torch.OutOfMemoryError:
    print("refused")
"""


def test_full_memory_before_a_recording_is_an_exception() -> None:
    command = [sys.executable, "-c", FULL]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "refused\n"), ran.stderr
