"""A client that never trains: it changes nothing, and gets the scores of the global model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.graph import with_views
from atoll.experiment.folder import RunFolder, read_result
from atoll.experiment.metrics import score
from atoll.experiment.newcomer import over_models, set_apart
from atoll.report.collect import collect
from atoll.report.page import page

DATA = "lagoon:nodes=200"
SMALL: dict[str, Any] = {"clients": 3, "rounds": 3, "set": {"hidden": 8}}


def named() -> Federation:
    clients = atoll.partition(atoll.load(DATA, clients=3), "column:owner")
    return replace(clients, about={**clients.about, "client_names": ["north", "south", "west"]})


def test_the_others_train_as_if_it_were_not_there() -> None:
    clients = named()
    others, newcomer = set_apart(clients, "south")
    assert others.client_names == ("north", "west")
    assert newcomer.client_names == ("south",)
    assert newcomer.graphs[0] is clients.graphs[1]
    assert others.about["nodes"] == [clients.about["nodes"][i] for i in (0, 2)]
    alone = replace(others, about={})
    with_it = atoll.run("fedavg", clients, held_out_client="south", rounds=3, set={"hidden": 8})
    without = atoll.run("fedavg", alone, rounds=3, set={"hidden": 8})
    assert with_it.metrics() == without.metrics()
    assert with_it.client_names == ("north", "west")
    assert set_apart(clients, "1")[1].client_names == ("south",)  # by its number
    plain = replace(clients, about={})
    assert set_apart(plain, "2")[1].client_names == ("2",)


def test_its_scores_are_those_of_the_kept_model_on_its_test_nodes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = atoll.run("fedprox", named(), held_out_client="west", seeds=2, out=out, **_training())
    found = result.first_day
    assert found is not None
    graph = named().graphs[2]
    assert (found.client, found.tested, found.task) == ("west", int(graph.test.sum()), "node")
    method = atoll.methods.FedProx(net=atoll.nn.GCN(600, 6, hidden=8))
    tested = graph.test > 0
    for seed in (0, 1):
        params = RunFolder(out).model(seed).deployed[0]
        with torch.no_grad():
            logits = method.net(params, with_views(graph, method.views))[tested]
        chances = logits.double().softmax(-1).numpy()
        for metric in ("accuracy", "macro_f1", "loss"):
            wanted = score(metric, graph.y[tested].numpy(), chances)
            assert found.metrics[metric]["per_seed"][seed] == pytest.approx(wanted, abs=1e-6)
    assert found.metrics["accuracy"]["mean"] == np.mean(found.metrics["accuracy"]["per_seed"])
    again = read_result(out).first_day
    assert again == found
    sentence = found.sentence("accuracy")
    assert sentence.startswith("Client west never trained. On its first day the global model has")
    assert sentence in page(collect([out]))
    assert atoll.resume(out, data=named()).first_day == found


def _training() -> dict[str, Any]:
    return {"rounds": 3, "set": {"hidden": 8}}


def test_a_growing_graph_is_whole_on_the_first_day() -> None:
    result = atoll.run("fedavg", DATA, held_out_client="0", split="inductive", **SMALL)
    assert result.first_day is not None
    assert 0 < result.first_day.metrics["accuracy"]["mean"] <= 1


def test_a_drawn_client_follows_the_seed_of_the_data() -> None:
    drawn = [set_apart(named(), "drawn", seed)[1].client_names[0] for seed in range(30)]
    assert drawn == [set_apart(named(), "drawn", seed)[1].client_names[0] for seed in range(30)]
    assert set(drawn) == {"north", "south", "west"}
    result = atoll.run("fedavg", DATA, held_out_client="drawn", seeds=3, **SMALL)
    assert result.first_day is not None
    assert " or " in result.first_day.client
    again = atoll.run("fedavg", DATA, held_out_client="drawn", seeds=3, data_seed=1, **SMALL)
    assert again.first_day is not None
    assert len(again.first_day.client) == 1


def test_the_models_of_all_clients_count_alike() -> None:
    found = over_models([{"accuracy": 0.6}, {"accuracy": 0.3}, {"accuracy": 0.3}])
    assert found == {"accuracy": pytest.approx(0.4), "worst_accuracy": 0.3}


def test_what_cannot_be_held_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown client to hold out 'est'; did you mean 'west'"):
        set_apart(named(), "est")
    with pytest.raises(ConfigError, match="the only client cannot be held out"):
        set_apart(set_apart(named(), "west")[1], "west")
    for method in ("local", "fedper"):
        with pytest.raises(ConfigError, match="personalised model and has none for a client that"):
            atoll.run(method, DATA, held_out_client="1", out=tmp_path / "run", **SMALL)
    with pytest.raises(ConfigError, match="FedGNN cannot predict for a new client: its clients"):
        atoll.run("fedgnn", DATA, held_out_client="1", **SMALL)
    with pytest.raises(ConfigError, match="selects by test scores keeps no model for a new client"):
        atoll.run("fedavg", DATA, compat=["test-selection"], held_out_client="1", **SMALL)
    assert not (tmp_path / "run").exists()
