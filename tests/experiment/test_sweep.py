"""Several seeds in one program give the numbers of separate runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from atoll.core.errors import AtollError, DeviceFull, StepError
from atoll.core.message import ToAll
from atoll.core.method import client_step
from atoll.core.random import make_key
from atoll.core.tree import leaves, tree_map
from atoll.engines import stacking
from atoll.engines.prepare import ready_graphs
from atoll.experiment.config import make_config
from atoll.experiment.rounds import Experiment, Run
from atoll.experiment.run import RunPlan, Stopped
from atoll.experiment.sweep import SeedFailed, Sweep, run_together, why_one_by_one
from atoll.methods import METHODS, FedAvg, Local
from atoll.methods.gcfl import cluster_tree
from atoll.nn import GCN, NETS
from atoll.testing import (
    CLASSES,
    FEATURES,
    double_precision,
    relabelled,
    small_federation,
    small_graph_federation,
)

ONE_BY_ONE = {("fedtad", 1.0), ("fedtad", 0.75), ("adafgl", 0.75)}
"""Methods whose servers read numbers."""
SHORTER = {
    "adafgl": {"federated_rounds": 2},
    "fedsage+": {"generator_epochs": 1, "exchanges": 1, "wide": 4},
    "fedtad": {"iterations": 1, "distil_steps": 2, "pseudo_nodes": 12},
}


def federations():
    """Three that differ in who is how large."""
    first = small_federation()
    turned = tuple(relabelled(graph, 5) for graph in reversed(first.graphs))
    return [first, replace(first, graphs=turned), first]


def experiments(method=None, **options) -> list[Experiment]:
    made = method or FedAvg(GCN(FEATURES, CLASSES, hidden=5))
    options = {"rounds": 6} | options
    return [Experiment(made, f, seed=seed, **options) for seed, f in enumerate(federations())]


def same(together, alone, tolerance: float = 1e-6) -> None:
    for one, other in zip(together, alone, strict=True):
        for scored, scores in other.history.scores.items():
            np.testing.assert_allclose(one.history.scores[scored], scores, atol=tolerance)
        assert list(one.ledger.rows()) == list(other.ledger.rows())
        kept, others = (
            leaves((run.server, run.simulation.engine.export_states())) for run in (one, other)
        )
        assert len(kept) == len(others)
        for mine, right in zip(kept, others, strict=True):
            torch.testing.assert_close(mine, right, atol=tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("fraction", [1.0, pytest.param(0.75, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_all_methods(name: str, fraction: float) -> None:
    with double_precision():
        method = METHODS[name]
        # In a residual network of a few units, a layer norm's gradient is almost zero, and the
        # server's step of Reef enlarges its rounding error in every round.
        net = NETS[(*method.nets, "gcn")[0]](FEATURES, CLASSES, hidden=16)
        asked = experiments(method(net, **SHORTER.get(name, {})), fraction=fraction)
        sweep = Sweep(asked)
        for run in sweep.runs:
            run.start()
        while not all(run.finished for run in sweep.runs):
            sweep.advance()
        sweep.settle()
        same(sweep.runs, [experiment.run() for experiment in asked], 1e-9)
        assert bool(sweep.apart) == ((name, fraction) in ONE_BY_ONE), sweep.apart


def test_clusters_of_some_runs_split(monkeypatch) -> None:
    monkeypatch.setattr("atoll.engines.replay.MOMENT", 1e9)
    eager, one_round = [], Run.one_round

    def counted(run: Run) -> None:
        eager.append((run.experiment.seed, run.history.rounds))
        one_round(run)

    with double_precision():
        net = GCN(FEATURES, CLASSES, hidden=5)
        # The mean updates of the seeds come below ε1 in different rounds.
        rare = {"similarity": "cosine", "min_round": 2, "min_size": 1, "eps1": 0.12, "eps2": 0.0}
        asked = experiments(METHODS["gcfl"](net, **rare), rounds=12)
        alone = [experiment.run() for experiment in asked]
        splits = [{split.round for split in cluster_tree(run.server)} for run in alone]
        monkeypatch.setattr(Run, "one_round", counted)
        same(run_together(asked), alone, 1e-9)
    assert len(set(map(frozenset, splits))) == 3, splits
    assert sorted(eager) == [(seed, n) for seed in range(3) for n in sorted(set().union(*splits))]


COMPILER = """
import sys
from tests.experiment.test_sweep import experiments, run_together

run_together(experiments())
experiments(replay=True)[0].run()
print("torch._dynamo" in sys.modules)
"""


def test_recorded_rounds_import_no_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILER], capture_output=True, text=True, check=False
    )
    assert done.stdout == "False\n", done.stderr


def test_no_round_is_played_one_by_one(monkeypatch) -> None:
    alone = [experiment.run() for experiment in experiments()]
    monkeypatch.setattr(Run, "one_round", lambda _: pytest.fail("a round of one run"))
    same(run_together(experiments()), alone)


def test_stopped_and_resumed_in_the_middle(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("atoll.engines.replay.MOMENT", 0.0)
    asked = experiments(rounds=9)
    files = [(tmp_path / str(e.seed), "x") for e in asked]
    count = iter(range(100))
    stopped = run_together(asked, checkpoints=files, should_stop=lambda: next(count) >= 2)
    assert not any(run.finished for run in stopped)
    same(run_together(asked, checkpoints=files), [experiment.run() for experiment in asked])


def test_runs_that_were_stopped_at_different_rounds_go_on_one_by_one(tmp_path) -> None:
    asked = experiments(rounds=5)
    count = iter(range(100))
    asked[1].run(checkpoint=tmp_path / "1", should_stop=lambda: next(count) >= 2)
    files = [(tmp_path / str(e.seed), "") for e in asked]
    same(run_together(asked, checkpoints=files), [experiment.run() for experiment in asked])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda e: e[:1], "there is one run"),
        (lambda e: [replace(x, engine="serial") for x in e], "engine serial runs clients"),
        (lambda e: [e[0], replace(e[1], rounds=3)], "they differ in more than seed, data and"),
        (
            lambda e: [e[0], replace(e[1], method=Local(e[0].method.net))],
            "they differ in the method",
        ),
        (
            lambda e: [e[0], replace(e[1], federation=e[1].federation.reordered([0, 1]))],
            "they need equally many clients",
        ),
        (
            lambda e: [e[0], replace(e[1], federation=e[1].federation.reordered([2, 0, 3, 1]))],
            "their clients have different numbers",
        ),
        (lambda e: [replace(x, replay=False) for x in e], "rounds are not to be recorded"),
        (
            lambda e: [replace(x, federation=small_graph_federation()) for x in e],
            "mini-batches are cut client by client",
        ),
    ],
)
def test_what_cannot_be_one_program(change, reason: str) -> None:
    assert why_one_by_one(experiments()) == ""
    assert why_one_by_one(change(experiments())).startswith(reason)


def test_the_command_gives_the_same_result_either_way(tmp_path) -> None:
    config = make_config(method="fedavg", data="lagoon", clients=4, rounds=5, seeds=3)
    results = [RunPlan(config, out=tmp_path / str(k)).run(at_once=k) for k in (False, True)]
    for one, other in zip(results[0].seeds, results[1].seeds, strict=True):
        assert one.seed == other.seed
        for scored, scores in one.history.scores.items():
            np.testing.assert_allclose(scores, other.history.scores[scored], atol=1e-5)
        assert list(one.ledger.rows()) == list(other.ledger.rows())
    assert sorted(path.name for path in (tmp_path / "True").iterdir()) == sorted(
        path.name for path in (tmp_path / "False").iterdir()
    )


class Impatient:
    """Stops after one round."""

    def __init__(self) -> None:
        self.asked = 0

    def begin(self, *_) -> None:
        pass

    def round(self, *_) -> None:
        pass

    def should_stop(self) -> bool:
        self.asked += 1
        return self.asked > 1


def test_a_stopped_sweep_is_resumed(tmp_path) -> None:
    config = make_config(method="fedavg", data="lagoon", clients=4, rounds=6, seeds=2)
    with pytest.raises(Stopped):
        RunPlan(config, out=tmp_path / "run", observer=Impatient()).run(at_once=True)
    resumed = RunPlan(config, out=tmp_path / "run", resuming=True).run(at_once=True)
    whole = RunPlan(config).run(at_once=True)
    for one, other in zip(resumed.seeds, whole.seeds, strict=True):
        np.testing.assert_allclose(
            one.history.scores["deployed"], other.history.scores["deployed"], atol=1e-5
        )


@dataclass(frozen=True)
class BreaksOnce(FedAvg):
    """In its fifth round the model of one seed becomes NaN: the one that drew a large weight."""

    def init(self, clients):
        model = super().init(clients)
        bad = torch.as_tensor(int(clients.simulation.root) == int(make_key(1)))
        return {"model": model, "count": torch.zeros(()), "bad": bad.float()}

    def round(self, server, clients):
        model = super().round(server["model"], clients)
        wrong = torch.where((server["count"] == 4) & (server["bad"] > 0), torch.nan, 1.0)
        return {
            "model": tree_map(lambda leaf: leaf * wrong, model),
            "count": server["count"] + 1,
            "bad": server["bad"],
        }

    def deploy(self, server):
        return super().deploy(server["model"])


def test_one_seed_that_diverges_leaves_the_others_in_order(tmp_path) -> None:
    asked = experiments(BreaksOnce(GCN(FEATURES, CLASSES, hidden=5)), rounds=9)
    files = [(tmp_path / str(e.seed), "") for e in asked]
    with pytest.raises(SeedFailed, match=r"^seed 1: client 0, step score, round 4: training div"):
        run_together(asked, checkpoints=files)
    # Resumed, the first comes to its end; the second says again what is wrong.
    with pytest.raises(AtollError, match="round 4: training diverged"):
        run_together(asked, checkpoints=files)
    first = asked[0].run(checkpoint=files[0][0])
    same([first], [asked[0].run()])


@dataclass(frozen=True)
class OneByOne(FedAvg):
    """Has a step for one client at a time."""

    def round(self, server, clients):
        found = clients.map(self.share, ToAll(server))
        model = super().round(server, clients)
        return tree_map(lambda leaf: leaf * (1 + 0.01 * found.std()), model)

    @client_step(vectorize=False, keeps_state=True)
    def share(self, graph, model, state, key):
        return graph.train.mean()


def test_a_step_for_one_client_at_a_time_parts_the_runs() -> None:
    asked = experiments(OneByOne(GCN(FEATURES, CLASSES, hidden=5)))
    same(run_together(asked), [experiment.run() for experiment in asked])


def test_clients_that_need_different_programs_part_the_runs() -> None:
    asked = experiments(chunk=3)
    assert Sweep(asked).apart == "their clients do not fall into the same programs"
    same(run_together(asked), [experiment.run() for experiment in asked])


@pytest.mark.parametrize("within_a_step", [False, True])
def test_no_memory_for_all_at_once(within_a_step: bool, monkeypatch, caplog) -> None:
    def full(*_):
        try:
            raise torch.OutOfMemoryError("no memory left")
        except torch.OutOfMemoryError as reason:
            if within_a_step:
                raise StepError(0, "train", 1, "no memory left") from reason
            raise

    monkeypatch.setattr(
        "atoll.engines.replay.Replay._play"
        if within_a_step
        else "atoll.engines.replay.stack_graphs",
        full,
    )
    asked = experiments()
    with caplog.at_level("INFO", "atoll.experiment.sweep"):
        same(run_together(asked), [experiment.run() for experiment in asked])
    assert "half of them may do" in caplog.text


def test_no_memory_for_all_clients_of_one_run(monkeypatch, caplog) -> None:
    tried, stacks = list[int](), stacking.stack_graphs

    def full(graphs):
        tried.append(len(graphs))
        if len(graphs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return stacks(graphs)

    asked = experiments()[:1]
    alone = [asked[0].run()]
    ready = asked[0].federation
    assert ready_graphs(ready)
    monkeypatch.setattr(stacking, "stack_graphs", full)
    monkeypatch.setattr("atoll.engines.replay.stack_graphs", full)
    with caplog.at_level("WARNING", "atoll.experiment.sweep"):
        same(run_together(asked), alone)
    assert tried[0] == len(ready)
    assert max(tried[-2:]) <= 2
    assert f"{len(ready)} clients in one program need more memory than there is" in caplog.text


@dataclass(frozen=True)
class TooLarge(FedAvg):
    """Fits into no memory."""

    @client_step
    def train(self, graph, model, state, key):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")


def test_no_memory_for_one_client(monkeypatch) -> None:
    asked, failed = experiments(TooLarge(GCN(FEATURES, CLASSES, hidden=5))), []
    monkeypatch.setattr("atoll.experiment.sweep.forget_ready", lambda: failed.append(1))
    with pytest.raises(DeviceFull, match="one client's program needs more memory than there is; "):
        run_together(asked)
    assert len(failed) > 2  # it freed memory before every smaller piece
