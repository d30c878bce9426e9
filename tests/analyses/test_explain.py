"""`atoll explain`: edge weights stay with the clients, and the numbers add up."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import atoll
from atoll.analyses.explain import (
    explain,
    explain_node,
    explanation_files,
    explanation_table,
    node_tables,
)
from atoll.core.errors import AtollError, ConfigError
from atoll.experiment.predict import predict
from atoll.present.files import write_all
from tests.data.own.graphs import folder as tables

SMALL = {"data": "lagoon:nodes=200", "clients": 3, "rounds": 2, "seeds": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "r"
    atoll.run("fedath", out=out, set={"hidden": 8}, **SMALL)
    return out


def test_every_edge_of_every_client_has_a_weight(folder, tmp_path):
    found = explain(folder)
    about = json.loads((folder / "result.json").read_text())["federation"]
    assert [c.weight.size for c in found.clients] == about["edges"]
    for client in found.clients:
        assert ((client.weight > 0) & (client.weight < 1)).all()
        assert client.norm > 0
    paths = write_all(tmp_path, explanation_files(found))
    with (tmp_path / "client-0" / "edges.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == about["edges"][0]
    ids = set(np.load(folder / "seed-0" / "partition.npz")["client_0"].tolist())
    assert {int(row["source"]) for row in rows} <= ids
    assert (tmp_path / "edges.png").stat().st_size > 10_000
    assert all(path.exists() for path in paths)
    assert len(explanation_table(found).rows) == 3


def test_the_ledger_shows_that_no_edge_weight_crossed(folder):
    found = explain(folder)
    assert found.bytes_up == found.bytes_shared


def test_parquet(folder, tmp_path):
    import pyarrow.parquet as pq

    write_all(tmp_path, explanation_files(explain(folder), "parquet"))
    table = pq.read_table(tmp_path / "client-1" / "edges.parquet")
    assert table.column_names == ["source", "target", "weight", "same_class"]


def test_a_method_without_edge_weights_is_refused(tmp_path):
    atoll.run("fedavg", out=tmp_path / "r", set={"hidden": 8}, **SMALL)
    with pytest.raises(ConfigError, match="does not weigh edges"):
        explain(tmp_path / "r")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        explain(tmp_path)


SIZE = 240
NETS = ("gcn", "sage", "gat")


def write(path, first=0, last=SIZE):
    """Node n2i is blank; its class is that of its only telling neighbour, n(2i+1)."""
    rng, rows, ends = np.random.default_rng(0), [], []
    for i in range(first, last):
        sign = (i // 2) % 2
        tells = 0 if i % 2 == 0 else 2 * sign - 1
        rows.append(f"n{i},{'xy'[sign]},{tells},{rng.normal():.3f},{'ab'[i >= SIZE // 2]}")
        if i % 2:
            ends.append(f"n{i - 1},n{i}")
        else:
            ends.append(f"n{i},n{(i + 6) % SIZE}")  # another blank one, of the other class
    return tables(
        path,
        "\n".join(["id,label,tells,noise,bank", *rows, ""]),
        "\n".join(["source,target", *ends, ""]),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("explain")
    data, made = write(path / "old"), {}

    def one(net="sage", method="fedavg", data=str(data), **options):
        key = net, method, data
        if key not in made:
            made[key] = path / f"run-{len(made)}"
            given = {"rounds": 20, "set": {"net": net, "lr": 0.05}, **options}
            if data == str(path / "old"):
                given["split"] = "stratified:ratios=0.6/0.2/0.2"
                given["partition"] = "column:bank"
            atoll.run(method, data, out=made[key], **given)
        return made[key]

    return one


@pytest.mark.parametrize("net", NETS)
def test_the_deciding_feature_and_neighbour_come_first(runs, net):
    run = runs(net)
    found = explain_node(run, "n12")
    scores = predict(run, run.parent / "old")
    at = scores.ids.tolist().index("n12")
    assert found.label == scores.labels[at]
    assert found.probability == pytest.approx(scores.probabilities[at].max(), abs=1e-5)
    assert found.features[0].name == "tells"
    assert found.neighbours[0].name == "n13"  # without it the probability falls most
    assert found.neighbours[0].without < found.probability - 0.1
    assert found.client == "a"


def test_the_same_question_gets_the_same_answer_and_leaves_the_global_generator(runs):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert explain_node(runs(), "n12") == explain_node(runs(), "n12")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_without_edges_has_no_neighbours(runs):
    found = explain_node(runs("mlp"), "n13")
    assert found.features[0].name == "tells"
    assert found.neighbours == ()
    assert "No neighbour matters" in node_tables(found)[1].caption


def test_a_new_node_is_explained(runs, tmp_path):
    new = write(tmp_path / "new", SIZE, SIZE + 2)
    (new / "edges.csv").write_text(f"source,target\nn{SIZE},n{SIZE + 1}\nn{SIZE},n200\n")
    found = explain_node(runs(), f"n{SIZE}", data=new, joined=True)
    assert {reason.name for reason in found.neighbours} >= {f"n{SIZE + 1}", "n200"}
    assert found.client == "b"
    (new / "edges.csv").write_text("source,target\n")
    assert explain_node(runs(), f"n{SIZE + 1}", data=new).neighbours == ()
    assert len(explain_node(runs(), "n12", top=1).neighbours) == 1


def test_data_without_ids_and_names_have_numbers(runs):
    run = runs("gcn", data="lagoon:nodes=200", clients=2, rounds=2, partition="louvain")
    found = explain_node(run, "17")
    assert found.features[0].name.startswith("feature ")
    first, second = node_tables(found)
    assert "Node 17 of client" in first.title
    assert len(second.rows) == len(found.neighbours)


def test_a_client_explains_with_its_own_model(runs):
    run = runs("gcn", "fedper")
    assert explain_node(run, "n12").client == "a"
    with pytest.raises(AtollError, match="choose its client with --client"):
        explain_node(run, "n12", client="b")


def test_what_cannot_be_explained_is_refused(runs, tmp_path):
    with pytest.raises(AtollError, match="has no node 'n999'; its ids are like 'n0', 'n1', 'n2'"):
        explain_node(runs(), "n999")
    with pytest.raises(AtollError, match="--joined needs new data"):
        explain_node(runs(), "n1", joined=True)
    with pytest.raises(AtollError, match="fedath computes more than its network does"):
        explain_node(runs("gcn", "fedath", rounds=1), "n1")
    data = atoll.partition(atoll.load("lagoon:nodes=200"))
    atoll.run("fedavg", data, out=tmp_path / "run", rounds=1)
    with pytest.raises(AtollError, match="was started in Python with data"):
        explain_node(tmp_path / "run", "1")
