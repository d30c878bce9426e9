"""What one client does to each class: a fair comparison, scored on everybody."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import atoll
from atoll.analyses import contribution as module
from atoll.analyses.contribution import (
    Contribution,
    contribution,
    contribution_files,
    contribution_parts,
    reading_of,
    summary,
    with_and_without,
)
from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.message import ToEach
from atoll.core.optim import Adam
from atoll.experiment.config import RunConfig, make_config
from atoll.methods import FedAvg, FedProx
from atoll.nn import GCN
from atoll.present.files import plain_json, write_all
from atoll.present.tables import layout
from tests.analyses.contributions import made_up

SMALL = {"data": "lagoon:nodes=240", "clients": 3, "rounds": 2, "epochs": 1, "set": {"hidden": 8}}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return atoll.partition(atoll.load("lagoon:nodes=240", clients=3), "column:owner")


@pytest.fixture(scope="module")
def found() -> Contribution:
    return contribution(make_config(**SMALL, seeds=2), client=1)


def fedavg(federation: Federation, kind: type[FedAvg] = FedAvg, **options: object) -> FedAvg:
    net = GCN(federation.features, federation.classes, hidden=16)
    return kind(net=net, epochs=2, **options)


def with_masks(federation: Federation, place: int, **masks: torch.Tensor) -> Federation:
    graphs = list(federation.graphs)
    graphs[place] = replace(graphs[place], **masks)
    return replace(federation, graphs=tuple(graphs))


@pytest.mark.parametrize("engine", ["serial", "fused"])
def test_a_client_that_weighs_nothing_changes_nothing(federation, engine: str) -> None:
    # The first one: the others move up in the list, and their noise must not follow their place.
    nothing = torch.zeros_like(federation.graphs[0].train)
    idle = with_masks(federation, 0, train=nothing, val=nothing)
    method = fedavg(idle, weight_by="train")
    config = RunConfig(engine=engine)
    present, absent = with_and_without(method, idle, 0, rounds=4, seed=5, config=config)
    np.testing.assert_array_equal(present.confusion, absent.confusion)
    assert present.best == absent.best


def test_both_models_are_scored_on_everybodys_test_nodes(federation) -> None:
    arms = with_and_without(fedavg(federation), federation, 2, rounds=1)
    for arm in arms:
        for graph, counts in zip(federation.graphs, arm.confusion, strict=True):
            labels = graph.y[graph.test > 0].numpy()
            expected = np.bincount(labels, minlength=federation.classes)
            np.testing.assert_array_equal(counts.sum(1), expected)


def test_the_absent_client_has_no_say(federation) -> None:
    graph = federation.graphs[0]
    nothing = torch.zeros_like(graph.val)
    other = with_masks(federation, 0, val=nothing, train=nothing + 1)
    arms = [with_and_without(fedavg(f), f, 0, rounds=5)[1] for f in (federation, other)]
    np.testing.assert_array_equal(arms[0].confusion, arms[1].confusion)
    assert arms[0].best == arms[1].best


def test_without_validation_nodes_the_last_round_is_taken(federation) -> None:
    blind = federation
    for place, graph in enumerate(federation.graphs):
        blind = with_masks(blind, place, val=torch.zeros_like(graph.val))
    assert [arm.best for arm in with_and_without(fedavg(blind), blind, 0, rounds=3)] == [2, 2]


def test_a_class_that_only_one_client_can_teach(federation) -> None:
    alone = federation
    for place in (1, 2):
        graph = federation.graphs[place]
        alone = with_masks(alone, place, train=graph.train * (graph.y != 0))
    method = fedavg(alone, optimizer=Adam(lr=0.05))
    present, absent = with_and_without(method, alone, 0, rounds=20)
    assert absent.confusion[:, 0, 0].sum() == 0
    assert present.confusion[:, 0, 0].sum() > 5


def test_the_result_repeats() -> None:
    config = make_config(**SMALL)
    first, second = (contribution(config, vary="topology") for _ in range(2))
    assert plain_json(summary(first)) == plain_json(summary(second))


def test_a_client_stays_the_same_client_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        module, "federate", lambda *a, **k: made.append(federate(*a, **k)) or made[-1]
    )
    contribution(make_config(**{**SMALL, "seeds": 3, "partition": "louvain"}))
    assert len({federation.about["sha1"] for federation in made}) == 1
    splits = {tuple(federation.graphs[0].train.tolist()) for federation in made}
    assert len(splits) == 3


federate: Callable[..., Federation] = module.federate


def test_a_protocol_that_fixes_the_split_fixes_it_here() -> None:
    config = make_config(**SMALL, seeds=2, protocol="fedtad", partition="column:owner")
    found = contribution(config)
    np.testing.assert_array_equal(found.train[0], found.train[1])
    np.testing.assert_array_equal(found.present.sum((3,))[0], found.present.sum((3,))[1])


def test_rounds_are_reported() -> None:
    heard: list[tuple[int, bool, int]] = []
    contribution(make_config(**SMALL), on_round=lambda *what: heard.append(what))
    assert heard == [(0, True, 1), (0, True, 2), (0, False, 1), (0, False, 2)]


def test_rows_add_up(found) -> None:
    everyone, own, others = found.groups()
    assert [row.name for row in found.groups()] == ["all", "client 1", "others"]
    for name in ("present", "absent"):
        parts = sum(getattr(row, name) * row.test for row in (own, others))
        np.testing.assert_allclose(getattr(everyone, name) * everyone.test, parts)
        by_class = sum(found.__dict__[name].sum(1)[:, c, c] for c in range(6))
        np.testing.assert_allclose(getattr(everyone, name), by_class / everyone.test)
    assert sum(row.train for row in found.classes()) == everyone.train == own.train
    assert sum(row.train_all for row in found.classes()) == everyone.train_all
    np.testing.assert_allclose(everyone.gain, everyone.present - everyone.absent)


def test_gains_that_follow_the_labels_correlate_with_them() -> None:
    present = np.diag([9.0, 6.0, 4.0]) + np.diag([1.0, 4.0], 1) + np.diag([0.0, 6.0], -1)
    absent = np.diag([2.0, 5.0, 4.0]) + np.diag([8.0, 5.0], 1) + np.diag([0.0, 6.0], -1)
    found = made_up(present, absent, np.array([[8, 5, 0], [2, 5, 10]]))
    rows = found.classes()
    np.testing.assert_allclose([row.gain[0] for row in rows], [0.7, 0.1, 0.0], atol=1e-12)
    rho = {name: values["rho"] for name, values in found.correlations().items()}
    assert rho["labels"] == pytest.approx(1)
    assert np.isnan(rho["homophily"])
    assert "its share of the labels +1.00" in reading_of(found)
    assert "its homophily – (not defined)" in reading_of(found)


def test_a_method_with_private_edge_weights_is_scored_without_them() -> None:
    found = contribution(make_config(**{**SMALL, "method": "fedath", "rounds": 1}))
    assert np.isfinite(found.groups()[0].gain).all()


@pytest.mark.parametrize(
    "given", [{"method": "local"}, {"method": "fedtad", "set": {"base": "local"}}]
)
def test_a_personalised_method_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="no global model to evaluate with and without a client"):
        contribution(make_config(**{**SMALL, **given}))


class ForEach(FedAvg):
    """Says that its model is global, and sends rows."""

    def deploy(self, server):
        return ToEach([{k: v.expand(3, *v.shape) for k, v in layer.items()} for layer in server])


def test_rows_for_each_client_are_no_global_model(federation) -> None:
    with pytest.raises(ConfigError, match="ForEach sends different models to the clients"):
        with_and_without(fedavg(federation, ForEach), federation, 0, rounds=1)


@pytest.mark.parametrize(
    ("given", "options", "error", "sentence"),
    [
        ({"clients": 1}, {}, DataError, "a federation of one client has nobody left without it"),
        ({}, {"client": 3}, ConfigError, "client 3 is not among the 3 clients"),
        ({}, {"vary": "toplogy"}, ConfigError, "unknown value of --vary 'toplogy'; did you mean"),
        ({}, {"ratio": 1.0}, ConfigError, "--ratio is for random edges, but --vary is none"),
        ({}, {"vary": "topology", "ratio": -1.0}, ConfigError, "ratio is -1.0; give a finite"),
        ({"protocol": "gcfl"}, {}, ConfigError, "is for sets of graphs"),
    ],
)
def test_what_is_refused(given, options, error, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        contribution(make_config(**{**SMALL, **given}), **options)


def test_any_global_method_takes_part(federation) -> None:
    present, absent = with_and_without(fedavg(federation, FedProx), federation, 1, rounds=2)
    assert present.confusion.shape == absent.confusion.shape == (3, 6, 6)


def text_of(found: Contribution) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(layout(contribution_parts(found)))
    return console.file.getvalue()


def test_a_class_without_test_nodes_has_no_number(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    counts = np.diag([5.0, 0.0, 5.0])
    found = made_up(counts, counts, np.array([[1, 0, 2], [2, 0, 2]]))
    plain = json.loads(json.dumps(plain_json(summary(found)), allow_nan=False))
    assert plain["classes"][1]["with"]["mean"] is None
    assert plain["classes"][0]["difference"]["mean"] == 0
    assert plain["classes"][0]["difference"]["std"] is None  # one seed has no spread
    line = next(x for x in text_of(found).splitlines() if " 1 " in x[:9])
    assert line.split()[-3:] == ["–", "–", "–"]
    assert len(write_all(tmp_path, contribution_files(found))) == 3


@pytest.mark.parametrize("vary", ["none", "nodes"])
def test_files(vary: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = contribution(make_config(**SMALL, seeds=2), vary=vary)
    paths = write_all(tmp_path / "new" / "folder", contribution_files(found))
    assert [path.name for path in paths] == [
        "contribution.csv", "contribution.json", "contribution.png",
    ]  # fmt: skip
    with paths[0].open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["0"] * 9 + ["1"] * 9
    assert [row["class"] for row in rows[:9]] == [*"012345", "all", "client 0", "others"]
    assert (rows[0]["homophily"] == "") == (vary == "nodes")
    gain = float(rows[6]["with"]) - float(rows[6]["without"])
    assert float(rows[6]["difference"]) == pytest.approx(gain, abs=1e-5)
    whole = json.loads(paths[1].read_text())
    assert whole["config"]["seeds"] == 2
    assert whole["about"]["partition"] == "column:owner"
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert paths[2].stat().st_size > 20_000
    assert ("own | others" in text_of(found)) == (vary == "none")


def test_many_clients_and_classes_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (2, 45, 30, 30)).astype(float)
    found = Contribution(
        make_config(rounds=1, seeds=2), 44, "none", 0.5, rng.integers(0, 9, (2, 45, 30)),
        rng.random(45), rng.random((45, 30)), counts, counts, np.zeros((2, 2), dtype=int), {},
    )  # fmt: skip
    assert write_all(tmp_path, contribution_files(found))[2].stat().st_size > 20_000
