"""A column that predicts the label by itself is found, unlike noise and too few rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from atoll.data.own.columns import Column, Rows
from atoll.data.own.leakage import telling
from atoll.data.own.rules import Rule

Y = (np.arange(400) % 4 == 0).astype(np.int64)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (Y * 5 + np.arange(400) % 3, "predicts the label by itself (AUC 1.000)"),
        (np.where(np.arange(400) % 8, -1, np.arange(400) % 20), "certain of 50 % of one class"),
        (np.arange(400) % 7, ""),
    ],
)
def test_columns(values: np.ndarray, said: str) -> None:
    column = Column(pa.chunked_array([pa.array(values)]), "f", Rows("nodes.csv", str))
    found = telling(column, Rule(kind="number"), Y)
    assert said in found if said else found == ""
    assert telling(column, Rule(kind="number"), np.full(400, -1)) == ""
