"""FedTAD's cost is counted in operations here: seconds would depend on the machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.analyses import distillation_cost
from atoll.analyses.distillation_cost import (
    STATED,
    Sizes,
    client_work,
    cost_claim,
    operations,
    seconds,
    server_work,
)

TINY = Sizes(
    walk=2, nodes=30, pseudo=16, clients=2, features=8, classes=2, noise=4, iterations=1, hidden=4
)


def count(**sizes: int) -> int:
    return operations(server_work(replace(TINY, **sizes)))


def test_operations_grow_as_the_formula_says() -> None:
    one = count()
    assert count(iterations=3) == 3 * one  # I: exactly linear
    for name in ("clients", "features", "classes", "noise"):  # linear: equal steps cost the same
        base = getattr(TINY, name)
        values = [count(**{name: base * factor}) for factor in (1, 2, 3)]
        assert values[2] - values[1] == pytest.approx(values[1] - values[0], rel=0.35), name
        assert values[1] > values[0]
    # B: quadratic, so that the second difference is a positive constant.
    grown = np.diff([count(pseudo=16 * factor) for factor in (1, 2, 3, 4)], 2)
    assert grown[0] == grown[1] > 0


def test_walks_return_for_every_node() -> None:
    assert client_work(TINY)().shape == (30, 2)
    assert seconds(client_work(TINY), 1) > 0


def test_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([1.0, 8.0, 1.0, 2.0])
    monkeypatch.setattr(distillation_cost, "seconds", lambda work, repeats: next(spent))
    claim = cost_claim(("walk", "clients"), TINY, doublings=1)
    rows = [[cell.plain for cell in row] for row in claim.tables[0].rows]
    assert rows[0] == ["p", "client", "2 to 4", "1", "–", "3.00"]
    assert rows[1][:4] == ["N", "server", "2 to 4", "1"]
    assert rows[1][-1] == "1.00"
    assert claim.sentences == ("The cost grows faster than the paper states with: p.",)
    assert list(STATED)[:2] == ["walk", "nodes"]
