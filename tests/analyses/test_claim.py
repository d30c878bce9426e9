"""Common properties of all checked claims."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from atoll.analyses.claim import Claim, exponent
from atoll.present.chart import Axis, Chart, Line, Panels
from atoll.present.files import write_all
from atoll.present.tables import make_table


def test_exponents_of_powers() -> None:
    x = np.array([1.0, 2.0, 4.0, 8.0])
    assert exponent(x, 3 * x**1.5) == pytest.approx((1.5, 1.0))
    power, fit = exponent(np.repeat(x, 2), np.repeat(x, 2) * np.tile([1.0, 4.0], 4))
    assert power == pytest.approx(1.0)  # two lines of one slope: the fit runs between them
    assert 0.5 < fit < 0.9


def test_parts_and_files(tmp_path: Path) -> None:
    table = make_table(["a"], [["1"]], title="A table", caption="of ones")
    picture = Panels("", ((Chart("", Axis(), Axis(), (Line([0, 1], [0, 1]),)),),), (3, 3))
    claim = Claim("it", (table, table), ("It holds.",), picture, {"n": np.ones(2)})
    assert claim.parts()[-1] == "It holds."
    names = [path.name for path in write_all(tmp_path, claim.files())]
    assert names == ["it.csv", "it-2.csv", "it.json", "it.png"]
    numbers = json.loads((tmp_path / "it.json").read_text())
    assert numbers == {"sentences": ["It holds."], "n": [1.0, 1.0]}
