"""The declarations of methods on the page."""

import pytest

import atoll
from atoll.experiment.card import paragraph
from atoll.experiment.config import make_config
from atoll.methods import METHODS
from atoll.report.collect import collect
from atoll.report.traffic import Declared, crossed, declared


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_says_what_crosses_and_what_stays(name):
    words = declared(make_config(method=name), "node")
    assert isinstance(words, Declared), words
    assert words.wire
    assert words.private


@pytest.mark.parametrize("metric", [None, "average_precision"])
def test_baselines_and_bins_are_named(tmp_path, metric):
    data = "lagoon:nodes=120,classes=2,label_skew=0"
    how = {"clients": 2, "rounds": 1, "seeds": 1, "metric": metric}
    atoll.compare(["fedavg", "trees", "oracle"], data, out=tmp_path / "study", **how)
    text = crossed(collect([tmp_path / "study"]))
    assert "Python object" not in text
    assert (
        "<h4>trees</h4><p>Not federated: each client fitted a model to its own data. No d" in text
    )
    assert "<h4>oracle</h4><p>Not federated: all data were pooled in one place." in text
    bins = "positives and negatives by bin (a bin with one node shows its score and label)"
    assert (bins in text) == (metric is not None)
    assert "(how many nodes of each class a client has), its own mean loss, its own AUC" in text


def test_declarations():
    words = declared(make_config(method="fedgnn"), "node")
    assert [pair[:2] for pair in words.discloses] == [("announce", "keys"), ("embed", "rows")]
    assert words.discloses[0][2] == "the server finds equal neighbourhoods by their keys"
    words = declared(make_config(method="fedtad", set={"base": "fedgta"}), "node")
    assert "FedGTA (base): down: own model; up: model, confidence H, moments M" in words.wire
    assert "Python object" in declared(make_config(method="Mine", objects=["method"]), "node")
    assert "is not available" in declared(make_config(method="gone.py:Mine"), "node")
    assert paragraph("Wire, x:  down  a      up  b\nPrivate state: c", "Wire,") == "down: a; up: b"
    assert paragraph("nothing", "Wire,") == ""
