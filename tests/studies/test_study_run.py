"""Points of a grid in one program equal separate runs, and faults cost no other run."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import AtollError
from atoll.core.optim import SGD, Adam
from atoll.core.tree import leaves, tree_map
from atoll.engines.replay import Replay
from atoll.experiment.config import RunConfig, make_config
from atoll.experiment.observers import Observer
from atoll.experiment.rounds import Experiment
from atoll.experiment.run import RunPlan, Stopped
from atoll.experiment.status import read_events
from atoll.experiment.sweep import Parted, Sweep, run_together, why_one_by_one
from atoll.methods import MOON, FedAvg, FedOpt, FedProx, FedPUB, Scaffold
from atoll.nn import GCN
from atoll.studies import study_run
from atoll.studies.study import run_study
from atoll.studies.study_run import (
    CONTEXT,
    PROCESS,
    StudyRun,
    StudySettings,
    cost_of,
    gpu_memory_of,
    memory_of,
    run_program,
    why_apart,
)
from atoll.testing import CLASSES, FEATURES, double_precision, small_federation
from tests.studies.test_study import ABOUT
from tests.studies.test_study import cells as plain_runs

NET = GCN(FEATURES, CLASSES, hidden=5)

GRIDS = {
    "lr and weight decay": [FedAvg(NET, Adam(*o)) for o in ((0.1, 0.01), (0.1, 0), (0.02, 0.01))],
    "betas": [FedAvg(NET, Adam(beta1=a, eps=e)) for a, e in ((0.9, 1e-8), (0.5, 1e-4))],
    "dropout": [FedAvg(replace(NET, dropout=rate)) for rate in (0.0, 0.2, 0.77)],
    "mu": [FedProx(NET, mu=mu) for mu in (0.0, 0.1, 1)],
    "mu and temperature": [MOON(NET, mu=mu, tau=tau) for mu, tau in ((1.0, 0.5), (5.0, 0.2))],
    "control": [Scaffold(NET, SGD(lr=lr), eta_g=g) for lr, g in ((0.5, 1.0), (0.1, 0.9))],
    "momentum": [FedAvg(NET, SGD(lr=0.2, momentum=m)) for m in (0.5, 0.9)],
    "server": [FedOpt(NET, server_lr=lr, tau=tau) for lr, tau in ((0.03, 1e-3), (0.1, 1e-2))],
    "masks": [FedPUB(replace(NET, dropout=d), lam_mask=m) for d, m in ((0.5, 1e-3), (0.1, 1e-2))],
}  # fmt: skip
"""Methods that differ in numbers; some of these are zero."""


def asked(methods, seeds: int = 1, **options) -> list[Experiment]:
    federation, options = small_federation(), {"rounds": 5} | options
    return [
        Experiment(method, federation, seed=seed, **options)
        for method in methods
        for seed in range(seeds)
    ]


def joined(experiments) -> list:
    """The runs of a sweep that never parts."""
    sweep = Sweep(experiments)
    for run in sweep.runs:
        run.start()
    while not all(run.finished for run in sweep.runs):
        sweep.advance()
        assert not sweep.apart
    sweep.finish()
    return sweep.runs


def kept(run) -> list[torch.Tensor]:
    return leaves((run.server, run.simulation.engine.export_states()))


def same(together, alone, tolerance: float) -> None:
    for one, other in zip(together, alone, strict=True):
        for scored, scores in other.history.scores.items():
            np.testing.assert_allclose(one.history.scores[scored], scores, atol=tolerance)
        assert list(one.ledger.rows()) == list(other.ledger.rows())
        for mine, right in zip(kept(one), kept(other), strict=True):
            torch.testing.assert_close(
                mine, right, atol=tolerance, rtol=10 * tolerance, equal_nan=True
            )


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_at_once_is_the_grid_one_by_one(name: str) -> None:
    with double_precision():
        experiments = asked(GRIDS[name])
        alone = [experiment.run() for experiment in experiments]
        same(joined(experiments), alone, 1e-9)
        # The points are not all the same run.
        first, *others = (torch.cat([leaf.flatten() for leaf in kept(run)]) for run in alone)
        assert all(not torch.allclose(first, other, equal_nan=True) for other in others)


def test_numbers_that_optimizers_take_are_exact_in_single_precision() -> None:
    experiments = asked(GRIDS["lr and weight decay"])
    for run, alone in zip(joined(experiments), [e.run() for e in experiments], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept(run), kept(alone), strict=True))


@pytest.mark.parametrize("options", [{"fraction": 0.5}, {"chunk": 2}, {"chunk": 3}, {"chunk": 1}])
def test_points_and_seeds_with_drawn_clients_and_several_programs(options) -> None:
    with double_precision():
        experiments = asked(GRIDS["mu"], seeds=2, **options)
        same(joined(experiments), [experiment.run() for experiment in experiments], 1e-9)


def test_one_client_is_enough() -> None:
    with double_precision():
        alone = small_federation().reordered([1])
        experiments = [replace(e, federation=alone) for e in asked(GRIDS["mu"])]
        same(joined(experiments), [experiment.run() for experiment in experiments], 1e-9)


@dataclass(frozen=True)
class Reads(FedAvg):
    """Needs plain numbers, in one way or another."""

    mu: float = 1.0
    how: str = "if"

    def round(self, server, clients):
        model = super().round(server, clients)
        scale = {
            "if": lambda: 1.0 if self.mu > 0.5 else 0.9,
            "log": lambda: math.log(self.mu + 2),
            "int": lambda: int(self.mu * 2**64) / 2**64 + 0.5,
            "full": lambda: torch.full((), self.mu),
            "all alike": lambda: 1.0 if self.mu > 0 else 0.9,
            "arithmetic": lambda: 1 / (1 - 0.1 * -(self.mu**2)) if self.mu else 1,
        }[self.how]()
        return tree_map(lambda leaf: leaf * scale, model)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("if", "mu decides what is computed"),
        ("log", "mu is needed as one plain number"),
        ("int", "mu is needed as one plain number"),
        ("full", "vmap: It looks like you're calling .item()"),
        ("all alike", ""),
        ("arithmetic", ""),
    ],
)
def test_what_needs_plain_numbers_goes_on_one_by_one(how, why: str, caplog) -> None:
    caplog.set_level(logging.INFO)
    experiments = asked([Reads(NET, mu=mu, how=how) for mu in (0.4, 0.8)])
    same(run_together(experiments), [experiment.run() for experiment in experiments], 1e-6)
    told = [r.message for r in caplog.records if r.message.startswith("the runs are trained one")]
    assert len(told) == bool(why)
    assert not why or f"because {why}" in told[0]
    if why:
        with pytest.raises(Parted, match=why[:20]):
            run_together(experiments, or_not_at_all=True)


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (FedAvg(NET), FedAvg(replace(NET, hidden=6)), "they differ in net.hidden"),
        (FedAvg(NET), FedAvg(NET, epochs=2), "they differ in epochs"),
        (FedAvg(NET), FedAvg(NET, SGD()), "they differ in optimizer"),
        (FedAvg(NET), FedAvg(NET, weight_by="train"), "they differ in weight_by"),
        (FedOpt(NET), FedOpt(NET, server_lr=0.1), "they differ in server_lr"),
        (FedAvg(NET), FedProx(NET), "they differ in the method"),
    ],
)
def test_what_is_more_than_a_number(one, other, why: str) -> None:
    assert why_one_by_one(asked([one, other])) == why


def configs(seeds: int = 1, **sets) -> list:
    (name, values), *rest = sets.items()
    return [
        make_config(method="fedprox", clients=3, rounds=6, seeds=seeds, set={name: v, **dict(rest)})
        for v in values
    ]


def test_files_are_those_of_runs_one_by_one(tmp_path: Path) -> None:
    grid = configs(seeds=2, mu=[0.1, 1], lr=0.02)
    outs = [tmp_path / "cells" / "one", tmp_path / "cells" / "two"]
    runs = [StudyRun(out.name, config) for out, config in zip(outs, grid, strict=True)]
    together = run_program(runs, lambda _: Observer(), StudySettings(tmp_path))
    for config, out, result in zip(grid, outs, together, strict=True):
        alone = RunPlan(config, out=tmp_path / f"{out.name}-alone").run()
        assert result.config == alone.config
        for one, other in zip(result.seeds, alone.seeds, strict=True):
            for scored, scores in other.history.scores.items():
                np.testing.assert_allclose(one.history.scores[scored], scores, atol=1e-5)
        files = [
            sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
            for folder in (out, tmp_path / f"{out.name}-alone")
        ]
        assert files[0] == files[1]
        # Finished: a checkpoint of the sweep is one of the run.
        again = RunPlan(config, out=out, resuming=True).run()
        assert again.metrics() == result.metrics()


class Impatient:
    """Stops after some rounds."""

    def __init__(self, after: int) -> None:
        self.left = after

    def begin(self, *_) -> None:
        pass

    def round(self, *_) -> None:
        pass

    def should_stop(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_stopped_grid_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("atoll.engines.replay.MOMENT", 0.0)
    grid, observers = configs(mu=[0.1, 1.0]), {"one": Impatient(3), "two": Impatient(100)}
    runs = [StudyRun(name, config) for name, config in zip(observers, grid, strict=True)]
    with pytest.raises(Stopped):
        run_program(runs, lambda run: observers[run.name], StudySettings(tmp_path))
    resumed = run_program(runs, lambda _: Observer(), StudySettings(tmp_path))
    for config, result in zip(grid, resumed, strict=True):
        whole = RunPlan(config).run().seeds[0].history
        np.testing.assert_allclose(
            result.seeds[0].history.scores["deployed"], whole.scores["deployed"], atol=1e-5
        )


def test_memory_for_two_runs_of_five(monkeypatch) -> None:
    fits, tried = Replay._gather, []

    def full(replay):
        tried.append(len(replay.runs))
        if len(replay.runs) > 2:
            raise torch.OutOfMemoryError("no memory left")
        return fits(replay)

    monkeypatch.setattr(Replay, "_gather", full)
    experiments = asked([FedProx(NET, mu=mu) for mu in (0.1, 0.2, 0.3, 0.4, 0.5)])
    seen: dict[int, int] = {}
    runs = run_together(experiments, on_round=lambda at, h: seen.update({at: h.rounds}))
    same(runs, [experiment.run() for experiment in experiments], 1e-6)
    assert tried == [5, 2, 3, 2]  # and one by itself
    assert seen == dict.fromkeys(range(5), 5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"set": {"mu": 1.0}}, ""),
        ({"set": {"mu": 1}}, ""),
        ({"set": {"mu": 0.1, "hidden": 32}}, "they differ in net.hidden"),
        ({"set": {"mu": 0.1, "net": "sage"}}, "they differ in net"),
        ({"rounds": 7}, "they differ in more than hyper-parameters"),
        ({"set": {"nonsense": 1}}, "unknown hyper-parameter"),
    ],
)
def test_which_configurations_may_be_one(changes, why: str) -> None:
    first = {"method": "fedprox", "rounds": 6, "set": {"mu": 0.1}}
    said = why_apart(make_config(**first), make_config(**first | changes))
    assert said.startswith(why)
    assert bool(said) == bool(why)


def cells(*values: float) -> list[StudyRun]:
    return [StudyRun(f"mu-{c.set['mu']}", c, c.set) for c in configs(seeds=2, mu=values)]


def events(folder: Path, event: str) -> list[str]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line["cell"] for line in lines if line["event"] == event]


def test_cells_at_once(tmp_path: Path, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(
        "atoll.studies.study_run.run_program",
        lambda group, *given: (calls.append(len(group)), run_program(group, *given)),
    )
    run_study(tmp_path, cells(0.2), about={}, at_once=True)
    other = StudyRun("other", make_config(method="fedavg", clients=3, rounds=6))
    outcomes = run_study(tmp_path, [*cells(0.1, 0.2, 0.3, 0.4), other], about={}, at_once=True)
    assert calls == [2]  # only neighbours, and nothing that is finished
    assert [o.fresh for o in outcomes] == [True, False, True, True, True]
    assert [o.run.name for o in outcomes] == ["mu-0.1", "mu-0.2", "mu-0.3", "mu-0.4", "other"]
    assert events(tmp_path, "end") == ["mu-0.2", "mu-0.1", "mu-0.3", "mu-0.4", "other"]
    alone = run_study(tmp_path / "alone", cells(0.3), about={})
    assert calls == [2]
    both = [o.summary["metrics"]["test_accuracy"]["mean"] for o in (outcomes[2], alone[0])]
    assert both[0] == pytest.approx(both[1], abs=1e-5)


def test_light_cells_at_once_keep_their_result_alone(tmp_path: Path) -> None:
    light = [replace(cell, light=True) for cell in cells(0.1, 0.2)]
    found = run_study(tmp_path / "light", light, about={}, at_once=True)
    whole = run_study(tmp_path / "whole", cells(0.1, 0.2), about={}, at_once=True)
    starts = map(json.loads, (tmp_path / "light" / "events.jsonl").read_text().splitlines())
    assert [line.get("together") for line in starts if line["event"] == "begin"] == [2, 2]
    for one, other in zip(found, whole, strict=True):
        assert one.summary["metrics"] == other.summary["metrics"]
        kept = {path.name for path in one.folder.iterdir()}
        assert kept == {"asked.toml", "config.toml", "result.json"}


def test_a_point_that_diverges_fails_alone(tmp_path: Path) -> None:
    asked = {"method": "fedavg", "clients": 3, "rounds": 7, "seeds": 2}
    decays = [
        StudyRun(f"decay-{d}", make_config(**asked, set={"optimizer": "sgd", "weight_decay": d}))
        for d in (0.0, 1e5, 1e-3)
    ]
    outcomes = run_study(tmp_path, decays, about={}, at_once=True)
    assert [outcome.error is None for outcome in outcomes] == [True, False, True]
    error = outcomes[1].error or ""
    assert "training diverged" in error
    assert not error.startswith("client 0, step train, round 0")  # it went well for a while
    assert events(tmp_path, "failed") == ["decay-100000.0"]
    assert events(tmp_path, "end") == ["decay-0.0", "decay-0.001"]
    alone = run_study(tmp_path / "alone", decays[1:], about={})
    assert alone[0].error == error
    both = [o.summary["metrics"]["test_accuracy"]["mean"] for o in (outcomes[2], alone[1])]
    assert both[0] == pytest.approx(both[1], abs=1e-5)


def test_cells_that_cannot_be_one_are_run_one_by_one(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    momenta = [
        StudyRun(f"m{m}", make_config(clients=3, rounds=4, set={"optimizer": "sgd", "momentum": m}))
        for m in (0.0, 0.9)
    ]
    outcomes = run_study(tmp_path, momenta, about={}, at_once=True)
    assert all(outcome.summary for outcome in outcomes)
    told = "2 cells run one by one, because their private states differ in shape"
    assert [record.message for record in caplog.records].count(told) == 1
    assert events(tmp_path, "end") == ["m0.0", "m0.9"]


def test_a_fault_in_one_method_does_not_stop_the_others(tmp_path: Path) -> None:
    class Broken(FedAvg):
        def round(self, server: object, clients: object) -> object:
            raise ZeroDivisionError("no clients\nat all")

    federation = atoll.partition(atoll.load("lagoon:nodes=150"), "louvain", clients=2)
    broken = Broken(net=GCN(federation.features, federation.classes))
    config = make_config(method="Broken", data=federation.name, rounds=2,
                         objects=["method", "data"])  # fmt: skip
    bad = StudyRun("bad", config, method=broken, data=federation)
    outcomes = run_study(tmp_path, [bad, *plain_runs()[:1]], about=ABOUT)
    assert [outcome.summary is None for outcome in outcomes] == [True, False]
    assert outcomes[0].error is not None
    where = r"ZeroDivisionError in test_study_run.py line \d+: no clients; "
    assert re.match(where, outcomes[0].error)
    assert "in round" in (tmp_path / "cells" / "bad" / "error.txt").read_text()


def test_a_gpu_that_is_lost_costs_no_other_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [StudyRun("bad", make_config(data="no-such-set")), *plain_runs()[:1]]
    with monkeypatch.context() as patched:
        patched.setattr("atoll.studies.study_run.device_answers", lambda: False)
        with pytest.raises(AtollError, match="does not respond to this process any more after bad"):
            run_study(tmp_path, asked, about=ABOUT)
    assert [event["cell"] for event in read_events(tmp_path)] == ["bad", "bad"]
    outcomes = run_study(tmp_path, asked, about=ABOUT)
    assert [outcome.summary is None for outcome in outcomes] == [True, False]


def test_what_a_run_takes_is_known_roughly(tmp_path: Path) -> None:
    def of(data: str) -> int:
        return memory_of(RunConfig(data=data)) - PROCESS

    assert 0 < of("cora") < of("pubmed") < of("physics")
    assert of("physics") > 6e9
    assert of("lagoon:nodes=300") == of("no-such-set") == 0
    (tmp_path / "nodes.csv").write_bytes(bytes(1000))
    assert of(str(tmp_path)) == of(str(tmp_path / "nodes.csv")) == 6 * 1000


def test_what_a_run_takes_of_a_gpu_grows_with_seeds_data_and_pairs_of_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of(method: str = "fedavg", data: str = "cora", device: str = "cuda", **more: Any) -> float:
        config = make_config(method=method, data=data, device=device, **more)
        return (gpu_memory_of(config) - CONTEXT) / 2**30

    monkeypatch.setattr(study_run, "on_gpu", lambda config: config.device == "cuda")
    assert of(device="cpu") == -1  # nothing at all
    assert of(data="lagoon") == of("no-such-method") == 0
    assert of(seeds=5) == pytest.approx(5 * of())
    assert of() < of(data="pubmed") < of(data="cs")
    assert of("adafgl", seeds=5) > of(seeds=5)
    # Fewer, larger clients have more pairs, but only so many rows of them at once.
    assert of("adafgl", "pubmed", clients=10) < of("adafgl", "pubmed", clients=5) * 1.01
    assert 10 < of("adafgl", "cs", clients=10, seeds=5) < 20  # so that nine of them fill 140 GB
    assert of("fedtad", "cs", set={"base": "adafgl"}) > of("fedtad", "cs")


def test_the_time_of_a_run_that_cannot_run_is_nothing() -> None:
    good = make_config(method="fedavg", data="cora", rounds=100)
    assert cost_of(good) > 0
    assert cost_of(make_config(method="fedavg", data="cora", rounds=200)) == 2 * cost_of(good)
    assert cost_of(make_config(method="fedporx", data="cora")) == 0
