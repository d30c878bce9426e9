"""The declarations of methods on the page."""

import pytest

from atoll.experiment.config import make_config
from atoll.methods import METHODS
from atoll.report.traffic import Declared, declared, paragraph


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_says_what_crosses_and_what_stays(name):
    words = declared(make_config(method=name), "node")
    assert isinstance(words, Declared), words
    assert words.wire
    assert words.private


def test_declarations():
    words = declared(make_config(method="fedgnn"), "node")
    assert [pair[:2] for pair in words.discloses] == [("announce", "keys"), ("embed", "rows")]
    assert words.discloses[0][2] == "the server finds equal neighbourhoods by their keys"
    words = declared(make_config(method="fedtad", set={"base": "fedgta"}), "node")
    assert "FedGTA (base): down: own model; up: model, confidence H, moments M" in words.wire
    assert "Python object" in declared(make_config(method="Mine", objects=["method"]), "node")
    assert "cannot be asked" in declared(make_config(method="gone.py:Mine"), "node")
    assert paragraph("Wire, x:  down  a      up  b\nPrivate state: c", "Wire,") == "down: a; up: b"
    assert paragraph("nothing", "Wire,") == ""
