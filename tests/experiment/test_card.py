"""The card of a model agrees with the model's files."""

from __future__ import annotations

import inspect
import sys
import tomllib
from dataclasses import replace

import pytest

import atoll
from atoll.experiment.card import card_text, data_facts, paragraph, wire_of
from atoll.experiment.folder import RunFolder
from atoll.experiment.threshold import Threshold
from tests.experiment.own_graphs import write_own

NODES = "lagoon:nodes=300"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    result = atoll.run("fedavg", write_own(folder), out=folder / "run", rounds=2, seeds=2)
    return folder / "run" / "model" / "seed-1", result


def test_the_card_names_clients_classes_rounds_scores_and_data(own):
    folder, result = own
    about = tomllib.loads((folder / "model.toml").read_text())
    card = (folder / "MODEL_CARD.md").read_text()
    assert card == card_text(about)
    assert "classify nodes as `x`, `y`" in card
    chosen = about["round"] + 1
    assert f"Rounds: 2; selected: round {chosen}, by the best mean accuracy on valid" in card
    found = result.metrics()["test_accuracy"]
    line = f"| accuracy | {found['per_seed'][1]:.4f} | {found['mean']:.4f} ± {found['std']:.4f} |"
    assert line in card
    federation = atoll.partition(atoll.load(str(folder.parents[2])), seed=1)
    for name, graph, score in zip("ab", federation.graphs, result.of_clients()[1], strict=True):
        facts = data_facts(graph, name)
        assert facts in about["fingerprints"]
        assert f"| {name} | 30 | 114 | 6 | 12 | 12 | {score:.4f} | `{facts['sha256']}` |" in card
    assert "There was no differential privacy." in card
    assert about["privacy"]["differential"] is False
    assert "for each client: down: model; up: model, num_nodes." in card
    assert (
        "Sent once, for the encoder: the names of columns and how they are read; for each" in card
    )
    sent = "part and round: counts by true and predicted class; its own mean loss; its own AUC."
    assert sent in card
    assert "| 2 seeds |" in card
    assert "simulation" in card
    assert "No threshold was chosen" in card


def test_the_card_leads_with_the_metric_that_chose_the_round(tmp_path):
    how = {"rounds": 2, "metric": "average_precision"}
    result = atoll.run("fedavg", write_own(tmp_path), out=tmp_path / "run", **how)
    card = (tmp_path / "run/model/seed-0/MODEL_CARD.md").read_text()
    found = result.metrics()["test_average_precision"]["mean"]
    head = "| test score | this model | 1 seed |\n|---|---|---|\n"
    assert f"{head}| average precision | {found:.4f} | no spread |\n| accuracy |" in card
    assert "| test | test average precision | SHA-256 |" in card
    for score in result.of_clients("average_precision")[0]:
        assert f"| {score:.4f} | `" in card
    shows = "positives and negatives by bin; a bin with one node shows its score and label."
    assert shows in card


def test_a_wire_line_of_several_lines_is_whole():
    net = atoll.nn.GCN(3, 2)
    wire = wire_of(atoll.methods.METHODS["fedproto"](net))
    assert wire.startswith("down: prototypes, which of them are known, the key of the common init")
    assert wire.endswith("With compat also num_nodes up.")


def test_a_fingerprint_follows_features_edges_labels_and_roles():
    graph = atoll.partition(atoll.load(NODES)).graphs[0]
    first = data_facts(graph, "a")
    assert data_facts(graph, "a") == first
    flipped = replace(graph, train=graph.val, val=graph.train)
    others = [replace(graph, y=graph.y.roll(1)), replace(graph, edges=graph.edges.flip(0)), flipped]
    assert len({data_facts(one, "a")["sha256"] for one in (graph, *others)}) == 4


def test_the_card_has_the_threshold_and_its_rule(own):
    about = tomllib.loads((own[0] / "model.toml").read_text())
    chosen = Threshold("max_f1", 0.25, 1, 0.75, 0.5, 0.125)
    text = card_text({**about, "threshold": chosen.plain()})
    assert "alert where the probability of `y` is at least 0.25. Rule `max_f1` chose it" in text
    assert "precision was 0.7500, its recall 0.5000, and 12.50 %" in text


def test_the_run_chooses_a_threshold_and_predict_uses_it(tmp_path):
    options = {"rounds": 2, "threshold": "max_f1", "positive": "x"}
    result = atoll.run("fedavg", write_own(tmp_path), out=tmp_path / "run", **options)
    about = RunFolder(tmp_path / "run").model().about
    card = (tmp_path / "run/model/seed-0/MODEL_CARD.md").read_text()
    assert "alert where the probability of `x` is at least" in card
    tested = result.metrics()["threshold_recall"]["mean"]
    assert (
        f"On test nodes: precision {about['alerts']['precision']:.4f}, recall {tested:.4f}." in card
    )
    found = result.predict(str(tmp_path))
    assert found.alert == (0, about["threshold"]["value"])
    assert result.predict(str(tmp_path), threshold=0.0).alerts.all()
    plain = {"rounds": 1, "positive": "x"}
    other = atoll.run("fedavg", str(tmp_path), out=tmp_path / "plain", **plain)
    assert other.predict(str(tmp_path)).alert is None
    assert other.predict(str(tmp_path), threshold=0.5).alert == (0, 0.5)


def test_the_card_of_a_private_run_states_epsilon_and_unit(tmp_path):
    options = {"clients": 3, "rounds": 2, "dp": "clip=1,noise=2,delta=1e-5"}
    result = atoll.run("fedavg", NODES, out=tmp_path / "run", **options)
    about = RunFolder(tmp_path / "run").model().about
    assert about["privacy"]["differential"] is True
    assert about["privacy"]["epsilon_server"] == result.privacy["epsilon_server"]
    card = (tmp_path / "run/model/seed-0/MODEL_CARD.md").read_text()
    assert "the unit of protection is a client" in card
    assert f"Epsilon {result.privacy['epsilon_server']:.3g} against the server" in card
    assert "1e-05" in card
    assert "stayed at the sites" not in card  # in a simulation scores are the experimenter's
    assert "no spread" in card


def test_the_card_of_own_models_and_of_a_bound_one_states_the_limit(tmp_path):
    options = {"clients": 3, "rounds": 1}
    atoll.run("fedgta", NODES, out=tmp_path / "own", **options)
    card = (tmp_path / "own/model/seed-0/MODEL_CARD.md").read_text()
    assert "Models: one for each client" in card
    assert "A client that never trained has no model here." in card
    atoll.run("fedgnn", NODES, out=tmp_path / "bound", **options)
    card = (tmp_path / "bound/model/seed-0/MODEL_CARD.md").read_text()
    assert "It cannot predict new nodes: its clients" in card


def test_more_rounds_give_a_new_card(tmp_path):
    atoll.run("fedavg", NODES, out=tmp_path / "run", clients=2, rounds=1)
    atoll.resume(tmp_path / "run", rounds=3)
    assert "Rounds: 3;" in (tmp_path / "run/model/seed-0/MODEL_CARD.md").read_text()


def test_names_cannot_break_the_table(own):
    about = tomllib.loads((own[0] / "model.toml").read_text())
    about |= {"client_names": ["a|b", "c\x1b[2J"], "fingerprints": []}
    card = card_text(about)
    assert "| a\\|b |" in card
    assert "\x1b" not in card


def test_a_method_without_a_wire_line_has_none():
    class Mine:
        pass

    assert wire_of(Mine()) == ""


@pytest.mark.parametrize("name", sorted(set(atoll.methods.METHODS) - {"local"}))
def test_the_card_tells_what_goes_up_for_every_method(name):
    words = inspect.getdoc(sys.modules[atoll.methods.METHODS[name].__module__])
    assert "up: " in paragraph(words, "Wire,")
