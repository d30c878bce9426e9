"""Baselines: honest numbers, the same tests, and a mark in every table."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import ConfigError
from atoll.core.task import task_named
from atoll.experiment.baseline import NOT_FEDERATED, POOLED, run_baseline, without_test
from atoll.experiment.config import make_config
from atoll.experiment.folder import read_result
from atoll.studies.baselines import Features, Majority, make_baseline
from atoll.studies.compare.comparison import read_request, run_request
from tests.experiment.pooled import DATA, Pooled, federation

SMALL = {"clients": 3, "rounds": 2, "seeds": 3, "set": {"hidden": 8}}


def test_majority_scores_the_share_of_each_client_s_largest_class() -> None:
    clients = federation()
    config = make_config(method="majority", data=clients.name, objects=["method", "data"])
    result = run_baseline(config, Majority(), data=clients)
    expected = [
        (graph.y[graph.test > 0] == graph.y[graph.train > 0].bincount().argmax()).double().mean()
        for graph in clients.graphs
    ]
    assert result.of_clients()[0] == pytest.approx(np.array(expected))
    assert result.scored == NOT_FEDERATED
    assert result.bytes() == {"up": 0, "down": 0}


def test_features_is_a_logistic_regression_on_each_client_s_own_rows() -> None:
    clients = federation()
    model = Features(c=0.5).fit(without_test(clients), seed=0)
    for place, graph in enumerate(clients.graphs):
        own = model[place]
        scores = Features().predict(model, place, graph)
        assert scores.shape == (graph.num_nodes, clients.classes)
        assert set(scores.argmax(1).tolist()) <= set(own.known.tolist())
        chosen = graph.train > 0
        right = (scores.argmax(1)[chosen] == graph.y[chosen]).double().mean()
        assert right > (graph.y[chosen].bincount().max() / chosen.sum())  # it has learnt something
    one_class = replace(clients.graphs[0], y=torch.full_like(clients.graphs[0].y, 4))
    alone = replace(clients, graphs=(one_class,))
    model = Features().fit(alone, seed=0)
    assert set(Features().predict(model, 0, one_class).argmax(1).tolist()) == {4}


@pytest.mark.parametrize("jobs", [1, 2])
def test_baselines_stand_in_a_comparison_marked_and_tested(tmp_path: Path, jobs: int) -> None:
    methods: list[Any] = ["majority", "local", "features:c=0.5"]
    found = atoll.compare(methods, DATA, out=tmp_path, jobs=jobs, **SMALL)
    assert [row.scored for row in found.tables[0].rows] == [
        NOT_FEDERATED, "personalised", NOT_FEDERATED,
    ]  # fmt: skip
    assert {test["name"] for test in found.tests()} == {"majority", "features:c=0.5"}
    assert {test["pairs"] for test in found.tests()} == {3}
    assert found.tables[0].about["rounds"] == 2  # a method's, not the baseline's
    text, note = repr(found), "Not federated, only to compare with: majority and features:c=0.5."
    assert "majority (not federated)" in text
    assert note in " ".join(text.split())
    assert note in found.markdown()
    assert "majority (not federated) & " in found.latex()
    rows = list(csv.DictReader((tmp_path / "compare.csv").read_text().splitlines()))
    assert {row["scored"] for row in rows if row["method"] == "majority"} == {NOT_FEDERATED}
    summary = json.loads((tmp_path / "compare.json").read_text())
    assert summary["tables"][0]["rows"][0]["scored"] == NOT_FEDERATED
    folder = tmp_path / "cells" / "lagoon-nodes=200-3c-majority"
    assert read_result(folder).scored == NOT_FEDERATED
    events = (tmp_path / "events.jsonl").read_bytes()
    again = run_request(read_request(tmp_path), tmp_path)  # as --resume does
    assert again.table() == found.table()
    assert (tmp_path / "events.jsonl").read_bytes() == events


def test_a_baseline_that_pools_data_is_called_so() -> None:
    found = atoll.compare([Pooled(), "local"], DATA, **{**SMALL, "set": {}})
    assert found.tables[0].rows[0].scored == POOLED
    text = " ".join(repr(found).split())
    assert "| Pooled (not federated, pools all data) |" in found.markdown()
    assert "Trained on the pooled data of all clients, without privacy: Pooled." in text


def test_what_a_baseline_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="baseline 'majority' has no settings; leave out mu"):
        atoll.compare(["local", "majority:mu=1"], DATA, **SMALL)
    with pytest.raises(ConfigError, match=r"c of the baseline features is 'x'; give a number such"):
        make_baseline("features", {"c": "x"})
    with pytest.raises(ConfigError, match="setting of the baseline features 'd'"):
        make_baseline("features", {"d": "1"})
    with pytest.raises(ConfigError, match="the baseline 'features' classifies nodes"):
        Features().fit(SimpleNamespace(task=task_named("graph"), name="PROTEINS"), seed=0)  # type: ignore[arg-type]
