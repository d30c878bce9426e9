"""The rows and the measure of the catalogue. `tests/cli` reads the complete pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from atoll.core.aggregate import Aggregate, OfMean
from atoll.core.optim import Adam
from atoll.core.tree import tree_map
from atoll.data.source import Source
from atoll.methods import METHODS, FedAvg
from atoll.present.catalogue import edge_homophily, hyper_rows, module_doc


@dataclass(frozen=True)
class Scaled(OfMean):
    """A rule whose parameter has no default."""

    by: float

    def step(self, update, state):
        return tree_map(lambda leaf: self.by * leaf, update), state


@dataclass(frozen=True)
class Own(FedAvg):
    aggregate: Aggregate = Scaled(2.0)


def test_a_rule_of_the_user_is_shown_as_it_is() -> None:
    assert {key: rest for key, *rest in hyper_rows(Own)}["aggregate"][0] == "Scaled(by=2.0)"


def test_rows_name_the_default_and_the_allowed_values() -> None:
    rows = {key: rest for key, *rest in hyper_rows(METHODS["fedprox"])}
    assert not {"net", "optimizer", "features", "classes"} & set(rows)
    assert rows["aggregate"][0] == "mean"
    assert rows["aggregate"][2] == "mean or median or adaptive"
    assert {key: rest for key, *rest in hyper_rows(METHODS["reef"])}["aggregate"][0] == (
        "adaptive:lr=0.1"
    )
    assert {key: value for key, value, *_ in hyper_rows(Adam, Adam(lr=0.5))}["lr"] == "0.5"


def test_a_methods_text_is_the_docstring_of_its_module() -> None:
    assert module_doc(METHODS["fedavg"]).startswith("FedAvg")


@pytest.mark.parametrize(
    ("labels", "share"), [([0, 0, 1], 0.5), ([0, -1, 1], float("nan")), ([2, 2, 2], 1.0)]
)
def test_homophily_counts_edges_whose_ends_have_the_same_known_label(labels, share) -> None:
    edges = np.array([[0, 1], [1, 2]])
    x, y = np.zeros((3, 1), dtype=np.float32), np.array(labels)
    source = Source("path", x, edges, y, classes=3)
    assert edge_homophily(source) == pytest.approx(share, nan_ok=True)
