"""Which values of a reply can come from honest training on the data that a site declared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll.core.aggregate import Update
from atoll.core.errors import WireError
from atoll.core.task import Scores
from atoll.engines.plausible import Declared, check_values, too_long, update_norm

SITE, HIDDEN = Declared((5, 2, 3), 10), Declared((0, 0, 0), 0)
MODEL = {"a": torch.ones(4), "b": torch.zeros(2, 3)}


def scores(total: float = 5.0, auc: float = -1.0) -> Scores:
    confusion = torch.zeros(3, 2, 2, dtype=torch.float64)
    confusion[0, 0, 1] = total
    return Scores(confusion, torch.ones(3), torch.full((3,), auc))


def binned(total: float) -> Scores:
    bins = torch.zeros(3, 2, 8)
    bins[0, 1, 5] = total
    return replace(scores(1.0, 0.5), bins=bins)


@pytest.mark.parametrize(
    ("reply", "site"),
    [
        (Update(MODEL, torch.tensor(10)), SITE),
        (Update(MODEL, torch.tensor(1)), HIDDEN),
        (scores(), SITE),
        (scores(0.0, 0.5), HIDDEN),
    ],
)
def test_honest_values_pass(reply: object, site: Declared) -> None:
    check_values(reply, site, epochs=3)


@pytest.mark.parametrize(
    ("reply", "site", "reason"),
    [
        (Update(MODEL, torch.tensor(-1.0)), SITE, "'weight' is -1; a plausible value is from 0"),
        (Update(MODEL, torch.tensor(10.5)), SITE, "'weight' is 10.5"),
        (Update(MODEL, torch.tensor(2)), HIDDEN, "'weight' is 2"),
        (Update({"a": torch.tensor([2e7])}, torch.tensor(1)), SITE, "'model.a' is 2e\\+07"),
        (binned(6.0), SITE, "bins \\(train\\)' is 6"),
        (binned(-1.0), SITE, "bins \\(train\\)' is -1"),
        (scores(6.0), SITE, "confusion \\(train\\)' is 6"),
        (scores(-1.0), SITE, "confusion \\(train\\)' is -1"),
        (scores(1.0), HIDDEN, "confusion \\(train\\)' is 1"),
        (scores(5.0, 1.5), SITE, "'auc' is 1.5"),
    ],
)
def test_values_that_the_data_cannot_give_are_refused(
    reply: object, site: Declared, reason: str
) -> None:
    with pytest.raises(WireError, match=reason):
        check_values(reply, site, epochs=3)


def test_an_update_is_compared_with_those_of_the_other_sites() -> None:
    moved = {"a": torch.full((4,), 3.0), "b": torch.zeros(2, 3)}
    assert update_norm(Update(moved, torch.tensor(1)), MODEL) == (4.0, 2.0)
    assert update_norm(scores(), MODEL) is None
    assert update_norm(Update(moved, torch.tensor(1)), torch.tensor(7)) == (6.0, 0.0)
    usual = {"a": (1.0, 2.0), "b": (2.0, 2.0), "c": (150.0, 2.0)}
    assert too_long(usual, limit=100) == {}
    found = too_long({**usual, "d": (1e20, 2.0)}, limit=100)
    assert list(found) == ["d"]
    assert found["d"].startswith("its update was refused: its norm is 1e+20, but the median")
    # Sites without training nodes do not move; an update of the model's own size is plausible.
    assert too_long({"a": (0.0, 2.0), "b": (0.0, 2.0), "c": (3.0, 2.0)}, limit=100) == {}
    assert too_long({"a": (1e20, 2.0)}, limit=100) == {}  # there is nothing to compare it with
