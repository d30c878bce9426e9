"""Recorded and replayed rounds. The contract compares their numbers for every method."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from atoll.core.errors import AtollError
from atoll.core.message import ToAll
from atoll.core.method import client_step
from atoll.core.tree import leaves, tree_map
from atoll.engines.recording import Recording
from atoll.experiment.rounds import Experiment, Run
from atoll.methods import METHODS, FedAvg
from atoll.methods.gcfl import cluster_tree
from atoll.nn import GCN, NETS
from atoll.testing import CLASSES, FEATURES, small_federation

WHOLE = set(METHODS) - {"fedtad"}
"""Methods whose complete rounds are recorded. FedTAD counts edges except on a GPU."""


def experiment(method=None, **options) -> Experiment:
    made = method or FedAvg(GCN(FEATURES, CLASSES, hidden=5))
    return Experiment(made, small_federation(), **{"rounds": 6, "replay": True} | options)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_who_is_recorded_whole(name: str) -> None:
    method = METHODS[name]
    net = NETS[(*method.nets, "gcn")[0]](FEATURES, CLASSES, hidden=5)
    shorter = {"generator_epochs": 1, "exchanges": 1, "wide": 4} if name == "fedsage+" else {}
    run = experiment(method(net, **shorter), rounds=4).run()
    assert run.replay is not None
    if name in WHOLE:
        assert run.replay.how == "rounds are recorded and replayed"
    else:
        assert run.replay.how.startswith("no round is recorded as a whole, because ")


def test_every_stage_of_a_method_is_recorded(monkeypatch) -> None:
    monkeypatch.setattr("atoll.engines.replay.MOMENT", 1e9)
    made = METHODS["adafgl"](GCN(FEATURES, CLASSES, hidden=5), federated_rounds=4)
    reads = []
    replayed = experiment(made, rounds=10).run(on_round=lambda h: reads.append(h.rounds))
    # Federated rounds, then the first personal one by itself, then the others.
    assert reads == [1, 4, 5, 6, 10]
    eager = experiment(made, rounds=10, replay=False).run()
    for scored, scores in eager.history.scores.items():
        np.testing.assert_array_equal(scores, replayed.history.scores[scored])
    assert list(eager.ledger.rows()) == list(replayed.ledger.rows())


@pytest.mark.parametrize("similarity", ["cosine", "gradient-norms"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rounds_in_which_a_cluster_splits_are_played_anew(similarity, fraction, monkeypatch):
    monkeypatch.setattr("atoll.engines.replay.MOMENT", 1e9)
    eps = {"eps1": 1e9, "eps2": 0.0, "min_round": 3, "min_size": 1, "seq_length": 3}
    method = METHODS["gcfl"](GCN(FEATURES, CLASSES, hidden=5), similarity=similarity, **eps)
    federation = small_federation((9, 13, 17, 22, 12))
    asked = replace(experiment(method, rounds=14, fraction=fraction), federation=federation)
    reads = []
    replayed = asked.run(on_round=lambda history: reads.append(history.rounds))
    eager = replace(asked, replay=False).run()
    splits = {split.round for split in cluster_tree(eager.server)}
    assert len(splits) == (4 if fraction == 1 else 0)
    assert len(reads) < 14
    assert replayed.replay.how == "rounds are recorded and replayed"
    for one, other in zip(leaves(eager.server), leaves(replayed.server), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if fraction == 1 else 1e-6)
    for scored, scores in eager.history.scores.items():
        ours = replayed.history.scores[scored]
        np.testing.assert_allclose(scores, ours, atol=0 if fraction == 1 else 1e-6)
    assert list(eager.ledger.rows()) == list(replayed.ledger.rows())


def test_what_an_eager_round_repeats_often_is_recorded_in_it(monkeypatch) -> None:
    calls, plain = [], Recording.__call__

    def counted(recording, *inputs):
        calls.append(recording)
        return plain(recording, *inputs)

    net = NETS["sage"](FEATURES, CLASSES, hidden=5)
    made = METHODS["fedsage+"](net, generator_epochs=1, exchanges=8, wide=4)
    eager = experiment(made, rounds=1, replay=False).run()
    monkeypatch.setattr(Recording, "__call__", counted)
    recorded = experiment(made, rounds=1).run()
    assert len(calls) >= 4
    assert recorded.simulation.engine.recorded is None  # nothing is kept
    for one, other in zip(leaves(eager.server), leaves(recorded.server), strict=True):
        torch.testing.assert_close(one, other)
    assert list(eager.ledger.rows()) == list(recorded.ledger.rows())


def test_rounds_are_read_together(monkeypatch) -> None:
    monkeypatch.setattr("atoll.engines.replay.MOMENT", 1e9)
    reads = []
    run = experiment(rounds=9).run(on_round=lambda history: reads.append(history.rounds))
    # The first by itself; the second is rehearsed and recorded, and the rest are replays of it.
    assert reads == [1, 9]
    assert len(run.history.seconds) == 9
    assert run.history.array("deployed", "accuracy", "test").shape == (9, 4)


def test_training_scores_come_when_they_are_due() -> None:
    runs = [experiment(train_every=3, rounds=8, replay=replay).run() for replay in (False, True)]
    eager, replayed = (run.history.array("deployed", "accuracy", "train") for run in runs)
    np.testing.assert_array_equal(eager, replayed)
    assert np.isnan(replayed).all(1).tolist() == [
        False,
        True,
        True,
        False,
        True,
        True,
        False,
        False,
    ]


def to_the_end(run: Run) -> None:
    while not run.finished:
        run.advance()


@dataclass(frozen=True)
class Breaks(FedAvg):
    """In its sixth round the model becomes NaN, or only something of the server's own."""

    what: str = "model"

    def init(self, clients):
        return {"model": super().init(clients), "count": torch.zeros(())}

    def round(self, server, clients):
        model = super().round(server["model"], clients)
        wrong = torch.where(server["count"] == 5, torch.nan, 1.0)
        if self.what == "model":
            model = tree_map(lambda leaf: leaf * wrong, model)
        else:
            clients.require_finite({"own": wrong}, "the server lost its mind")
        return {"model": model, "count": server["count"] + 1}

    def deploy(self, server):
        return super().deploy(server["model"])


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("model", "client 0, step score, round 5: training diverged ('loss' is not finite"),
        ("server", "round 5: the server lost its mind"),
    ],
)
def test_what_diverges_stops_where_it_would_have(what, said, fraction, monkeypatch) -> None:
    monkeypatch.setattr("atoll.engines.replay.MOMENT", 1e9)
    method = Breaks(GCN(FEATURES, CLASSES, hidden=5), what=what)
    for replay in (False, True):
        run = Run(experiment(method, rounds=12, fraction=fraction, replay=replay))
        run.start()
        with pytest.raises(AtollError, match=f"^{re.escape(said)}"):
            to_the_end(run)
        # Earlier rounds are recorded.
        assert run.history.rounds == 5
        assert {entry.round for entry in run.ledger.entries} >= set(range(5))


def test_a_resumed_run_records_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("atoll.engines.replay.MOMENT", 0.0)
    path = tmp_path / "checkpoint"
    whole = experiment(rounds=9).run()
    count = iter(range(100))
    stopped = experiment(rounds=9).run(checkpoint=path, should_stop=lambda: next(count) >= 4)
    assert stopped.history.rounds == 4
    resumed = experiment(rounds=9).run(checkpoint=path)
    assert resumed.replay.how == "rounds are recorded and replayed"
    for scored, scores in whole.history.scores.items():
        np.testing.assert_array_equal(scores, resumed.history.scores[scored])
    assert list(whole.ledger.rows()) == list(resumed.ledger.rows())


def test_the_serial_engine_replays_nothing() -> None:
    assert experiment(engine="serial", rounds=2).run().replay is None
    assert replace(experiment(rounds=2), replay=None).run().replay is None


@dataclass(frozen=True)
class CountsInPython(FedAvg):
    """Keeps a plain number, which changes, in the server's tree."""

    def init(self, clients):
        return {"model": super().init(clients), "n": 0}

    def round(self, server, clients):
        model = super().round(server["model"], clients)
        scale = 1 - 0.05 * server["n"]
        return {"model": tree_map(lambda leaf: leaf * scale, model), "n": server["n"] + 1}

    def deploy(self, server):
        return super().deploy(server["model"])


@dataclass(frozen=True)
class Forgets(FedAvg):
    """Its step returns no private state."""

    @client_step
    def train(self, graph, model, state, key):
        reply, _ = FedAvg.train.function(self, graph, model, None, key)
        return reply, None


@dataclass(frozen=True)
class OneByOne(FedAvg):
    """A step for one client at a time, and a list among the hyper-parameters."""

    sizes: list = field(default_factory=lambda: [1, 2])

    def round(self, server, clients):
        found = clients.map(self.norm, ToAll(server))
        model = super().round(server, clients)
        return tree_map(lambda leaf: leaf * (1 + 0 * found.sum()), model)

    @client_step(vectorize=False, keeps_state=True)
    def norm(self, graph, model, state, key):
        return graph.train.sum()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("method", [CountsInPython, Forgets, OneByOne])
def test_methods_that_cannot_simply_be_recorded(method, fraction: float) -> None:
    net = GCN(FEATURES, CLASSES, hidden=5)
    runs = [
        experiment(method(net), rounds=9, fraction=fraction, replay=replay).run()
        for replay in (False, True)
    ]
    for scored, scores in runs[0].history.scores.items():
        np.testing.assert_allclose(scores, runs[1].history.scores[scored], atol=1e-6)


@pytest.fixture
def one_recording(monkeypatch) -> list[int]:
    """The first recording of a run succeeds, and no other does."""
    made = []

    def only_once(*args, **options):
        if made:
            raise RuntimeError("no memory left")
        made.append(1)
        return Recording(*args, **options)

    monkeypatch.setattr("atoll.engines.replay.Recording", only_once)
    return made


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_second_kind_of_round_that_cannot_be_recorded(fraction, one_recording) -> None:
    runs = [
        experiment(train_every=2, rounds=9, fraction=fraction, replay=replay).run()
        for replay in (False, True)
    ]
    # Rounds between replays are eager: they leave states where other programs want them.
    for scored, scores in runs[0].history.scores.items():
        np.testing.assert_allclose(scores, runs[1].history.scores[scored], atol=1e-6)
    assert one_recording == [1]


def test_eager_rounds_before_a_new_stage_count(one_recording) -> None:
    made = METHODS["adafgl"](GCN(FEATURES, CLASSES, hidden=5), federated_rounds=5)
    runs = [
        experiment(made, train_every=2, rounds=9, replay=replay).run() for replay in (False, True)
    ]
    # Round 4 is the last of its stage, and its kind is not recorded: the replays before it must
    # not overwrite its server when the stage ends.
    for scored, scores in runs[0].history.scores.items():
        np.testing.assert_array_equal(scores, runs[1].history.scores[scored])
    assert one_recording == [1]
